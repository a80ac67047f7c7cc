//! Every kernel in every variant is valid, translates to the languages of all platforms, stays
//! within the limits that it claims and agrees with the Rust side; a few texts are pinned.

mod catalogue;

use std::collections::{BTreeMap, BTreeSet};

use catalogue::{every_kernel, parsed, validated};
use kyklos_shaders::{
    Access, AttendKernel, AttendVariant, BackwardKernel, BackwardVariant, BiasInput, DecodeKernel,
    DecodeVariant, Dialect, EMPTY_M, ENTRY_POINT, Kernel, Matrices, Storage, Sums, Vendor,
};
use naga::back::{hlsl, msl, spv};

/// WebGPU's default limits.
const MAX_STORAGE_BUFFERS: usize = 8;
const MAX_WORKGROUP_BYTES: u32 = 16384;
/// Workgroup memory of native platforms with matrix units, in bytes: Apple's, which has matrices of
/// 8 x 8, and NVIDIA's, which has less than AMD's and Intel's. A device is offered what fits its
/// own.
const WORKGROUP_BYTES_OF_8X8: u32 = 32768;
const WORKGROUP_BYTES_OF_16X16: u32 = 49152;
const MAX_INVOCATIONS: u32 = 256;

/// One test for all claims, because to read a text takes longer than to check it.
#[test]
fn every_kernel_is_valid_translates_stays_within_webgpus_limits_and_agrees_with_rust() {
    let kernels: Vec<Kernel> = every_kernel().into_iter().collect();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for kernels in kernels.chunks(kernels.len().div_ceil(threads)) {
            scope.spawn(move || {
                for kernel in kernels {
                    let module = parsed(kernel);
                    is_valid_and_translates_to_spirv_msl_and_hlsl(kernel, &module);
                    stays_within_webgpus_default_limits(kernel, &module);
                    writes_whole_vectors_to_shared_memory(kernel, &module);
                    has_the_uniforms_and_bindings_of_rust(kernel, &module);
                }
            });
        }
    });
}

fn is_valid_and_translates_to_spirv_msl_and_hlsl(kernel: &Kernel, module: &naga::Module) {
    let info = validated(kernel, module);
    let name = kernel.name();
    spv::write_vec(module, &info, &spv::Options { lang_version: (1, 3), ..Default::default() }, None)
        .unwrap_or_else(|error| panic!("{name} to SPIR-V: {error}"));
    msl::write_string(
        module,
        &info,
        &msl::Options { lang_version: (2, 4), fake_missing_bindings: true, ..Default::default() },
        &msl::PipelineOptions::default(),
    )
    .unwrap_or_else(|error| panic!("{name} to MSL: {error}"));
    if kernel.needs_matrices() {
        return;
    }
    let mut text = String::new();
    let options = hlsl::Options {
        shader_model: if kernel.needs_subgroups() {
            hlsl::ShaderModel::V6_0
        } else {
            hlsl::ShaderModel::V5_1
        },
        fake_missing_bindings: true,
        ..Default::default()
    };
    hlsl::Writer::new(&mut text, &options, &hlsl::PipelineOptions::default())
        .write(module, &info, None)
        .unwrap_or_else(|error| panic!("{name} to HLSL: {error}"));
}

