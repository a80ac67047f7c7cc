//! Tensors for the oracle: borrowed, of any storage type, converted to f64 one vector at a time.

use std::fmt;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::OracleError;

/// The storage type of a tensor. Inputs are rounded to it *before* the oracle reads them. So the
/// measured error is the error of the kernel and not of the storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// IEEE binary32: 24 significant bits.
    F32,
    /// IEEE binary16: 11 significant bits.
    F16,
    /// The upper half of binary32: 8 significant bits.
    Bf16,
}

impl Dtype {
    /// All storage types.
    pub const ALL: [Self; 3] = [Self::F32, Self::F16, Self::Bf16];

    /// `value` rounded to this type, to nearest even.
    pub fn round(self, value: f32) -> f32 {
        match self {
            Self::F32 => value,
            Self::F16 => f16::from_f32(value).to_f32(),
            Self::Bf16 => bf16::from_f32(value).to_f32(),
        }
    }

    /// The largest relative error of rounding a normal number to this type: half the spacing at 1.
    pub const fn unit_roundoff(self) -> f64 {
        match self {
            Self::F32 => 1.0 / (1 << 24) as f64,
            Self::F16 => 1.0 / (1 << 11) as f64,
            Self::Bf16 => 1.0 / (1 << 8) as f64,
        }
    }

    /// The distance between `a` and `b` in representable numbers of this type. Both are rounded to
    /// it first. `None` if one of them is NaN. Zero and minus zero are the same number.
    pub fn ulps(self, a: f64, b: f64) -> Option<u64> {
        (!a.is_nan() && !b.is_nan()).then(|| self.ordinal(a).abs_diff(self.ordinal(b)))
    }

    /// The place of a number in the ordered list of all numbers of this type, 0 for zero.
    fn ordinal(self, value: f64) -> i64 {
        let (bits, sign) = match self {
            Self::F32 => ((value as f32).to_bits(), 1 << 31),
            Self::F16 => (u32::from(f16::from_f64(value).to_bits()), 1 << 15),
            Self::Bf16 => (u32::from(bf16::from_f64(value).to_bits()), 1 << 15),
        };
        // IEEE encodings ascend with the magnitude. The sign bit only mirrors them.
        let magnitude = i64::from(bits & (sign - 1));
        if bits & sign == 0 { magnitude } else { -magnitude }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        })
    }
}

/// A number in the storage type of a tensor.
pub trait Element: Copy + fmt::Debug {
    /// The storage type of this number.
    const DTYPE: Dtype;

    /// `value` rounded to nearest even.
    fn from_f32(value: f32) -> Self;

    /// The same number, exactly.
    fn to_f64(self) -> f64;

    /// A slice of such numbers for the oracle.
    fn values(slice: &[Self]) -> Values<'_>;
}

macro_rules! element {
    ($type:ty, $variant:ident, $from:expr, $to:expr) => {
        impl Element for $type {
            const DTYPE: Dtype = Dtype::$variant;
            fn from_f32(value: f32) -> Self {
                $from(value)
            }
            fn to_f64(self) -> f64 {
                $to(self)
            }
            fn values(slice: &[Self]) -> Values<'_> {
                Values::$variant(slice)
            }
        }
    };
}

element!(f32, F32, std::convert::identity, f64::from);
element!(f16, F16, Self::from_f32, Self::to_f64);
element!(bf16, Bf16, Self::from_f32, Self::to_f64);

/// The borrowed elements of one tensor in linear order.
#[derive(Clone, Copy)]
pub enum Values<'a> {
    /// Numbers in memory.
    F32(&'a [f32]),
    /// Numbers in memory.
    F16(&'a [f16]),
    /// Numbers in memory.
    Bf16(&'a [bf16]),
    /// Numbers that are computed or fetched on request, for example a generated tensor of which
    /// each rank has only a part.
    Read {
        /// The storage type to which the numbers are rounded.
        dtype: Dtype,
        /// The number of elements.
        len: usize,
        /// The number at a linear index below `len`.
        read: &'a (dyn Fn(usize) -> f64 + Sync),
    },
}

impl Values<'_> {
    /// The number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::F16(values) => values.len(),
            Self::Bf16(values) => values.len(),
            Self::Read { len, .. } => *len,
        }
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The storage type.
    pub fn dtype(&self) -> Dtype {
        match self {
            Self::F32(_) => Dtype::F32,
            Self::F16(_) => Dtype::F16,
            Self::Bf16(_) => Dtype::Bf16,
            Self::Read { dtype, .. } => *dtype,
        }
    }

    /// The element at a linear index. Panics if `index` is not below [`Values::len`].
    pub fn get(&self, index: usize) -> f64 {
        let mut one = [0.0];
        self.read_into(index, &mut one);
        one[0]
    }

    /// Reads elements from `start` on, until `out` is full. Panics if the tensor has too few
    /// elements.
    pub fn read_into(&self, start: usize, out: &mut [f64]) {
        let range = start..start + out.len();
        match self {
            Self::F32(values) => widen(&values[range], out),
            // Several at a time, where the processor can.
            Self::F16(values) => values[range].convert_to_f64_slice(out),
            Self::Bf16(values) => widen(&values[range], out),
            Self::Read { len, read, .. } => {
                assert!(range.end <= *len, "elements {range:?} of a tensor of {len}");
                for (index, out) in range.zip(out) {
                    *out = read(index);
                }
            }
        }
    }
}

