//! The shapes and the type of the tensors of a call.

use crate::error::{Error, Result};
use crate::tensor::Tensor;
use kyklos_plan::Dtype;

/// The tensors of calls without their elements: what the ranks agree on before there are any.
///
/// ```
/// use kyklos::{CallShapes, Dtype};
///
/// // 100 queries and 120 keys of this rank; 8 query heads share 2 key/value heads of dim 64.
/// let shapes = CallShapes { q: [1, 100, 8, 64], kv: [1, 120, 2, 64], dtype: Dtype::F16 };
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallShapes {
    /// `[batch, tokens, q_heads, dim]`.
    pub q: [usize; 4],
    /// Of k, and of v: `[batch, tokens, kv_heads, dim]`.
    pub kv: [usize; 4],
    /// The type of all of them.
    pub dtype: Dtype,
}

impl CallShapes {
    /// Those of q, and of k and v.
    pub fn of(q: &Tensor, kv: &Tensor) -> Self {
        Self { q: q.shape(), kv: kv.shape(), dtype: q.dtype() }
    }

    pub(super) fn of_tensors(self) -> Shapes {
        Shapes { shapes: [self.q, self.kv, self.kv], dtypes: [self.dtype; 3] }
    }
}

/// Shapes and types of q, k and v.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shapes {
    pub(super) shapes: [[usize; 4]; 3],
    pub(super) dtypes: [Dtype; 3],
}

impl Shapes {
    pub(super) fn of(tensors: [&Tensor; 3]) -> Self {
        Self { shapes: tensors.map(Tensor::shape), dtypes: tensors.map(Tensor::dtype) }
    }

    /// Refuses tensors of another shape or type.
    pub(super) fn check(&self, tensors: [&Tensor; 3]) -> Result<()> {
        let prepared = self.shapes.iter().zip(&self.dtypes);
        for ((tensor, (shape, dtype)), name) in tensors.into_iter().zip(prepared).zip(["q", "k", "v"]) {
            if (tensor.shape(), tensor.dtype()) != (*shape, *dtype) {
                return Err(Error::request(
                    format!(
                        "{name} of shape {:?} in {}, in calls that were prepared with {shape:?} in {dtype}",
                        tensor.shape(),
                        tensor.dtype()
                    ),
                    "prepare calls of another shape apart",
                ));
            }
        }
        Ok(())
    }
}
