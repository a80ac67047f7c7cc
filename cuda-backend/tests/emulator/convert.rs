//! Conversions between storage types, and to 8-bit codes and back: bit for bit against their
//! definitions in f64.

use kyklos::Dtype;
use kyklos::backend::Scales;
use kyklos_cuda::{CodesArguments, CodesKernel, ConvertArguments, Direction, SMALL_THREADS, convert_kernel};
use kyklos_oracle::inputs::{TensorId, normal};

use crate::job::{Job, Timing, numbers};
use crate::parallel::in_parallel;
use crate::program::{Program, emulator};

/// Elements of the buffer before the converted ones.
const FIRST: usize = 24;

/// The non-negative numbers of a 16-bit type by its definition, in increasing order, up to
/// infinity.
fn sizes(dtype: Dtype) -> Vec<f64> {
    let (fraction_bits, bias) = if dtype == Dtype::F16 { (10, 15) } else { (7, 127) };
    let one = 1 << fraction_bits;
    let infinite = (2 * bias + 1) * one;
    let finite = (0..infinite).map(|n: i32| {
        let (exponent, fraction) = (n / one, n % one);
        let (leading, power) = if exponent == 0 { (0, 1) } else { (one, exponent) };
        f64::from(leading + fraction) * 2f64.powi(power - bias - fraction_bits)
    });
    finite.chain([f64::INFINITY]).collect()
}

/// The nearest of `sizes`, on a tie the one with an even index. Infinity counts as the next number
/// behind the largest.
fn nearest(sizes: &[f64], x: f32) -> u16 {
    let sign = u16::try_from(x.to_bits() >> 31 << 15).unwrap();
    if x.is_nan() {
        return u16::MAX;
    }
    let (size, infinite) = (f64::from(x).abs(), sizes.len() - 1);
    let at = |n: usize| if n == infinite { 2.0 * sizes[n - 1] - sizes[n - 2] } else { sizes[n] };
    let below = sizes.partition_point(|number| *number <= size) - 1;
    let up = below < infinite && {
        let (down, up) = (size - at(below), at(below + 1) - size);
        up < down || (up == down && below % 2 == 1)
    };
    sign | u16::try_from(below + usize::from(up)).unwrap()
}

/// All numbers of a 16-bit type, the midpoints between two of them, the f32 neighbours of these,
/// and special values.
fn around(sizes: &[f64]) -> Vec<f32> {
    let mut all = vec![f32::MAX, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -f32::NAN];
    // NaNs whose mantissa is 0 in the upper 16 bits, and subnormal numbers, which a device may flush to
    // 0.
    all.extend([0x7f80_0001, 0xff80_0001, 1, 0x8000_0001, 0x007f_ffff].map(f32::from_bits));
    let finite = &sizes[..sizes.len() - 1];
    let last = [finite[finite.len() - 1], 2.0 * finite[finite.len() - 1] - finite[finite.len() - 2]];
    for (n, pair) in finite.windows(2).chain([&last[..]]).enumerate() {
        let sign = if n % 2 == 0 { 1.0 } else { -1.0 };
        let middle = (sign * (pair[0] + pair[1]) / 2.0) as f32;
        all.extend([(sign * pair[0]) as f32, middle, middle.next_up(), middle.next_down()]);
    }
    all.extend([0.0; 8]);
    all.truncate(all.len() / 8 * 8);
    all
}

/// Converts `elements` (a multiple of 8) from the middle of a buffer to the middle of another one.
/// Elements before them must not change. Memory behind them is inaccessible. Also returns the words
/// of the report.
fn converted<E: bytemuck::Pod>(
    program: &Program,
    (from, elements): (Dtype, &[E]),
    into: Dtype,
    timing: Timing,
) -> Result<(Vec<u8>, Vec<u32>), String> {
    let mut job = Job::default();
    let source = job.upload(&[&[E::zeroed(); FIRST], elements].concat());
    let target = job.poisoned((FIRST + elements.len()) * into.bytes());
    let report = job.upload(&[0_u32; 4]);
    let arguments = ConvertArguments {
        from: source.address + (FIRST * from.bytes()) as u64,
        into: target.address + (FIRST * into.bytes()) as u64,
        eights: (elements.len() / 8) as u64,
        overflow: report.address,
    };
    let blocks = (elements.len() / 8).div_ceil(SMALL_THREADS as usize);
    job.launch(&convert_kernel(from, into).unwrap(), [blocks, 1, 1], 0, &arguments);
    job.bring(target);
    job.bring(report);
    let (results, _) = job.run(program, timing, 2)?;
    let (before, wanted) = results[0].split_at(FIRST * into.bytes());
    if before.iter().any(|byte| *byte != 0xff) {
        return Err("written before the first element".to_owned());
    }
    Ok((wanted.to_vec(), numbers(&results[1])))
}