fn widen<E: Element>(values: &[E], out: &mut [f64]) {
    for (out, value) in out.iter_mut().zip(values) {
        *out = value.to_f64();
    }
}

impl fmt::Debug for Values<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} values of {}", self.len(), self.dtype())
    }
}

/// A tensor `[batch, seq, heads, dim]` (BSHD), contiguous in that order.
#[derive(Clone, Copy, Debug)]
pub struct Tensor4<'a> {
    shape: [usize; 4],
    values: Values<'a>,
}

impl<'a> Tensor4<'a> {
    /// A tensor of shape `[batch, seq, heads, dim]`. Refused if `values` has another number of
    /// elements.
    pub fn new(shape: [usize; 4], values: Values<'a>) -> Result<Self, OracleError> {
        let elements = shape.iter().product();
        if values.len() != elements {
            return Err(OracleError::Length { shape, elements, actual: values.len() });
        }
        Ok(Self { shape, values })
    }

    /// `[batch, seq, heads, dim]`.
    pub fn shape(&self) -> [usize; 4] {
        self.shape
    }

    /// The elements in linear BSHD order.
    pub fn values(&self) -> Values<'a> {
        self.values
    }

    /// Writes the vector `[dim]` of one token and head into `out`. Panics outside the shape.
    pub fn read_vector(&self, batch: usize, token: usize, head: usize, out: &mut [f64]) {
        let [batches, tokens, heads, dim] = self.shape;
        assert!(
            batch < batches && token < tokens && head < heads && out.len() == dim,
            "vector [{batch}, {token}, {head}, ..{}] of a tensor of shape {:?}",
            out.len(),
            self.shape
        );
        self.values.read_into(((batch * tokens + token) * heads + head) * dim, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ulps_count_neighbours_across_zero_and_binades() {
        assert_eq!(Dtype::F32.ulps(1.0, f64::from(1.0_f32.next_up())), Some(1));
        assert_eq!(Dtype::F32.ulps(-0.0, 0.0), Some(0));
        assert_eq!(Dtype::F32.ulps(f64::from(f32::from_bits(1)), -f64::from(f32::from_bits(1))), Some(2));
        assert_eq!(Dtype::F16.ulps(1.0, 2.0), Some(1 << 10));
        assert_eq!(Dtype::Bf16.ulps(1.0, 2.0), Some(1 << 7));
        assert_eq!(Dtype::F32.ulps(f64::NAN, 0.0), None);
    }

    #[test]
    fn unit_roundoff_is_half_the_spacing_at_one() {
        for dtype in Dtype::ALL {
            let u = dtype.unit_roundoff() as f32;
            assert_eq!(dtype.ulps(1.0, f64::from(1.0 + 2.0 * u)), Some(1), "{dtype}");
            assert_eq!(dtype.round(1.0 + u), 1.0, "{dtype}: a tie goes to even");
        }
    }

    #[test]
    fn all_kinds_of_values_read_alike() {
        let numbers = [0.5_f32, -1.25, 3.0];
        let halves = numbers.map(f16::from_f32);
        let brains = numbers.map(bf16::from_f32);
        let read = |index: usize| f64::from(numbers[index]);
        for values in [
            f32::values(&numbers),
            f16::values(&halves),
            bf16::values(&brains),
            Values::Read { dtype: Dtype::F32, len: 3, read: &read },
        ] {
            assert_eq!(values.len(), 3);
            assert_eq!([values.get(0), values.get(1), values.get(2)], [0.5, -1.25, 3.0], "{values:?}");
        }
    }

    #[test]
    fn a_tensor_of_the_wrong_length_is_refused() {
        let error = Tensor4::new([1, 2, 1, 2], Values::F32(&[0.0; 3])).unwrap_err();
        assert_eq!(error, OracleError::Length { shape: [1, 2, 1, 2], elements: 4, actual: 3 });
    }
}
