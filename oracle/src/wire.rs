//! A second implementation of the wire formats, in f64. It gives the error of the rounding on one
//! device, and the expected result for backends that round. Shares no code with the product.

use half::{bf16, f16};

use crate::oracle::Dtype;

/// Tokens that share the scale of a channel of the keys.
pub const TOGETHER: usize = 64;

/// `[batch, tokens, heads, dim]`.
pub type Shape = [usize; 4];

/// Rounds keys in the same way as 8-bit codes: a scale for each batch entry, head and channel over
/// [`TOGETHER`] tokens of each of `lists`. The tokens of a list are sent together. Tokens that are
/// on no list do not change.
pub fn int8_keys(keys: &mut [f32], shape: Shape, lists: &[Vec<u32>]) {
    let [batch, tokens, heads, dim] = shape;
    assert_eq!(keys.len(), batch * tokens * heads * dim, "keys of {shape:?}");
    for b in 0..batch {
        for together in lists.iter().flat_map(|list| list.chunks(TOGETHER)) {
            for channel in 0..heads * dim {
                let places =
                    together.iter().map(|token| (b * tokens + *token as usize) * heads * dim + channel);
                round_together(keys, &places.collect::<Vec<_>>());
            }
        }
    }
}

/// Rounds values in the same way as 8-bit codes: a scale for each batch entry, token and head.
pub fn int8_values(values: &mut [f32], shape: Shape, lists: &[Vec<u32>]) {
    let [batch, tokens, heads, dim] = shape;
    assert_eq!(values.len(), batch * tokens * heads * dim, "values of {shape:?}");
    for b in 0..batch {
        for token in lists.iter().flatten() {
            for head in 0..heads {
                let first = ((b * tokens + *token as usize) * heads + head) * dim;
                round_together(values, &(first..first + dim).collect::<Vec<_>>());
            }
        }
    }
}

/// The numbers of a tensor.
pub fn load(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    let halves = bytes.chunks_exact(2).map(|pair| u16::from_ne_bytes([pair[0], pair[1]]));
    match dtype {
        Dtype::F32 => bytes.chunks_exact(4).map(|x| f32::from_ne_bytes([x[0], x[1], x[2], x[3]])).collect(),
        Dtype::F16 => halves.map(|bits| f16::from_bits(bits).to_f32()).collect(),
        Dtype::Bf16 => halves.map(|bits| bf16::from_bits(bits).to_f32()).collect(),
    }
}

/// A tensor of these numbers, each rounded to nearest.
pub fn store(dtype: Dtype, numbers: &[f32]) -> Vec<u8> {
    match dtype {
        Dtype::F32 => numbers.iter().flat_map(|x| x.to_ne_bytes()).collect(),
        Dtype::F16 => numbers.iter().flat_map(|x| f16::from_f32(*x).to_ne_bytes()).collect(),
        Dtype::Bf16 => numbers.iter().flat_map(|x| bf16::from_f32(*x).to_ne_bytes()).collect(),
    }
}

/// Rounds each number to f16.
pub fn f16_each(numbers: &mut [f32]) {
    numbers.iter_mut().for_each(|x| *x = f16::from_f32(*x).to_f32());
}

/// Rounds all numbers with one scale. No format of the product does this.
pub fn int8_with_one_scale(numbers: &mut [f32]) {
    round_together(numbers, &(0..numbers.len()).collect::<Vec<_>>());
}

/// The scale of these numbers: the largest finite magnitude divided by 127, or 0 if this is not a
/// normal f32.
pub fn scale_of(numbers: impl Iterator<Item = f32>) -> f64 {
    let largest = numbers.filter(|x| x.is_finite()).map(|x| f64::from(x).abs()).fold(0.0, f64::max);
    if largest / 127.0 < f64::from(f32::MIN_POSITIVE) { 0.0 } else { largest / 127.0 }
}

fn round_together(numbers: &mut [f32], places: &[usize]) {
    let scale = scale_of(places.iter().map(|place| numbers[*place]));
    for place in places {
        let x = f64::from(numbers[*place]);
        let code = if scale == 0.0 { 0.0 } else { (x / scale).round_ties_even() };
        #[expect(clippy::cast_possible_truncation, reason = "rounded to f32")]
        let back = (code * scale) as f32;
        numbers[*place] = if x.is_finite() { back } else { f32::NAN };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn by_hand() {
        // One head of 8 channels. 2 tokens are on a list, and one token is not.
        let mut keys: Vec<f32> = vec![0.0; 24];
        (keys[0], keys[8], keys[16]) = (127.0, 0.6, 0.6);
        (keys[1], keys[9]) = (0.6, f32::NAN);
        (keys[2], keys[10]) = (1.0, f32::INFINITY);
        int8_keys(&mut keys, [1, 3, 1, 8], &[vec![0, 1]]);
        assert_eq!([keys[0], keys[8], keys[16]], [127.0, 1.0, 0.6]);
        assert_eq!(keys[1], 0.6, "a NaN has no part in a scale");
        assert!(keys[9].is_nan() && keys[10].is_nan());
        assert_eq!(keys[2], 1.0);

        let mut values: Vec<f32> = (0..16).map(|i| i as f32 * if i < 8 { 1.0 } else { 100.0 }).collect();
        let exact = values.clone();
        int8_values(&mut values, [1, 2, 1, 8], &[vec![1, 0]]);
        for (row, rounded) in exact.chunks(8).zip(values.chunks(8)) {
            let half_a_step = row[7] / 254.0;
            assert!(row.iter().zip(rounded).all(|(x, y)| (x - y).abs() <= half_a_step * 1.000_001));
            assert_eq!(row[7], rounded[7]);
        }
    }
}
