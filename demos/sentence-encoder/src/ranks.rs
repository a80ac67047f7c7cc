//! The model on one rank of a group. The rank computes its own tokens; attention sees the tokens of all ranks.

use std::ops::Range;

use candle_core::Tensor;
use kyklos::{Attention, CallShapes, Execution, Mask, MaskSlice, Mesh, Placement, PlacementKind, Session, SlicePart, Split};

use crate::model::{Encoder, directions};
use crate::texts::Packed;
use crate::{Error, Result};

/// What a rank has of a run.
#[derive(Clone, Debug)]
pub struct Encoded {
    /// The embedding of each text, of length 1; the same on all ranks.
    pub embeddings: Vec<Vec<f32>>,
    /// Bytes that this rank sent to others.
    pub bytes_sent: u64,
}

/// Encodes the texts together with the other ranks. All ranks pass the same model and texts, and their tokens by [`share_out`].
///
/// # Errors
/// [`Error::Attention`] if ranks differ or one of them fails, [`Error::Candle`].
pub fn encode(
    session: &mut Session,
    encoder: &Encoder,
    packed: &Packed,
    tokens: Range<usize>,
) -> Result<Encoded> {
    let (ids, positions) = (&packed.ids[tokens.clone()], &packed.positions[tokens.clone()]);
    let shape = [1, tokens.len(), encoder.heads, encoder.head_dim];
    // Texts of any lengths without padding: a token sees those of its own text. Ranks with other labels are refused.
    let label = format!("weights {}, texts {}", encoder.fingerprint, packed.fingerprint());
    let call = Attention::new().mask(Mask::documents(packed.boundaries.clone())?).label(label);
    let mut bytes_sent = 0;

    // One vote and one plan for all layers.
    let like = kyklos::Tensor::new(shape, vec![0.0_f32; shape.iter().product()])?;
    let count = u32::try_from(encoder.layers()).unwrap_or(u32::MAX);
    let mut layers = session.prepare(&call, &CallShapes::of(&like, &like), count)?;
    let hidden = encoder.run(ids, positions, |qkv| {
        let [q, k, v] = qkv.map(|tensor| to_kyklos(shape, &tensor));
        let output = layers.run(&q?, &k?, &v?)?;
        bytes_sent += output.report.bytes_sent;
        to_candle(&output.o, &shape[1..])
    })?;
    drop(layers);

    let means = means(session, encoder, packed, &to_kyklos(shape, &hidden)?, &mut bytes_sent)?;
    Ok(Encoded { embeddings: directions(&means)?, bytes_sent })
}

/// The mean over the tokens of each text, `[texts, hidden]`, on all ranks. It is attention too: a query of zeros gives equal
/// weights to all keys that it sees, and query `i` sees text `i`.
fn means(
    session: &mut Session,
    encoder: &Encoder,
    packed: &Packed,
    hidden: &kyklos::Tensor,
    bytes_sent: &mut u64,
) -> Result<Tensor> {
    let slices = (0..).zip(packed.boundaries.windows(2));
    let slices = slices.map(|(text, ends)| MaskSlice::new(text..text + 1, ends[0]..ends[1], SlicePart::Full));
    let mask = Mask::slices(slices.collect::<Result<_, kyklos::PlanError>>()?);
    let call = Attention::new().mask(mask).execution(Execution::new().same_queries()).label("mean");
    let shape = [1, packed.texts(), encoder.heads, encoder.head_dim];
    let zeros = kyklos::Tensor::new(shape, vec![0.0_f32; shape.iter().product()])?;
    let output = session.attend(&call, &zeros, hidden, hidden)?;
    *bytes_sent += output.report.bytes_sent;
    to_candle(&output.o, &[packed.texts(), encoder.heads * encoder.head_dim])
}

/// The tokens of each of `ranks` ranks, one after the other.
///
/// # Errors
/// [`Error::Plan`] for wrong shares, [`Error::Request`] if a rank gets no token.
pub fn share_out(packed: &Packed, ranks: u32, shares: &Split) -> Result<Vec<Range<usize>>> {
    let placement = Placement::new(PlacementKind::Contiguous, Mesh::new(1, ranks)?, packed.tokens(), shares)?;
    let mut end = 0;
    let tokens: Vec<Range<usize>> = (placement.ranks().iter())
        .map(|tokens| {
            let start = end;
            end += tokens.len();
            start..end
        })
        .collect();
    // candle takes no tensors without elements.
    match tokens.iter().position(Range::is_empty) {
        None => Ok(tokens),
        Some(rank) => Err(Error::request(format!(
            "rank {rank} of {ranks} gets none of {} tokens: use fewer ranks, other shares or more text",
            packed.tokens()
        ))),
    }
}

fn to_kyklos(shape: [usize; 4], tensor: &Tensor) -> Result<kyklos::Tensor> {
    Ok(kyklos::Tensor::new(shape, tensor.flatten_all()?.to_vec1::<f32>()?)?)
}

fn to_candle(tensor: &kyklos::Tensor, shape: &[usize]) -> Result<Tensor> {
    Ok(Tensor::from_vec(tensor.to_vec::<f32>()?, shape, &candle_core::Device::Cpu)?)
}
