//! Generated tensors that are the same for every number of ranks, and the problems of all suites.
//!
//! # Definition
//!
//! Element `index` (linear BSHD order) of tensor `t` under `seed` is a standard normal number. It
//! comes from one block of Philox4x32-10:
//!
//! - key = (seed mod 2³², seed / 2³²), counter = (index mod 2³², index / 2³², t, 0), with t the
//!   number of the [`TensorId`]. The tensor is in the counter and not in the key, because Philox is
//!   a bijection of the counter under each key. So no two elements of any two tensors of a seed
//!   share a block, and no other seed repeats them with a shift.
//! - the block's words w0..w3 give two integers of 53 bits, `x = (w1·2³² + w0) >> 11` and `y =
//!   (w3·2³² + w2) >> 11`. These give `u = (x + 1)·2⁻⁵³` in (0, 1] and `w = y·2⁻⁵³` in [0, 1);
//! - the number is `√(−2 ln u) · cos(2π w)` in f64 (Box and Muller 1958), rounded to f32 and from
//!   there to the storage type, each to nearest even. Its magnitude is below 8.6.
//!
//! `ln` and `cos` come from the platform's mathematical library. Their last bit in f64 may differ
//! between platforms. After rounding to f32 this changes about one element in 10⁸, by one ulp.
//! Within one platform there is no difference. A test must not demand equal bytes from two
//! platforms.

mod cases;
mod philox;

use std::{collections::BTreeSet, f64::consts::TAU, ops::Range};

pub use cases::{BiasInputs, Case, CaseBias, Inputs, Poison, cases};
pub use philox::philox4x32_10;

use crate::oracle::{Element, OracleProblem, RowId};

/// The tensor of a number. The discriminants are part of the definition and never change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum TensorId {
    /// Queries `[batch, q_len, q_heads, head_dim]`.
    Q = 0,
    /// Keys `[batch, kv_len, kv_heads, head_dim]`.
    K = 1,
    /// Values `[batch, kv_len, kv_heads, head_dim]`.
    V = 2,
    /// Additive bias.
    Bias = 3,
    /// Sinks `[q_heads]`.
    Sinks = 4,
    /// Gradient of the output, shaped as q.
    OutputGradient = 5,
}

/// The standard normal number at a linear index, rounded to f32.
pub fn normal(seed: u64, tensor: TensorId, index: u64) -> f32 {
    let [w0, w1, w2, w3] = block(seed, tensor as u32, index);
    let unit = 1.0 / (1_u64 << 53) as f64;
    let radius = (-2.0 * ((join(w0, w1) >> 11) as f64 * unit + unit).ln()).sqrt();
    let angle = TAU * ((join(w2, w3) >> 11) as f64 * unit);
    (radius * angle.cos()) as f32
}

/// Writes the elements `range` of a tensor, in linear order, rounded to the type of `out`.
///
/// Panics if `out` is not as long as `range`.
pub fn fill<E: Element>(seed: u64, tensor: TensorId, range: Range<u64>, out: &mut [E]) {
    assert_eq!(range.end.saturating_sub(range.start), out.len() as u64, "room for the elements {range:?}");
    for (index, out) in range.zip(out) {
        *out = E::from_f32(normal(seed, tensor, index));
    }
}

/// Up to `count` different rows of a problem, for checks where all rows are too expensive. The rows
/// are in ascending order and include the first and the last row. They are the same for every
/// number of ranks.
pub fn sample_rows(problem: &OracleProblem, count: usize, seed: u64) -> Vec<RowId> {
    let rows = problem.batch * problem.q_len * problem.q_heads;
    if rows <= count {
        return problem.row_ids();
    }
    let mut chosen: BTreeSet<usize> = [0, rows - 1].into_iter().take(count).collect();
    let mut draw = 0;
    while chosen.len() < count {
        let [w0, w1, ..] = block(seed, SAMPLE_STREAM, draw);
        chosen.insert((join(w0, w1) % rows as u64) as usize);
        draw += 1;
    }
    let heads = problem.q_heads;
    chosen
        .into_iter()
        .map(|index| RowId {
            batch: index / heads / problem.q_len,
            row: index / heads % problem.q_len,
            head: index % heads,
        })
        .collect()
}

fn block(seed: u64, stream: u32, index: u64) -> [u32; 4] {
    philox4x32_10([index as u32, (index >> 32) as u32, stream, 0], [seed as u32, (seed >> 32) as u32])
}

