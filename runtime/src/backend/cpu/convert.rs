//! Elements from one storage type to another.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::Dtype;

/// `into` = `from`, element by element, rounded to nearest, ties to even; of the two types one is f32. Both hold as many
/// elements.
pub(super) fn convert((from, source): (Dtype, &[u8]), (into, target): (Dtype, &mut [u8])) {
    use bytemuck::{cast_slice, cast_slice_mut};
    match (from, into) {
        (Dtype::F32, Dtype::F16) => {
            cast_slice_mut::<_, f16>(target).convert_from_f32_slice(cast_slice(source));
        }
        (Dtype::F32, Dtype::Bf16) => {
            cast_slice_mut::<_, bf16>(target).convert_from_f32_slice(cast_slice(source));
        }
        (Dtype::F16, Dtype::F32) => {
            cast_slice::<_, f16>(source).convert_to_f32_slice(cast_slice_mut(target));
        }
        (Dtype::Bf16, Dtype::F32) => {
            cast_slice::<_, bf16>(source).convert_to_f32_slice(cast_slice_mut(target));
        }
        (from, into) => unreachable!("plans convert between f32 and a 16-bit type, not {from} to {into}"),
    }
}
