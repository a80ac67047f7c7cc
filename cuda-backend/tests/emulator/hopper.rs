//! The emulator's mbarriers, TMA and wgmma against the definitions of the PTX ISA, and the faults
//! that it must find.

use bytemuck::Pod;
use half::{bf16, f16};
use kyklos::Dtype;
use kyklos_cuda::{TensorArgument, TensorMap};

use crate::job::{Job, Timing, numbers};
use crate::program::emulator;

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct BoxProbe {
    map: TensorMap,
    out: u64,
    at: [i32; 4],
    bytes: u32,
    reserved: [u32; 25],
}

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Probe {
    input: u64,
    output: u64,
    option: u32,
    zero: u32,
}

/// The first `words` words of a probe's output.
fn probe<A: Pod>(
    name: &str,
    timing: Timing,
    words: usize,
    arguments: impl Fn(&mut Job, u64) -> A,
) -> Result<Vec<u32>, String> {
    seeded_probe(name, (timing, 1), words, arguments)
}

fn seeded_probe<A: Pod>(
    name: &str,
    (timing, seed): (Timing, u64),
    words: usize,
    arguments: impl Fn(&mut Job, u64) -> A,
) -> Result<Vec<u32>, String> {
    let mut job = Job::default();
    let out = job.poisoned(words * 4);
    let arguments = arguments(&mut job, out.address);
    job.launch(name, [1, 1, 1], 32 * 1024, &arguments);
    job.bring(out);
    Ok(numbers(&job.run(emulator(), timing, seed)?.0[0]))
}

/// Copies a box of 8 rows of a tensor of [2 batch entries, 5 rows, 3 heads, 72 elements], whose
/// elements are 1, 2, 3 and so on.
fn box_probe(job: &mut Job, out: u64, at: [i32; 4], tile_rows: u32) -> BoxProbe {
    let elements: Vec<u16> = (1..=2 * 5 * 3 * 72).collect();
    let tensor = TensorArgument {
        data: job.upload(&elements).address,
        batch_stride: 5 * 3 * 72,
        row_stride: 3 * 72,
        head_stride: 72,
    };
    let map = TensorMap::new(&tensor, Dtype::Bf16, [2, 5, 3, 72], tile_rows);
    BoxProbe { map, out, at, bytes: tile_rows * 128, reserved: [0; 25] }
}

#[test]
fn a_box_is_copied_to_swizzled_rows_with_zeros_outside_of_the_tensor() {
    for timing in Timing::ALL {
        // (element, row, head, batch): inside, across two edges, and outside.
        for at in [[0, 0, 0, 0], [64, 1, 2, 1], [-8, -2, 1, 0], [0, 5, 0, 0], [0, 0, 3, 1]] {
            let out =
                probe("probe_box", timing, 1 + 16 * 32, |job, out| box_probe(job, out, at, 16)).unwrap();
            let got: Vec<u16> =
                out[1..].iter().flat_map(|word| [*word as u16, (*word >> 16) as u16]).collect();
            for row in 0..16 {
                for column in 0..64 {
                    let [x, y, z, w] = [at[0] + column, at[1] + row, at[2], at[3]];
                    let there = (0..72).contains(&x) && (0..5).contains(&y) && (0..3).contains(&z);
                    let expected = if there { (((w * 5 + y) * 3 + z) * 72 + x + 1) as u16 } else { 0 };
                    // Swizzle of 128 bytes: 16-byte column c of row r is at c ^ r % 8.
                    let place = row * 64 + ((column / 8) ^ (row % 8)) * 8 + column % 8;
                    assert_eq!(
                        got[place as usize], expected,
                        "{timing:?}, {at:?}, row {row}, column {column}"
                    );
                }
            }
            match timing {
                Timing::Eager => assert_eq!(out[0], out[1]),
                Timing::Late => assert_eq!(out[0], u32::MAX, "before the wait"),
                Timing::Random => {}
            }
        }
    }
}