fn stays_within_webgpus_default_limits(kernel: &Kernel, module: &naga::Module) {
    let name = kernel.name();
    let storage_buffers = kernel
        .bindings()
        .iter()
        .filter(|binding| matches!(binding.access, Access::Read | Access::ReadWrite))
        .count();
    assert!(storage_buffers <= MAX_STORAGE_BUFFERS, "{name}");
    let [entry] = &module.entry_points[..] else {
        panic!("{name}: one entry point");
    };
    assert_eq!(entry.name, ENTRY_POINT);
    assert_eq!(entry.workgroup_size, [kernel.workgroup_size(), 1, 1], "{name}");
    assert!(kernel.workgroup_size() <= MAX_INVOCATIONS, "{name}");
    let workgroup_bytes: u32 = module
        .global_variables
        .iter()
        .filter(|(_, variable)| variable.space == naga::AddressSpace::WorkGroup)
        .map(|(_, variable)| module.types[variable.ty].inner.size(module.to_ctx()))
        .sum();
    assert_eq!(workgroup_bytes, kernel.workgroup_bytes(), "{name}");
    let most = match kernel {
        Kernel::Attend(AttendKernel {
            variant: AttendVariant::Cooperative(Matrices { size: 8, .. }),
            ..
        }) => WORKGROUP_BYTES_OF_8X8,
        Kernel::AttendBackward(BackwardKernel {
            variant: BackwardVariant::Cooperative(Matrices { size: 8, .. }),
            ..
        }) => WORKGROUP_BYTES_OF_8X8,
        Kernel::Attend(AttendKernel { variant: AttendVariant::Cooperative(_), .. })
        | Kernel::AttendBackward(BackwardKernel { variant: BackwardVariant::Cooperative(_), .. }) => {
            WORKGROUP_BYTES_OF_16X16
        }
        _ => MAX_WORKGROUP_BYTES,
    };
    assert!(workgroup_bytes <= most, "{name}: {workgroup_bytes} bytes");
}

/// A write to a component may write the whole vector (WGSL, "component reference from vector
/// reference"; Metal and Direct3D do): if two threads write two components, one write may be lost.
fn writes_whole_vectors_to_shared_memory(kernel: &Kernel, module: &naga::Module) {
    let info = validated(kernel, module);
    let [entry] = &module.entry_points[..] else {
        panic!("{}: one entry point", kernel.name());
    };
    let mut written = Vec::new();
    written_pointers(&entry.function.body, &mut written);
    assert!(!written.is_empty(), "{}: a kernel writes something", kernel.name());
    for pointer in written {
        let component = matches!(
            info.get_entry_point(0)[pointer].ty.inner_with(&module.types),
            naga::TypeInner::ValuePointer {
                size: None,
                space: naga::AddressSpace::WorkGroup | naga::AddressSpace::Storage { .. },
                ..
            }
        );
        assert!(!component, "{}: writes a component of a vector in shared memory", kernel.name());
    }
}

fn written_pointers(block: &naga::Block, written: &mut Vec<naga::Handle<naga::Expression>>) {
    for statement in block {
        match statement {
            naga::Statement::Store { pointer, .. } => written.push(*pointer),
            naga::Statement::Block(inner) => written_pointers(inner, written),
            naga::Statement::If { accept, reject, .. } => {
                written_pointers(accept, written);
                written_pointers(reject, written);
            }
            naga::Statement::Loop { body, continuing, .. } => {
                written_pointers(body, written);
                written_pointers(continuing, written);
            }
            naga::Statement::Switch { cases, .. } => {
                cases.iter().for_each(|case| written_pointers(&case.body, written));
            }
            _ => {}
        }
    }
}

fn has_the_uniforms_and_bindings_of_rust(kernel: &Kernel, module: &naga::Module) {
    let name = kernel.name();
    let bindings = kernel.bindings();
    let bound: Vec<_> = module
        .global_variables
        .iter()
        .filter_map(|(_, variable)| variable.binding.as_ref().map(|binding| (binding, variable)))
        .collect();
    assert_eq!(bound.len(), bindings.len(), "{name}");
    for (place, variable) in bound {
        assert_eq!(place.group, 0);
        let binding = bindings[place.binding as usize];
        assert_eq!(variable.name.as_deref(), Some(binding.name), "{name}");
        let access = match variable.space {
            naga::AddressSpace::Uniform => Access::Uniform,
            naga::AddressSpace::Storage { access } if access.contains(naga::StorageAccess::STORE) => {
                Access::ReadWrite
            }
            naga::AddressSpace::Storage { .. } => Access::Read,
            naga::AddressSpace::Handle => Access::Texture,
            other => panic!("{name}: {other:?}"),
        };
        assert_eq!(access, binding.access, "{name}: {}", binding.name);
        if access != Access::Uniform {
            continue;
        }
        let uniform = kernel.uniform();
        let naga::TypeInner::Struct { members, span } = &module.types[variable.ty].inner else {
            panic!("{name}: the uniform is a struct");
        };
        assert_eq!(*span as usize, uniform.bytes, "{name}");
        assert_eq!(uniform.bytes % 16, 0, "{name}: uniform structs end on 16 bytes");
        assert_eq!(members.len(), uniform.fields.len(), "{name}");
        for (member, field) in members.iter().zip(uniform.fields) {
            assert_eq!(member.name.as_deref(), Some(field.name), "{name}");
            assert_eq!(member.offset as usize, field.offset, "{name}: {}", field.name);
        }
    }
}

