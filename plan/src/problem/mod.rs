//! An attention call, without data.

mod bias;
mod results;
mod size;

use std::ops::Range;

use crate::bias::{BiasKind, BiasTensor};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::mask::Mask;
use crate::wire::WireFormat;

pub use results::Results;

/// One attention call: `o = softmax(scale · q kᵀ, masked) v`, and the log-sum-exp of every row.
///
/// q is `[batch, q_len, q_heads, head_dim]`, k and v are `[batch, kv_len, kv_heads, head_dim]`. The
/// fields can be read; the methods change them, and refuse what does not fit.
///
/// ```compile_fail
/// # use kyklos_plan::{AttentionProblem, Dtype, Mask};
/// let mut problem = AttentionProblem::new([1, 64, 8, 2, 64], Dtype::F32, Mask::causal())?;
/// problem.kv_heads = 3; // 8 query heads cannot share 3 KV heads
/// # Ok::<(), kyklos_plan::Error>(())
/// ```
#[readonly::make]
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct AttentionProblem {
    /// Batch entries.
    pub batch: u32,
    /// Query tokens.
    pub q_len: u32,
    /// Key and value tokens.
    pub kv_len: u32,
    /// Query heads.
    pub q_heads: u32,
    /// Key and value heads; divides `q_heads`.
    pub kv_heads: u32,
    /// Elements of one head of q, k and v; a multiple of 8.
    pub head_dim: u32,
    /// Storage type of q, k, v and o.
    #[serde(serialize_with = "dtype_by_name")]
    pub dtype: Dtype,
    /// Which keys a query sees, by global position.
    pub mask: Mask,
    /// Global position of query 0; key 0 is at position 0.
    pub q_offset: u32,
    /// Factor on q·k.
    pub scale: f32,
    /// `Some(c)`: logits become `c · tanh(logit / c)` before the mask.
    pub softcap: Option<f32>,
    /// One logit without a value for each query head; empty: none. It takes part in the softmax of
    /// every row, also of a row that sees no key. The log-sum-exp includes it.
    pub sinks: Vec<f32>,
    /// The attention bias tensor, if there is one: a boolean mask tensor or an additive bias tensor
    /// over (query, key), or over keys.
    pub bias: Option<BiasTensor>,
    /// Whether a backward pass also computes the gradient of the additive bias tensor. A forward
    /// pass is the same with it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub bias_gradient: bool,
    /// Format of keys and values that are sent between shards.
    pub wire: WireFormat,
    /// Whether rows are summed over tiles of [`TILE_KEYS`] keys in one order that does not depend
    /// on the mesh: on one type of device the result is then the same, byte for byte, on any
    /// mesh. Costs a state for each tile, and shards must begin and end with tiles.
    pub fixed_order: bool,
    /// Whether no backward pass follows. Few query rows are then computed by kernels for decoding,
    /// whose logits are rounded otherwise than those of a backward pass: its gradients would be
    /// wrong where logits are large.
    #[serde(skip)]
    pub inference: bool,
    /// Replicated keys: every rank holds them from the start. An example is the keys of a prompt
    /// beside an image that is split. They are never sent, and every row meets them once, on
    /// its own rank. Empty: each key has one owner.
    pub replicated: Range<u32>,
    /// Whether every rank holds all queries from the start and gets all output rows, as in
    /// decoding, where every rank computes the same new token. Queries are then never sent, and
    /// the placement of queries is [`Placement::everywhere`](crate::Placement::everywhere).
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub same_queries: bool,
    /// The ranks that get output rows.
    #[serde(skip_serializing_if = "Results::is_owner")]
    pub results: Results,
}

impl AttentionProblem {
    /// A problem with `scale = 1/√head_dim`, no offset and no softcap.
    ///
    /// `shape` is `[batch, seq, q_heads, kv_heads, head_dim]`.
    ///
    /// # Errors
    /// [`Error::Request`] where the parts do not fit each other.
    pub fn new(shape: [u32; 5], dtype: Dtype, mask: Mask) -> Result<Self> {
        let [batch, seq, q_heads, kv_heads, head_dim] = shape;
        #[expect(clippy::cast_precision_loss, reason = "head dims are small")]
        let scale = 1.0 / (head_dim as f32).sqrt();
        Self {
            batch,
            q_len: seq,
            kv_len: seq,
            q_heads,
            kv_heads,
            head_dim,
            dtype,
            mask,
            q_offset: 0,
            scale,
            softcap: None,
            sinks: Vec::new(),
            bias: None,
            bias_gradient: false,
            wire: WireFormat::Same,
            fixed_order: false,
            inference: false,
            replicated: 0..0,
            same_queries: false,
            results: Results::Owner,
        }
        .checked()
    }