/// Converts f32 to a 16-bit type and back. Returns what is wrong.
pub(crate) fn judge_types(program: &Program, dtype: Dtype, timing: Timing) -> Result<(), String> {
    let sizes = sizes(dtype);
    let all = around(&sizes);
    let (narrow, report) = converted(program, (Dtype::F32, &all), dtype, timing)?;
    let narrow: Vec<u16> = numbers(&narrow);
    // Some are beyond the range of f16, which is the only one that a report is about.
    if report != [u32::from(dtype == Dtype::F16), 0, 0, 0] {
        return Err(format!("reported {report:?}"));
    }
    judge_reports(program, dtype, timing)?;
    let is_nan = |bits: u16| usize::from(bits & 0x7fff) >= sizes.len();
    for (x, bits) in all.iter().zip(&narrow) {
        let right = nearest(&sizes, *x);
        if *bits != right && !(is_nan(*bits) && is_nan(right)) {
            return Err(format!("{x:e} is {bits:#06x} in {dtype}, not {right:#06x}"));
        }
    }
    let every: Vec<u16> = (0..=u16::MAX).collect();
    let (wide, report) = converted(program, (dtype, &every), Dtype::F32, timing)?;
    let wide: Vec<f32> = numbers(&wide);
    if report != [0; 4] {
        return Err("reported where nothing can overflow".to_owned());
    }
    for (bits, x) in every.iter().zip(&wide) {
        let right = sizes.get(usize::from(bits & 0x7fff)).map_or(f64::NAN, |size| *size) as f32;
        let right = if *bits >> 15 == 1 { -right } else { right };
        if x.to_bits() != right.to_bits() && !(x.is_nan() && right.is_nan()) {
            return Err(format!("{bits:#06x} of {dtype} is {x:e}, not {right:e}"));
        }
    }
    Ok(())
}

/// Each of eight elements of a thread alone, at the edge of the range of f16.
fn judge_reports(program: &Program, dtype: Dtype, timing: Timing) -> Result<(), String> {
    let fine = [65_519.996, f32::INFINITY, f32::NAN, -65_519.996, 0.0, f32::NEG_INFINITY, -f32::NAN, 1e-45];
    for place in 0..=16 {
        let mut all: Vec<f32> = [fine, fine].concat();
        if let Some(x) = all.get_mut(place) {
            *x = if place % 2 == 0 { 65_520.0 } else { -f32::MAX };
        }
        let beyond = dtype == Dtype::F16 && place < 16;
        let (_, report) = converted(program, (Dtype::F32, &all), dtype, timing)?;
        if report != [u32::from(beyond), 0, 0, 0] {
            return Err(format!("reported {report:?}, element {place} is beyond the range"));
        }
    }
    Ok(())
}

#[test]
fn every_16_bit_number_and_every_midpoint_is_rounded_to_nearest_even() {
    for (dtype, timing) in [(Dtype::F16, Timing::Eager), (Dtype::Bf16, Timing::Late)] {
        judge_types(emulator(), dtype, timing).unwrap();
    }
}

/// The indices of the elements that share each scale, in the order of the scales.
fn groups([batch, tokens, heads, dim]: [usize; 4], of: Scales) -> Vec<Vec<usize>> {
    let channels = heads * dim;
    match of {
        Scales::Rows => {
            (0..batch * tokens * heads).map(|row| (row * dim..(row + 1) * dim).collect()).collect()
        }
        Scales::Channels => (0..batch)
            .flat_map(|entry| (0..tokens).step_by(64).map(move |first| (entry, first)))
            .flat_map(|at| (0..channels).map(move |channel| (at, channel)))
            .map(|((entry, first), channel)| {
                let together = first..tokens.min(first + 64);
                together.map(|token| (entry * tokens + token) * channels + channel).collect()
            })
            .collect(),
    }
}