#[test]
fn names_tell_kernels_apart() {
    let kernels = every_kernel();
    let names: std::collections::HashSet<_> = kernels.iter().map(Kernel::name).collect();
    let distinct: std::collections::HashSet<_> = kernels.iter().collect();
    assert_eq!(names.len(), distinct.len());
}

/// A backward kernel computes a logit anew. If it rounded the logit otherwise than the forward
/// kernel, weights would not fit the log-sum-exp; and a pair may be in a full run of one kernel and
/// in a tested run of the other.
#[test]
fn all_loops_of_kernels_for_software_drivers_add_up_a_logit_alike() {
    let mut orders: BTreeMap<u32, BTreeMap<Vec<u32>, String>> = BTreeMap::new();
    for kernel in every_kernel() {
        let (head_dim, logit) = match kernel {
            Kernel::Attend(AttendKernel {
                variant: AttendVariant::SubgroupBroadcast { .. },
                head_dim,
                ..
            }) => (head_dim, "s0_0_"),
            Kernel::AttendBackward(BackwardKernel {
                variant: BackwardVariant::Lanes { .. },
                head_dim,
                ..
            }) => (head_dim, "S0_chain"),
            _ => continue,
        };
        let of_kernel = orders_of_logits(&kernel.source(Dialect::Naga), logit);
        assert!(!of_kernel.is_empty(), "{}", kernel.name());
        for order in of_kernel {
            assert_eq!(order.len(), head_dim as usize, "{}", kernel.name());
            orders.entry(head_dim).or_default().insert(order, kernel.name());
        }
    }
    for (head_dim, orders) in orders {
        assert_eq!(orders.len(), 1, "head dim {head_dim}: {:?}", orders.values());
    }
}

/// For each loop of a text the sum to which each element of a logit is added. The statements of a
/// loop are in the order of the elements.
fn orders_of_logits(text: &str, logit: &str) -> BTreeSet<Vec<u32>> {
    let mut orders = BTreeSet::new();
    let mut order = Vec::new();
    for line in text.lines().map(str::trim_start) {
        let statement = line.strip_prefix("var ").unwrap_or(line);
        let sum = statement.strip_prefix(logit).and_then(|rest| rest.split_once(" = "));
        if let Some((sum, _)) = sum {
            order.push(sum.parse().unwrap_or_else(|_| panic!("{line}")));
        } else if line.starts_with("for ") && !order.is_empty() {
            orders.insert(std::mem::take(&mut order));
        }
    }
    orders.insert(order);
    orders
}

#[test]
fn only_the_browsers_dialect_enables_subgroups() {
    const ENABLE: &str = "enable subgroups;\n\n";
    for kernel in every_kernel() {
        let tint = kernel.source(Dialect::Tint);
        assert_eq!(tint.contains(ENABLE), kernel.needs_subgroups(), "{}", kernel.name());
        assert_eq!(tint.replace(ENABLE, ""), kernel.source(Dialect::Naga));
    }
}

