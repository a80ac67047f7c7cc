//! The emulator against the definitions of the PTX ISA, and the faults that it must find.

use half::{bf16, f16};

use crate::job::{Buffer, Counts, Job, Timing, numbers};
use crate::program::emulator;

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Probe {
    input: u64,
    output: u64,
    option: u32,
    zero: u32,
}

/// Runs a probe on one block, with room for 2048 words of output.
fn probe(name: &str, input: &[u32], option: u32, timing: Timing) -> Result<(Vec<u32>, Counts), String> {
    let mut job = Job::default();
    let input: Buffer = job.upload(input);
    let output = job.poisoned(2048 * 4);
    let arguments = Probe { input: input.address, output: output.address, option, zero: 0 };
    job.launch(name, [1, 1, 1], 1024, &arguments);
    job.bring(output);
    let (results, counts) = job.run(emulator(), timing, 1)?;
    Ok((numbers(&results[0]), counts))
}

#[test]
fn ldmatrix_gives_each_lane_two_adjacent_elements_of_a_row_or_column() {
    // Element (row, column) of matrix i is 1000 i + 10 row + column.
    let element = |matrix: usize, row: usize, column: usize| (1000 * matrix + 10 * row + column) as u16;
    let all: Vec<u16> = (0..256).map(|n| element(n / 64, n / 8 % 8, n % 8)).collect();
    for timing in Timing::ALL {
        for transposed in [false, true] {
            let (out, counts) =
                probe("probe_matrices", &numbers(bytemuck::cast_slice(&all)), u32::from(transposed), timing)
                    .unwrap();
            for (lane, registers) in out.chunks(4).take(32).enumerate() {
                for (matrix, register) in registers.iter().enumerate() {
                    let (row, column) = (lane / 4, lane % 4 * 2);
                    let [low, high] = if transposed {
                        [element(matrix, column, row), element(matrix, column + 1, row)]
                    } else {
                        [element(matrix, row, column), element(matrix, row, column + 1)]
                    };
                    assert_eq!(
                        *register,
                        u32::from(low) | u32::from(high) << 16,
                        "lane {lane}, matrix {matrix}"
                    );
                }
            }
            // 32 contiguous rows of 16 bytes: each matrix has 128 bytes.
            assert_eq!((counts.accesses, counts.passes, counts.copies), (4, 4, 32));
        }
    }
}

#[test]
fn mma_multiplies_the_matrices_in_its_fragments() {
    // Small integers are exact in all types, so only the layout matters.
    let a = |row: usize, k: usize| ((row * 7 + k * 3) % 13) as f32 - 6.0;
    let b = |k: usize, column: usize| ((k * 5 + column * 11) % 9) as f32 - 4.0;
    let c = |row: usize, column: usize| (row * 8 + column) as f32;
    for half_type in [0, 1] {
        let bits = |value: f32| {
            u32::from(if half_type == 0 {
                bf16::from_f32(value).to_bits()
            } else {
                f16::from_f32(value).to_bits()
            })
        };
        let mut input = vec![0_u32; 320];
        for lane in 0..32 {
            let (group, pair) = (lane / 4, lane % 4 * 2);
            // "Matrix fragments for mma.m16n8k16 with floating point type": a0,a1 | a2,a3 | a4,a5 | a6,a7.
            for (register, (row, k)) in
                [(group, pair), (group + 8, pair), (group, pair + 8), (group + 8, pair + 8)]
                    .into_iter()
                    .enumerate()
            {
                input[lane * 4 + register] = bits(a(row, k)) | bits(a(row, k + 1)) << 16;
            }
            for (register, k) in [pair, pair + 8].into_iter().enumerate() {
                input[128 + lane * 2 + register] = bits(b(k, group)) | bits(b(k + 1, group)) << 16;
            }
            for (register, (row, column)) in
                [(group, pair), (group, pair + 1), (group + 8, pair), (group + 8, pair + 1)]
                    .into_iter()
                    .enumerate()
            {
                input[192 + lane * 4 + register] = c(row, column).to_bits();
            }
        }
        let (out, _) = probe("probe_multiply", &input, half_type, Timing::Random).unwrap();
        for lane in 0..32 {
            for register in 0..4 {
                let (row, column) = (lane / 4 + register / 2 * 8, lane % 4 * 2 + register % 2);
                let sum: f32 = (0..16).map(|k| a(row, k) * b(k, column)).sum();
                assert_eq!(
                    f32::from_bits(out[lane * 4 + register]),
                    c(row, column) + sum,
                    "row {row}, column {column}"
                );
            }
        }
    }
}