/// Numbers of a different magnitude in each group, with a different special case in each group in
/// turn.
fn made_up(groups: &[Vec<usize>], elements: usize) -> Vec<f32> {
    let mut all: Vec<f32> = (0..elements as u64).map(|i| normal(7, TensorId::V, i)).collect();
    for (group, places) in groups.iter().enumerate() {
        let mut each = |make: &dyn Fn(usize, f32) -> f32| {
            places.iter().enumerate().for_each(|(n, place)| all[*place] = make(n, all[*place]));
        };
        match group % 16 {
            0 => each(&|_, _| 0.0),
            1 => each(&|_, _| f32::NAN),
            // Elements that are not finite do not count for a scale, wherever they are.
            2 => each(&|n, x| if n == group / 16 % 8 { f32::NAN } else { x }),
            3 => each(&|n, x| [f32::INFINITY, f32::NEG_INFINITY].get(n).copied().unwrap_or(x)),
            4 => each(&|n, _| if n == 0 { -0.0 } else { 0.0 }),
            // Scales around the smallest normal number, and the largest number.
            5 => each(&|n, x| if n == 0 { 127.0 * f32::MIN_POSITIVE } else { x * 1e-37 }),
            6 => each(&|n, x| if n == 0 { -127.0 * f32::MIN_POSITIVE * 0.9999 } else { x * 1e-38 }),
            7 => each(&|n, x| if n == 0 { f32::MAX } else { x * 1e37 }),
            8 => each(&|_, x| x * 1e-42),
            // Ties, with steps that are powers of two and with others.
            9 => each(&|n, _| if n == 0 { -127.0 } else { n as f32 * 3.0 % 127.0 - 63.5 }),
            10..13 => {
                let step = (129 + 2 * group % 127) as f32 / 1024.0;
                each(&|n, _| step * if n == 1 { 127.0 } else { n as f32 * 5.0 % 127.0 - 62.5 });
            }
            _ => each(&|_, x| x * 10f32.powi(group as i32 % 5 - 2)),
        }
    }
    all
}

