//! Host tensors: from the whole sequence to a rank's tokens, and back.

use bytes::{Bytes, BytesMut};
use kyklos_transport::Rank;

use crate::error::{Error, Result};
use crate::tensor::Tensor;
use kyklos_plan::plan::PlanSet;
use kyklos_plan::{AttentionProblem, TokenRuns};

/// Extents of a host tensor `[batch, tokens, …]` whose tokens have `token_bytes` adjacent bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostLayout {
    /// Batch entries.
    pub batch: usize,
    /// Tokens of the whole sequence.
    pub tokens: usize,
    /// Bytes of one token: heads × dim × element.
    pub token_bytes: usize,
}

impl HostLayout {
    /// Bytes of the whole tensor.
    pub fn bytes(self) -> usize {
        self.batch * self.tokens * self.token_bytes
    }

    /// The tokens `tokens` of `whole`, in their order. Shares memory where they are contiguous in
    /// `whole`.
    ///
    /// # Errors
    /// [`Error::Request`] when `whole` does not have the size of this layout.
    pub fn gather(self, whole: &Bytes, tokens: &TokenRuns) -> Result<Bytes> {
        self.fits(whole.len())?;
        let one_piece = match tokens.runs() {
            [] => Some(0..0),
            [run] if run.stride == 1 && (self.batch == 1 || run.count as usize == self.tokens) => {
                let end = run.start as usize + run.count as usize * self.batch;
                Some(run.start as usize * self.token_bytes..end * self.token_bytes)
            }
            _ => None,
        };
        if let Some(range) = one_piece {
            return Ok(whole.slice(range));
        }
        let mut part = BytesMut::with_capacity(self.batch * tokens.len() * self.token_bytes);
        self.for_each_run(tokens, |range| part.extend_from_slice(&whole[range]));
        Ok(part.freeze())
    }

    /// Copies `part`, which holds the tokens `tokens` in their order, to their positions in
    /// `whole`.
    ///
    /// # Errors
    /// [`Error::Request`] when `part` or `whole` has the wrong size.
    pub fn scatter(self, part: &[u8], tokens: &TokenRuns, whole: &mut [u8]) -> Result<()> {
        self.fits(whole.len())?;
        Self { tokens: tokens.len(), ..self }.fits(part.len())?;
        let mut at = 0;
        self.for_each_run(tokens, |range| {
            let size = range.len();
            whole[range].copy_from_slice(&part[at..at + size]);
            at += size;
        });
        Ok(())
    }

    fn fits(self, bytes: usize) -> Result<()> {
        if bytes == self.bytes() {
            return Ok(());
        }
        Err(Error::request(
            format!("a tensor has {bytes} bytes, its shape needs {}", self.bytes()),
            "give tensors of the problem's shape and dtype",
        ))
    }

    /// Calls `each` with the byte range of every piece, batch by batch, in the order of the tokens.
    fn for_each_run(self, tokens: &TokenRuns, mut each: impl FnMut(std::ops::Range<usize>)) {
        for batch in 0..self.batch {
            for run in tokens.runs() {
                let at = |token: u32| (batch * self.tokens + token as usize) * self.token_bytes;
                if run.stride == 1 {
                    each(at(run.start)..at(run.start) + run.count as usize * self.token_bytes);
                } else {
                    for i in 0..run.count {
                        let start = at(run.start + i * run.stride);
                        each(start..start + self.token_bytes);
                    }
                }
            }
        }
    }
}

/// Whole tensors of a problem, in host memory and in the problem's dtype; or one rank's part of
/// them, see [`shard`].
#[derive(Clone, Debug)]
pub struct Tensors {
    /// `[batch, q_len, q_heads, dim]`.
    pub q: Bytes,
    /// `[batch, kv_len, kv_heads, dim]`.
    pub k: Bytes,
    /// Like `k`.
    pub v: Bytes,
    /// The problem's attention bias tensor, `[its batch, q_len, its heads, row]`; with shared rows
    /// `[its batch, 1, its heads, row]`, whole on every rank. The layout of a row is in
    /// [`BiasKind`](crate::BiasKind).
    pub bias: Option<Bytes>,
}