#[test]
fn the_empty_maximum_survives_printing() {
    let source = Kernel::ResetState.source(Dialect::Naga);
    let printed = source
        .split("vec2<f32>(")
        .nth(1)
        .and_then(|rest| rest.split('f').next())
        .expect("reset writes a literal");
    assert_eq!(printed.parse::<f32>().map(f32::to_bits), Ok(EMPTY_M.to_bits()));
}

/// Three texts to read, and to see in a diff what a change does to them: the tiles in workgroup
/// memory of the kernel that runs on every GPU, with bf16 and a softcap; the parts of decoding,
/// with f16 and a mask of bits; the unrolled registers of the kernels for software drivers, with
/// the gradients of keys and values in one pass over f32. The other tests hold the texts of all
/// variants to their claims, `scripts/check/shaders.sh` compiles them, and the suites of backends
/// hold their results to the oracle.
///
/// Set `KYKLOS_BLESS=1` to write the files anew.
#[test]
fn pinned_texts_have_not_changed() {
    for kernel in [
        Kernel::Attend(AttendKernel {
            variant: AttendVariant::portable(Vendor::Other, 16, false),
            storage: Storage::Bf16,
            head_dim: 16,
            softcap: true,
            bias: BiasInput::None,
        }),
        Kernel::Decode(DecodeKernel {
            variant: DecodeVariant::Portable,
            storage: Storage::F16,
            head_dim: 16,
            slots: 2,
            softcap: false,
            bias: BiasInput::Visible,
        }),
        Kernel::AttendBackward(BackwardKernel {
            variant: BackwardVariant::lanes(4, 8),
            sums: Sums::KeysValues,
            storage: Storage::F32,
            head_dim: 8,
            softcap: true,
            bias: BiasInput::None,
        }),
    ] {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/golden")
            .join(format!("{}.wgsl", kernel.name()));
        let source = kernel.source(Dialect::Naga);
        if std::env::var_os("KYKLOS_BLESS").is_some() {
            std::fs::create_dir_all(path.parent().expect("joined above")).unwrap();
            std::fs::write(&path, &source).unwrap();
        }
        let pinned = std::fs::read_to_string(&path)
            .unwrap_or_else(|error| panic!("{}: {error}; run with KYKLOS_BLESS=1", path.display()));
        assert!(
            pinned == source,
            "{} differs; if that is meant, run with KYKLOS_BLESS=1 and look at the diff",
            path.display()
        );
    }
}

#[test]
fn matrices_with_more_lanes_than_a_row_has_parts_are_not_made() {
    let made = |size, subgroup_size, subgroups, head_dim| {
        let matrices = Matrices { size, subgroup_size, halves: false, subgroups };
        AttendVariant::cooperative(matrices, Storage::F16, head_dim).is_some()
    };
    assert!(made(8, 32, 8, 64) && made(16, 64, 4, 256) && made(8, 64, 1, 64));
    assert!(!made(8, 64, 4, 64), "16 lanes for 8 columns");
    assert!(!made(16, 256, 2, 64) && !made(8, 4, 2, 64) && !made(8, 8, 0, 64) && !made(16, 32, 8, 72));
}

#[test]
fn names_of_attention_variants_are_read_again_and_others_refused() {
    for kernel in every_kernel() {
        if let Kernel::Attend(kernel) = kernel {
            assert_eq!(kernel.variant.name().parse(), Ok(kernel.variant));
        }
    }
    let others = [
        "",
        "portable",
        "portable-",
        "portable-04x4",
        "portable-+4x4",
        "portable-4",
        "portable-4x4x1",
        "subgroup-broadcast-8",
        "subgroup-broadcast-8x3x1",
        "cooperative-8x16-8x1",
        "cooperative-8x8",
        "cooperative-16x16-16-64x2",
        "cooperative-16x16-16-32-64x2",
        "lanes-8",
        "portable-99999999999x4",
    ];
    for other in others {
        assert!(other.parse::<AttendVariant>().is_err(), "{other}");
    }
}