/// Converts to codes and back. Returns what is wrong.
pub(crate) fn judge_codes(
    program: &Program,
    of: Scales,
    dtype: Dtype,
    shape: [usize; 4],
    timing: Timing,
) -> Result<(), String> {
    let (groups, elements) = (groups(shape, of), shape.iter().product());
    let sizes = if dtype == Dtype::F32 { Vec::new() } else { sizes(dtype) };
    let value = |bits: u16| {
        let size = sizes.get(usize::from(bits & 0x7fff)).map_or(f32::NAN, |size| *size as f32);
        if bits >> 15 == 1 { -size } else { size }
    };
    // The inputs, rounded to the storage type.
    let rounded = |x: f32| if dtype == Dtype::F32 { x } else { value(nearest(&sizes, x)) };
    let exact: Vec<f32> = made_up(&groups, elements).into_iter().map(rounded).collect();

    let mut job = Job::default();
    let before = [9.0_f32; FIRST];
    let source = match dtype {
        Dtype::F32 => job.upload(&[&before[..], &exact].concat()),
        _ => {
            let all = before.iter().chain(&exact);
            job.upload(&all.map(|x| nearest(&sizes, *x)).collect::<Vec<_>>())
        }
    };
    let (codes, scales) = (job.poisoned(elements), job.poisoned(groups.len() * 4));
    let back = job.poisoned((FIRST + elements) * dtype.bytes());
    let [batch, tokens, heads, dim] = shape.map(|n| u32::try_from(n).unwrap());
    for (direction, data) in [(Direction::ToCodes, source), (Direction::FromCodes, back)] {
        let kernel = CodesKernel::of(direction, of, dtype, shape).unwrap();
        let arguments = CodesArguments {
            data: data.address + (FIRST * dtype.bytes()) as u64,
            codes: codes.address,
            scales: scales.address,
            batch,
            tokens,
            heads,
            dim,
            lanes: kernel.lanes,
            reserved: 0,
        };
        job.launch(&kernel.name, [kernel.blocks, 1, 1], kernel.shared_bytes, &arguments);
    }
    [codes, scales, back].into_iter().for_each(|buffer| job.bring(buffer));
    let (results, _) = job.run(program, timing, 3)?;
    let (codes, scales): (Vec<i8>, Vec<f32>) = (numbers(&results[0]), numbers(&results[1]));
    let (before, back) = results[2].split_at(FIRST * dtype.bytes());
    if before.iter().any(|byte| *byte != 0xff) {
        return Err("written before the first element".to_owned());
    }
    let back: Vec<f32> = match dtype {
        Dtype::F32 => numbers(back),
        _ => numbers::<u16>(back).into_iter().map(value).collect(),
    };

    for (group, places) in groups.iter().enumerate() {
        let finite = places.iter().map(|place| exact[*place]).filter(|x| x.is_finite());
        let scale = (finite.map(|x| f64::from(x).abs()).fold(0.0, f64::max) / 127.0) as f32;
        let scale = if scale < f32::MIN_POSITIVE { 0.0 } else { scale };
        if scales[group] != scale {
            return Err(format!("scale {group} is {:e}, not {scale:e}", scales[group]));
        }
        for place in places {
            let (x, code) = (exact[*place], codes[*place]);
            // Rounded to f32 first, as a division in f32 is.
            let quotient = if scale == 0.0 { 0.0 } else { (f64::from(x) / f64::from(scale)) as f32 };
            let right = if x.is_finite() { quotient.round_ties_even() as i8 } else { i8::MIN };
            if code != right {
                return Err(format!("{x:e} by {scale:e} at {place} is {code}, not {right}"));
            }
            let right = if x.is_finite() { rounded(f32::from(code) * scale) } else { f32::NAN };
            let got = back[*place];
            if got != right && !(got.is_nan() && right.is_nan()) {
                return Err(format!("{code} times {scale:e} at {place} is {got:e}, not {right:e}"));
            }
        }
    }
    Ok(())
}

/// Token counts that are no multiple of the group size, last groups of one token and more, more
/// channels than a block has and fewer, rows of one lane, of some lanes and of a whole warp.
const SHAPES: [[usize; 4]; 9] = [
    [2, 150, 3, 24],
    [1, 64, 1, 8],
    [3, 7, 2, 72],
    [1, 65, 2, 128],
    [2, 1, 1, 256],
    [2, 3, 1, 192],
    [1, 129, 3, 96],
    [1, 63, 5, 64],
    [40, 1, 9, 16],
];

#[test]
fn codes_scales_and_restored_elements_match_their_definition() {
    let mut trials = Vec::new();
    for (n, shape) in SHAPES.into_iter().enumerate() {
        for (i, dtype) in [Dtype::F32, Dtype::F16, Dtype::Bf16].into_iter().enumerate() {
            for of in [Scales::Channels, Scales::Rows] {
                trials.push((of, dtype, shape, Timing::ALL[(n + i) % 3]));
            }
        }
    }
    let failures = in_parallel(trials.len(), |n| {
        let (of, dtype, shape, timing) = trials[n];
        let judged = judge_codes(emulator(), of, dtype, shape, timing);
        judged.err().map(|words| format!("{of:?} {dtype} {shape:?} {timing:?}: {words}"))
    });
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn head_dims_without_a_codes_kernel_are_refused() {
    let of = |dim| CodesKernel::of(Direction::ToCodes, Scales::Rows, Dtype::F16, [1, 10, 3, dim]);
    assert_eq!(of(96).map(|kernel| (kernel.lanes, kernel.blocks)), Some((16, 2)));
    assert_eq!(of(256).map(|kernel| (kernel.lanes, kernel.blocks)), Some((32, 4)));
    assert_eq!([of(264), of(20)], [None, None]);
    assert_eq!(convert_kernel(Dtype::F16, Dtype::Bf16), None);
    assert_eq!(convert_kernel(Dtype::F32, Dtype::F32), None);
}