fn join(low: u32, high: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

/// The stream of [`sample_rows`], different from the streams of tensors.
const SAMPLE_STREAM: u32 = u32::MAX;

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;
    use crate::oracle::Dtype;

    #[test]
    fn any_part_of_a_tensor_is_the_same_as_in_the_whole() {
        let mut whole = [0.0_f32; 100];
        fill(7, TensorId::K, 0..100, &mut whole);
        let mut part = [0.0_f32; 9];
        fill(7, TensorId::K, 31..40, &mut part);
        assert_eq!(part, whole[31..40]);
        assert_eq!(normal(7, TensorId::K, 99), whole[99]);
    }

    #[test]
    fn half_types_are_the_f32_numbers_rounded() {
        let (mut half, mut brain) = ([f16::ZERO; 64], [bf16::ZERO; 64]);
        fill(3, TensorId::V, 10..74, &mut half);
        fill(3, TensorId::V, 10..74, &mut brain);
        for index in 0..64 {
            let number = normal(3, TensorId::V, 10 + index as u64);
            assert_eq!(half[index].to_f32(), Dtype::F16.round(number));
            assert_eq!(brain[index].to_f32(), Dtype::Bf16.round(number));
        }
    }

    #[test]
    fn seeds_tensors_and_high_index_words_all_matter() {
        let numbers = [
            normal(0, TensorId::Q, 0),
            normal(0, TensorId::K, 0),
            normal(0, TensorId::V, 0),
            normal(1, TensorId::Q, 0),
            normal(1 << 32, TensorId::Q, 0),
            normal(0, TensorId::Q, 1),
            normal(0, TensorId::Q, 1 << 32),
        ];
        let distinct: BTreeSet<u32> = numbers.iter().map(|number| number.to_bits()).collect();
        assert_eq!(distinct.len(), numbers.len(), "{numbers:?}");
    }

    #[test]
    fn numbers_are_what_the_definition_says() {
        // Key 0 and counter 0 is the first known answer of Philox. u and w are calculated from it by hand.
        let unit = 2.0_f64.powi(-53);
        let u = ((0xe169_c58d_6627_e8d5_u64 >> 11) + 1) as f64 * unit;
        let w = (0x9b00_dbd8_bc57_ac4c_u64 >> 11) as f64 * unit;
        let expected = ((-2.0 * u.ln()).sqrt() * (TAU * w).cos()) as f32;
        assert_eq!(normal(0, TensorId::Q, 0), expected);
        // The rest of the definition, calculated by a separate program.
        let tensors = [(0, TensorId::Q, 0), (0, TensorId::K, 1), (u64::MAX, TensorId::V, 1 << 40)];
        for ((seed, tensor, index), expected) in
            tensors.into_iter().zip([-0.397_667_53, -0.510_419_5, 0.388_884_2])
        {
            let ulps = Dtype::F32.ulps(f64::from(normal(seed, tensor, index)), expected);
            assert!(ulps.is_some_and(|ulps| ulps <= 1), "{tensor:?} at {index}: {ulps:?} ulp");
        }
    }

    #[test]
    fn the_numbers_have_the_moments_of_the_standard_normal() {
        const N: u64 = 200_000;
        let mut sums = [0.0_f64; 4];
        for index in 0..N {
            let x = f64::from(normal(42, TensorId::Q, index));
            for (power, sum) in sums.iter_mut().enumerate() {
                *sum += x.powi(power as i32 + 1);
            }
        }
        // Five standard deviations of each sample moment: variances of x, x², x³, x⁴ are 1, 2, 15, 96.
        for (index, (mean, variance)) in
            [(0.0, 1.0), (1.0, 2.0), (0.0, 15.0), (3.0, 96.0_f64)].into_iter().enumerate()
        {
            let bound = 5.0 * (variance / N as f64).sqrt();
            let sample = sums[index] / N as f64;
            assert!((sample - mean).abs() < bound, "moment {}: {sample}", index + 1);
        }
    }

    #[test]
    fn sampled_rows_are_distinct_sorted_and_fixed_by_the_seed() {
        let problem = OracleProblem { q_len: 1000, ..cases()[0].problem.clone() };
        let rows = sample_rows(&problem, 256, 5);
        assert_eq!(rows.len(), 256);
        assert!(rows.is_sorted_by(|a, b| a < b));
        assert_eq!(rows, sample_rows(&problem, 256, 5));
        assert_ne!(rows, sample_rows(&problem, 256, 6));
        let all = problem.row_ids();
        assert_eq!((rows[0], rows[255]), (all[0], all[all.len() - 1]));
        assert_eq!(sample_rows(&problem, usize::MAX, 5), all);
        assert_eq!(sample_rows(&problem, 1, 5), all[..1]);
    }
}
