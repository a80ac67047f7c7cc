//! Tuned choices: when they are used, and that results do not depend on them.

use kyklos::backend::wgpu::{
    AttendVariant, KernelChoice, Probe, TuningEntry, TuningKey, TuningTable, WgpuBackend, WgpuOptions,
};
use kyklos::backend::{Backend, StateShape};
use kyklos::{AttentionProblem, Dtype, Mask};
use libtest_mimic::Failed;

use crate::case::Case;

type Test = fn() -> Result<(), Failed>;

pub(crate) const ALL: [(&str, Test); 5] = [
    ("every_choice_is_used_and_equals_f64", every_choice_is_used_and_equals_f64),
    ("an_entry_holds_only_while_all_of_its_key_does", an_entry_holds_only_while_all_of_its_key_does),
    ("what_the_device_has_not_is_passed_over", what_the_device_has_not_is_passed_over),
    ("a_variant_can_be_named_exactly", a_variant_can_be_named_exactly),
    ("the_devices_clock_runs_where_it_has_one", the_devices_clock_runs_where_it_has_one),
];

/// The shape of the computed case.
const SHAPE: [u32; 5] = [2, 67, 6, 2, 32];
const STATE: StateShape = StateShape { batch: 2, rows: 67, heads: 6, dim: 32 };

fn open(kernel: KernelChoice, entries: &[TuningEntry]) -> Result<WgpuBackend, Failed> {
    let mut table = TuningTable::default();
    for entry in entries {
        table.set(entry.clone());
    }
    let options = WgpuOptions { kernel, tuned: Some(table), ..WgpuOptions::default() };
    Ok(WgpuBackend::with_options(0, &options)?)
}

/// A key, and a variant that the device has but does not use by default.
fn displacing(kernel: KernelChoice) -> Result<(TuningKey, AttendVariant), Failed> {
    let plain = open(kernel, &[])?;
    let choices = plain.attend_choices(Dtype::F32, STATE.dim)?;
    assert_eq!(plain.attend_variant(Dtype::F32, STATE)?, (choices[0], false));
    Ok((plain.tuning_key(Dtype::F32, STATE)?, choices[1]))
}

fn every_choice_is_used_and_equals_f64() -> Result<(), Failed> {
    let plain = open(KernelChoice::Auto, &[])?;
    let key = plain.tuning_key(Dtype::F32, STATE)?;
    let problem = AttentionProblem::new(SHAPE, Dtype::F32, Mask::full())?;
    let mut tiles = std::collections::HashSet::new();
    for variant in plain.attend_choices(Dtype::F32, STATE.dim)? {
        let tuned = open(KernelChoice::Auto, &[TuningEntry { key: key.clone(), variant }])?;
        assert_eq!(tuned.attend_variant(Dtype::F32, STATE)?, (variant, true));
        assert!(tuned.info().kernel.ends_with(", tuned for 1 case"), "{}", tuned.info().kernel);
        tiles.insert(tuned.tile_shape(&problem, STATE).q_rows);
        Case::new(SHAPE, Dtype::F32, "causal").check(&tuned, &variant.name());
        // Another size, head dim or dtype: the measurements do not apply.
        let others = [StateShape { rows: 17, ..STATE }, StateShape { dim: 64, ..STATE }];
        assert!(others.iter().all(|other| !tuned.attend_variant(Dtype::F32, *other).unwrap().1));
        assert!(!tuned.attend_variant(Dtype::F16, STATE)?.1);
    }
    assert!(tiles.len() >= 3, "the kernels really differ: {tiles:?}");
    Ok(())
}