#[test]
fn wgmma_multiplies_the_matrices_in_descriptors_and_registers() {
    // Small integers are exact in all types, so only the layout matters.
    let a = |row: usize, k: usize| ((row * 7 + k * 3) % 13) as f32 - 6.0;
    let b = |k: usize, column: usize| ((k * 5 + column * 11) % 9) as f32 - 4.0;
    let c = |row: usize, column: usize| (row * 128 + column) as f32;
    for option in 0..6 {
        let (half_type, turned, adds) = (option & 1 == 1, option & 2 != 0, option & 4 == 0);
        let bits = |value: f32| {
            if half_type { f16::from_f32(value).to_bits() } else { bf16::from_f32(value).to_bits() }
        };
        // Memory outside of the matrices has large numbers, so that a wrong address changes the result.
        let mut shared = vec![bits(4096.0); (8192 + 16384) / 2];
        // Swizzled rows of 64 elements. The matrices are elements 16 to 31 of them.
        let place = |row: usize, column: usize| row * 64 + ((column / 8) ^ (row % 8)) * 8 + column % 8;
        for k in 0..16 {
            for row in 0..64 {
                shared[place(row, 16 + k)] = bits(a(row, k));
            }
            for column in 0..128 {
                // Turned: a row is one k. 16 rows are a chunk of 64 columns.
                let at =
                    if turned { column / 64 * 1024 + place(k, column % 64) } else { place(column, 16 + k) };
                shared[4096 + at] = bits(b(k, column));
            }
        }
        let mut input: Vec<u32> = numbers(bytemuck::cast_slice(&shared));
        // Elements of thread t: rows 16 (t / 32) + t % 32 / 4 and the one 8 below; columns t % 4 * 2, the
        // next one, and both plus 8.
        let row_of = |thread: usize, i: usize| thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8;
        let column_of = |thread: usize, i: usize| i / 4 * 8 + thread % 4 * 2 + i % 2;
        for thread in 0..128 {
            for i in 0..4 {
                let element = |i| u32::from(bits(a(row_of(thread, i), column_of(thread, i))));
                input.push(element(2 * i) | element(2 * i + 1) << 16);
            }
        }
        for thread in 0..128 {
            input.extend((0..64).map(|i| c(row_of(thread, i), column_of(thread, i)).to_bits()));
        }
        for timing in Timing::ALL {
            let out = probe("probe_wgmma", timing, 8192 + 128, |job, output| Probe {
                input: job.upload(&input).address,
                output,
                option,
                zero: 0,
            });
            let out: Vec<f32> = out.unwrap().into_iter().map(f32::from_bits).collect();
            for (n, got) in out[..8192].iter().enumerate() {
                let (row, column) = (row_of(n / 64, n % 64), column_of(n / 64, n % 64));
                let sum: f32 = (0..16).map(|k| a(row, k) * b(k, column)).sum();
                let before = if adds { c(row, column) } else { 0.0 };
                assert_eq!(*got, before + sum, "option {option}, {timing:?}, row {row}, column {column}");
            }
            match timing {
                Timing::Eager => assert_eq!(out[8192], out[63]),
                Timing::Late => assert!(out[8192..].iter().all(|early| early.is_nan()), "before the wait"),
                Timing::Random => {}
            }
        }
    }
}

/// Products of a group on the same accumulators give the same sum, however many of them are
/// computed before the next one is issued.
#[test]
fn a_product_adds_to_the_one_before_in_every_schedule() {
    for timing in Timing::ALL {
        for seed in 1..=10 {
            let out = seeded_probe("probe_wgmma_chain", (timing, seed), 4096 + 128, |_, output| Probe {
                input: 0,
                output,
                option: 0,
                zero: 0,
            });
            let out: Vec<f32> = out.unwrap().into_iter().map(f32::from_bits).collect();
            assert!(
                out[..4096].iter().all(|sum| *sum == 32.0 * 16.0),
                "{timing:?}, seed {seed}: {:?}",
                &out[..4]
            );
            if timing == Timing::Late {
                assert!(out[4096..].iter().all(|early| early.is_nan()), "before the wait");
            }
        }
    }
}

#[test]
fn faults_of_hopper_kernels_are_found() {
    let run = |option, timing| {
        probe("probe_hopper_fault", timing, 128, |job, out| box_probe(job, out, [0, 0, 0, option], 16))
    };
    for timing in Timing::ALL {
        run(0, timing).expect("nothing is wrong with option 0");
        let faults = [
            (1, "more arrive at an mbarrier"),
            (2, "deadlock"),
            (3, "no mbarrier was initialised"),
            (4, "deadlock"),
            (5, "no wgmma.fence"),
            (7, "while others of its warpgroup"),
            (8, "at barrier 3 when the block ended"),
            (9, "threads and for"),
            (11, "not aligned"),
        ];
        for (option, words) in faults {
            let fault = run(option, timing).expect_err("a fault");
            assert!(fault.contains(words), "{timing:?}, option {option}: {fault}");
        }
    }
    // With the eager schedule this fault has no effect, with the late one it has.
    for (option, words) in [(6, "a product was not waited for"), (10, "boxes were not waited for")] {
        let fault = run(option, Timing::Late).expect_err("a fault");
        assert!(fault.contains(words), "option {option}: {fault}");
    }
    // Registers that change before the wait: the result depends on the schedule.
    for option in [12, 13] {
        assert_ne!(
            run(option, Timing::Eager).unwrap(),
            run(option, Timing::Late).unwrap(),
            "option {option}"
        );
    }
    assert_eq!(run(0, Timing::Eager), run(0, Timing::Late));
}