#[test]
fn packing_rounds_to_nearest_even_and_puts_the_first_number_into_the_low_half() {
    let numbers: Vec<f32> =
        [1.0, -2.0, 1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, 65519.0, 65520.0, 1e-7, 3e-8, -2.98e-8, 6.1e-5]
            .into_iter()
            .chain([f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0, 3.4e38, 1e-40, 5.960_464_5e-8, 8.940_697e-8])
            .chain(
                (0..46).map(|n| (n as f32 - 23.0).exp2() * 1.234_567 * if n % 2 == 0 { 1.0 } else { -1.0 }),
            )
            .collect();
    let bits: Vec<u32> = numbers.iter().map(|number| number.to_bits()).collect();
    let (out, _) = probe("probe_pack", &bits, 0, Timing::Eager).unwrap();
    for (pair, packed) in numbers.chunks(2).zip(out.chunks(2)) {
        let brains = pair.iter().rev().fold(0, |all, x| all << 16 | u32::from(bf16::from_f32(*x).to_bits()));
        let halves = pair.iter().rev().fold(0, |all, x| all << 16 | u32::from(f16::from_f32(*x).to_bits()));
        assert_eq!(packed, [brains, halves], "{pair:?}");
    }
}

#[test]
fn rows_that_share_a_bank_take_as_many_passes() {
    for (apart, passes) in [(16, 1), (32, 2), (64, 4), (128, 8), (80, 1), (0, 1)] {
        let (_, counts) = probe("probe_banks", &[], apart, Timing::Eager).unwrap();
        assert_eq!((counts.accesses, counts.passes), (4, 4 * passes), "rows {apart} bytes apart");
    }
}

#[test]
fn copies_are_complete_after_the_wait_for_their_group() {
    const POISON: u32 = u32::MAX;
    let input: Vec<u32> = (0..256).collect();
    for timing in Timing::ALL {
        let (out, _) = probe("probe_copies", &input, 0, timing).unwrap();
        let mut early = 0;
        for (lane, seen) in out.chunks(4).take(32).enumerate() {
            let [first, second] = [lane as u32 * 8, lane as u32 * 8 + 4];
            assert_eq!([seen[1], seen[3]], [first, second], "{timing:?}: what was waited for");
            assert!([first, POISON].contains(&seen[0]) && [second, POISON].contains(&seen[2]));
            early += usize::from(seen[0] == first) + usize::from(seen[2] == second);
        }
        match timing {
            Timing::Eager => assert_eq!(early, 64),
            Timing::Late => assert_eq!(early, 0),
            Timing::Random => {}
        }
    }
}

#[test]
fn faults_of_kernels_are_found() {
    let faults = [
        (1, "deadlock"),
        (2, "while others of its warp"),
        (3, "deadlock"),
        (4, "not waited for when the thread ended"),
        (5, "shared address"),
        (6, "shared address"),
        (7, "signal"),
    ];
    for timing in Timing::ALL {
        probe("probe_fault", &[0; 4], 0, timing).expect("nothing is wrong with option 0");
        for (option, words) in faults {
            let fault = probe("probe_fault", &[0; 4], option, timing).expect_err("a fault");
            assert!(fault.contains(words), "{timing:?}, option {option}: {fault}");
        }
    }
    assert!(
        probe("no_such_kernel", &[], 0, Timing::Eager).expect_err("a fault").contains("no kernel is called")
    );
}