    /// This problem with `q_len` queries, the first of them at global position `q_offset`.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_queries(self, q_len: u32, q_offset: u32) -> Result<Self> {
        Self { q_len, q_offset, ..self }.checked()
    }

    /// This problem with `kv_len` keys.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_keys(self, kv_len: u32) -> Result<Self> {
        Self { kv_len, ..self }.checked()
    }

    /// This problem with tensors of another storage type.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_dtype(self, dtype: Dtype) -> Result<Self> {
        Self { dtype, ..self }.checked()
    }

    /// This problem with another mask.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_mask(self, mask: Mask) -> Result<Self> {
        Self { mask, ..self }.checked()
    }

    /// This problem with another factor on q·k, and with a softcap.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_logits(self, scale: f32, softcap: Option<f32>) -> Result<Self> {
        Self { scale, softcap, ..self }.checked()
    }

    /// This problem with sinks: one logit for each query head, or none.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_sinks(self, sinks: Vec<f32>) -> Result<Self> {
        Self { sinks, ..self }.checked()
    }

    /// This problem with keys and values sent in another format; for f16 tensors, f16 is
    /// [`WireFormat::Same`].
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_wire(self, wire: WireFormat) -> Result<Self> {
        let same = (self.dtype, wire) == (Dtype::F16, WireFormat::F16);
        Self { wire: if same { WireFormat::Same } else { wire }, ..self }.checked()
    }

    /// This problem with or without sums in an order that does not depend on the mesh.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_fixed_order(self, fixed_order: bool) -> Result<Self> {
        Self { fixed_order, ..self }.checked()
    }

    /// This problem with or without a backward pass that follows ([`Self::inference`]).
    #[must_use]
    pub fn with_inference(self, inference: bool) -> Self {
        Self { inference, ..self }
    }

    /// This problem with keys that every rank holds from the start.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_replicated(self, replicated: Range<u32>) -> Result<Self> {
        // An empty range has one form only.
        let replicated = if replicated.is_empty() { 0..0 } else { replicated };
        Self { replicated, ..self }.checked()
    }

    /// This problem with all queries on every rank, or with one owner for each.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_same_queries(self, same_queries: bool) -> Result<Self> {
        Self { same_queries, ..self }.checked()
    }

    /// This problem with output rows on other ranks than the owners of their queries.
    ///
    /// # Errors
    /// As [`Self::new`]; also where every rank gets all rows already ([`Self::same_queries`]).
    pub fn with_results(self, results: Results) -> Result<Self> {
        Self { results, ..self }.checked()
    }

    /// Query heads that share one KV head.
    pub fn group(&self) -> u32 {
        self.q_heads / self.kv_heads
    }

    /// Global position of query `token`.
    pub fn q_position(&self, token: u32) -> u32 {
        token + self.q_offset
    }

    fn checked(self) -> Result<Self> {
        let Self { batch, kv_len, q_heads, kv_heads, head_dim, .. } = self;
        for (name, value) in
            [("batch", batch), ("query heads", q_heads), ("kv heads", kv_heads), ("head dim", head_dim)]
        {
            if value == 0 {
                return Err(Error::request(
                    format!("{name} is 0"),
                    "every extent but the sequence is at least 1",
                ));
            }
        }
        if !q_heads.is_multiple_of(kv_heads) {
            return Err(Error::request(
                format!("{q_heads} query heads cannot share {kv_heads} kv heads evenly"),
                "let the number of kv heads divide the number of query heads",
            ));
        }
        if !head_dim.is_multiple_of(8) || head_dim > MAX_HEAD_DIM {
            return Err(Error::request(
                format!("head dim {head_dim} is not supported"),
                format!("use a multiple of 8 up to {MAX_HEAD_DIM}"),
            ));
        }
        if self.same_queries && self.results != Results::Owner {
            return Err(Error::request(
                "results sent to other ranks, of queries that every rank holds",
                "leave the results where they are: every rank has all of them",
            ));
        }
        if !self.scale.is_finite() {
            return Err(Error::request(format!("scale {} is not finite", self.scale), "use a finite scale"));
        }
        if self.softcap.is_some_and(|cap| !(cap.is_finite() && cap > 0.0)) {
            return Err(Error::request(
                format!("softcap {} is not a positive number", self.softcap.unwrap_or_default()),
                "use a positive softcap, or none",
            ));
        }
        // With a larger one q·k · scale / softcap is below the smallest normal f32, which GPUs take for 0.
        if let Some(cap) = self.softcap.filter(|cap| *cap > MOST_SOFTCAP) {
            return Err(Error::request(
                format!("softcap {cap:e} is above {MOST_SOFTCAP:e}"),
                "leave it out: it changes no logit",
            ));
        }
        if !self.sinks.is_empty() && self.sinks.len() != q_heads as usize {
            return Err(Error::request(
                format!("{} sinks for {q_heads} query heads", self.sinks.len()),
                "give one sink for each query head, or none",
            ));
        }
        if let Some(sink) = self.sinks.iter().find(|sink| !sink.is_finite()) {
            return Err(Error::request(
                format!("a sink is {sink}"),
                "use finite sinks; a head without one is far below its logits, such as -1e30",
            ));
        }
        self.check_size()?;
        if self.wire == WireFormat::F16 && self.dtype != Dtype::F32 {
            return Err(Error::request(
                format!("f16 on the wire for tensors of {}", self.dtype),
                "send tensors as they are, f32 as f16, or any as int8",
            ));
        }
        if self.replicated.end > kv_len {
            let Range { start, end } = self.replicated;
            return Err(Error::request(
                format!("keys {start}..{end} of {kv_len} on every rank"),
                "name keys that exist",
            ));
        }
        if self.fixed_order && self.wire.rounds() {
            return Err(Error::request(
                format!("a fixed order with {} on the wire", self.wire),
                "rounding would depend on the owners of keys: send tensors as they are",
            ));
        }
        if let Some(bias) = self.bias {
            bias.fits(batch, q_heads, kv_len)?;
        }
        if self.bias_gradient && self.bias.is_none_or(|bias| bias.kind == BiasKind::Mask) {
            return Err(Error::request(
                "the gradient of a bias, in a problem without an additive bias tensor",
                "give the bias tensor, or leave its gradient out: a mask has none",
            ));
        }
        self.mask.fits(batch, kv_len)?;
        Ok(self)
    }
}