impl Tensors {
    /// q, k and v as tensors of a call, of as many tokens as they have.
    ///
    /// # Errors
    /// [`Error::Request`] when one of them does not have whole tokens of `problem`.
    pub fn qkv(&self, problem: &AttentionProblem) -> Result<[Tensor; 3]> {
        let tensor = |data: &Bytes, heads: u32| {
            let [batch, heads, dim] = [problem.batch, heads, problem.head_dim].map(|extent| extent as usize);
            let tokens = data.len() / (batch * heads * dim * problem.dtype.bytes()).max(1);
            Tensor::from_bytes([batch, tokens, heads, dim], problem.dtype, data.clone())
        };
        let [of_q, of_kv] = [problem.q_heads, problem.kv_heads];
        Ok([tensor(&self.q, of_q)?, tensor(&self.k, of_kv)?, tensor(&self.v, of_kv)?])
    }
}

/// The part of whole tensors that `rank` holds.
///
/// # Errors
/// [`crate::Error::Request`] when the tensors do not have the problem's shape.
pub fn shard(set: &PlanSet, rank: Rank, tensors: &Tensors) -> Result<Tensors> {
    let (q_tokens, kv_tokens) = (&set.q_placement.held_by(rank), &set.kv_placement.held_by(rank));
    let (q, kv) = layouts(set);
    if set.problem.bias.is_some() != tensors.bias.is_some() {
        let (has, given) = if set.problem.bias.is_some() { ("has an", "none") } else { ("has no", "one") };
        return Err(Error::request(
            format!("the problem {has} attention bias tensor, Tensors::bias gives {given}"),
            "use AttentionProblem::with_bias together with Tensors::bias, or neither",
        ));
    }
    let bias = bias_layout(set).zip(tensors.bias.as_ref());
    let bias_tokens = match set.problem.shared_bias() {
        Some(_) => TokenRuns::contiguous(0..1),
        None => q_tokens.clone(),
    };
    Ok(Tensors {
        q: q.gather(&tensors.q, q_tokens)?,
        k: kv.gather(&tensors.k, kv_tokens)?,
        v: kv.gather(&tensors.v, kv_tokens)?,
        bias: bias.map(|(layout, bias)| layout.gather(bias, &bias_tokens)).transpose()?,
    })
}

/// Layout in host memory of the whole attention bias tensor, if the problem has one. With shared
/// rows it has one token.
pub fn bias_layout(set: &PlanSet) -> Option<HostLayout> {
    let problem = &set.problem;
    problem.bias.map(|bias| HostLayout {
        batch: bias.batch as usize,
        tokens: if bias.shared_rows { 1 } else { problem.q_len as usize },
        token_bytes: bias.heads as usize * bias.row_bytes(problem.dtype, problem.kv_len),
    })
}

/// Layouts in host memory: of the whole q, which is also that of o, and of the whole k, which is
/// also that of v.
pub fn layouts(set: &PlanSet) -> (HostLayout, HostLayout) {
    let problem = &set.problem;
    let layout = |tokens: u32, heads: u32| HostLayout {
        batch: problem.batch as usize,
        tokens: tokens as usize,
        token_bytes: heads as usize * problem.head_dim as usize * problem.dtype.bytes(),
    };
    (layout(problem.q_len, problem.q_heads), layout(problem.kv_len, problem.kv_heads))
}

/// Copies a rank's lse `[batch, tokens, heads]` to its positions in the whole `[batch, heads,
/// seq]`.
pub fn scatter_lse(part: &[f32], batch: usize, heads: usize, tokens: &TokenRuns, whole: &mut [f32]) {
    let seq = whole.len() / (batch * heads).max(1);
    let positions: Vec<usize> = tokens.iter().map(|token| token as usize).collect();
    for (index, row) in part.chunks_exact(heads).enumerate() {
        let (batch, position) = (index / positions.len(), positions[index % positions.len()]);
        for (head, lse) in row.iter().enumerate() {
            whole[(batch * heads + head) * seq + position] = *lse;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scatter_undoes_gather_for_any_token_order() {
        let layout = HostLayout { batch: 2, tokens: 9, token_bytes: 3 };
        let whole = Bytes::from((0..layout.bytes() as u8).collect::<Vec<_>>());
        let lists = [vec![0, 1, 2, 6, 7, 8], vec![3, 5], vec![4], vec![]];
        let mut back = vec![0xEE; layout.bytes()];
        for list in &lists {
            let tokens = TokenRuns::from_positions(list.iter().copied());
            let part = layout.gather(&whole, &tokens).unwrap();
            assert_eq!(part.len(), 2 * list.len() * 3);
            layout.scatter(&part, &tokens, &mut back).unwrap();
        }
        assert_eq!(back, whole);
        assert!(layout.gather(&whole.slice(1..), &TokenRuns::default()).is_err());
        assert!(layout.scatter(&whole[1..], &TokenRuns::contiguous(0..9), &mut back).is_err());
    }
}