fn an_entry_holds_only_while_all_of_its_key_does() -> Result<(), Failed> {
    let (key, variant) = displacing(KernelChoice::Auto)?;
    let changes: [fn(&mut TuningKey); 11] = [
        |key| key.adapter.name.push('x'),
        |key| key.adapter.vendor ^= 1,
        |key| key.adapter.device ^= 1,
        |key| key.adapter.backend.push('x'),
        |key| key.adapter.driver.push('x'),
        |key| key.adapter.driver_info.push('x'),
        |key| key.kernel = "portable".to_owned(),
        |key| key.dtype = "f16".to_owned(),
        |key| key.head_dim = 64,
        |key| key.bucket.row_heads_log4 += 1,
        |key| key.sources = key.sources.replace(|_: char| true, "0"),
    ];
    assert!(
        open(KernelChoice::Auto, &[TuningEntry { key: key.clone(), variant }])?
            .attend_variant(Dtype::F32, STATE)?
            .1
    );
    for (index, change) in changes.into_iter().enumerate() {
        let mut other = key.clone();
        change(&mut other);
        let tuned = open(KernelChoice::Auto, &[TuningEntry { key: other, variant }])?;
        assert!(!tuned.attend_variant(Dtype::F32, STATE)?.1, "change {index}");
    }
    Ok(())
}

fn what_the_device_has_not_is_passed_over() -> Result<(), Failed> {
    let (key, _) = displacing(KernelChoice::Auto)?;
    for name in ["subgroup-broadcast-64x2", "subgroup-broadcast-8x400", "portable-3x4", "cooperative-8x8-8x1"]
    {
        let entry = TuningEntry { key: key.clone(), variant: name.parse()? };
        assert!(!open(KernelChoice::Auto, &[entry])?.attend_variant(Dtype::F32, STATE)?.1, "{name}");
    }
    let mut odd = key.clone();
    (odd.head_dim, odd.dtype) = (7, "f8".to_owned());
    open(KernelChoice::Auto, &[TuningEntry { key: odd, variant: "portable-1x4".parse()? }])?;
    Ok(())
}

fn a_variant_can_be_named_exactly() -> Result<(), Failed> {
    let variant: AttendVariant = "portable-1x4".parse()?;
    let exactly = open(KernelChoice::Exactly(variant), &[])?;
    assert_eq!(exactly.attend_variant(Dtype::F32, STATE)?, (variant, false));
    assert_eq!(exactly.info().kernel, "portable-1x4");
    for name in ["portable-8x4", "subgroup-broadcast-64x1"] {
        let error = WgpuBackend::with_options(
            0,
            &WgpuOptions { kernel: KernelChoice::Exactly(name.parse()?), ..WgpuOptions::default() },
        );
        assert!(error.is_err(), "{name}");
    }
    Ok(())
}

fn the_devices_clock_runs_where_it_has_one() -> Result<(), Failed> {
    let options = WgpuOptions { timestamps: true, ..WgpuOptions::default() };
    let backend = WgpuBackend::with_options(0, &options)?;
    let case = Case::new(SHAPE, Dtype::F32, "full");
    case.check(&backend, "with timestamps");
    let first = pollster::block_on(backend.device_seconds())?;
    assert!(first.is_none_or(|seconds| seconds > 0.0 && seconds < 600.0), "{first:?}");
    // No kernel has run since.
    assert_eq!(pollster::block_on(backend.device_seconds())?, None);
    assert_eq!(pollster::block_on(open(KernelChoice::Auto, &[])?.device_seconds())?, None);
    Ok(())
}

/// On a device with matrix units. The smallest head dim for which every such device has a kernel.
pub(crate) fn a_probe_finds_agreement_and_times(
    matrices: &WgpuBackend,
    portable: &WgpuBackend,
    measure: fn(&WgpuBackend, usize) -> kyklos::Result<Option<Probe>>,
) {
    let probe = measure(matrices, 16).unwrap().expect("a kernel for matrix units");
    assert!(probe.agrees(), "{probe:?}");
    assert!(probe.difference > 0.0, "weights in f16 round: {probe:?}");
    assert!(probe.portable_s > 0.0 && probe.matrices_s > 0.0, "{probe:?}");
    assert_eq!(measure(matrices, 24 + 256).unwrap(), None, "no such kernel");
    assert!(measure(matrices, 7).is_err());
    assert_eq!(measure(portable, 16).unwrap(), None, "opened without matrix units");
}
