//! The model in one process, one text after the other, with candle's own attention: no Kyklos, no packing and no mask.

use candle_core::{D, Tensor};
use candle_nn::ops::softmax;

use crate::model::{Encoder, directions};
use crate::texts::Packed;
use crate::{Error, Result};

/// The embedding of each text, of length 1.
///
/// # Errors
/// [`Error::Candle`](crate::Error::Candle).
pub fn encode(encoder: &Encoder, packed: &Packed) -> Result<Vec<Vec<f32>>> {
    let means = packed.boundaries.windows(2).map(|ends| {
        let text = ends[0] as usize..ends[1] as usize;
        let hidden = encoder.run(&packed.ids[text.clone()], &packed.positions[text], attend)?;
        Ok(hidden.mean(0)?)
    });
    directions(&Tensor::stack(&means.collect::<Result<Vec<_>>>()?, 0)?)
}

/// Attention of each token to all: `[tokens, heads, head_dim]`.
///
/// # Errors
/// [`Error::Candle`].
pub fn attend(qkv: [Tensor; 3]) -> Result<Tensor> {
    // Heads first, as matrix products want them.
    let [q, k, v] = qkv.map(|tensor| tensor.transpose(0, 1)?.contiguous());
    let (q, k, v) = (q?, k?, v?);
    let scale = 1.0 / f64::from(u32::try_from(q.dim(D::Minus1)?).unwrap_or(u32::MAX)).sqrt();
    let weights = softmax(&(q.matmul(&k.t()?)? * scale)?, D::Minus1).map_err(Error::Candle)?;
    Ok(weights.matmul(&v)?.transpose(0, 1)?.contiguous()?)
}