fn dtype_by_name<S: serde::Serializer>(dtype: &Dtype, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(dtype.name())
}

/// Largest softcap.
const MOST_SOFTCAP: f32 = 1e30;

/// Keys of a tile of [`AttentionProblem::fixed_order`]. The result of a row must not depend, in any
/// byte, on the other rows of a kernel call. Kernels must divide keys into their own steps from the
/// first key of a call on.
pub const TILE_KEYS: u32 = 256;
/// No kernel has been tried beyond this.
const MAX_HEAD_DIM: u32 = 512;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_that_does_not_fit_itself_is_refused() {
        let make = |shape| AttentionProblem::new(shape, Dtype::F32, Mask::full());
        assert!(make([1, 0, 8, 2, 64]).is_ok(), "no tokens is a sequence too");
        for shape in [
            [0, 8, 8, 2, 64],
            [1, 8, 8, 3, 64],
            [1, 8, 8, 0, 64],
            [1, 8, 8, 2, 60],
            [1, 8, 8, 2, 0],
            [1, u32::MAX, 8, 2, 64],
            [u32::MAX, 1 << 30, 1 << 20, 1, 512],
            [u32::MAX, 0, 1, 1, 8],
            [1, 8, 2, 4, 64],
        ] {
            assert!(make(shape).unwrap_err().is_request(), "{shape:?}");
        }
        let problem = make([2, 8, 8, 2, 64]).unwrap();
        assert!(problem.clone().with_logits(f32::NAN, None).is_err());
        assert!(problem.clone().with_logits(1.0, Some(0.0)).is_err());
        assert!(problem.clone().with_queries(8, u32::MAX - 3).is_err());
        assert!(problem.clone().with_sinks(vec![0.0; 7]).is_err());
        assert!(problem.clone().with_sinks(vec![f32::NAN; 8]).is_err());
        assert!(problem.clone().with_sinks(vec![0.0; 8]).is_ok());
        let fixed = problem.clone().with_fixed_order(true).unwrap();
        assert!(fixed.with_wire(WireFormat::F16).is_err(), "who rounds depends on the mesh");
        for dtype in Dtype::ALL {
            let typed = AttentionProblem::new([2, 8, 8, 2, 64], dtype, Mask::full()).unwrap();
            assert!(typed.clone().with_wire(WireFormat::Int8).is_ok());
            match (dtype, typed.clone().with_wire(WireFormat::F16)) {
                (Dtype::F32, problem) => assert_eq!(problem.unwrap().wire, WireFormat::F16),
                (Dtype::F16, problem) => assert_eq!(problem.unwrap(), typed),
                (Dtype::Bf16, problem) => assert!(problem.unwrap_err().is_request()),
            }
        }
        let mask = "valid:1,2,3".parse().unwrap();
        assert!(AttentionProblem::new([2, 8, 8, 2, 64], Dtype::F32, mask).is_err());
    }
}
