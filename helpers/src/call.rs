//! The attention that an owner computes, and the parts that it is cut into.

use std::ops::Range;

use bytes::Bytes;
use kyklos::backend::StateShape;
use kyklos::{Attention, AttentionProblem, BiasTensor, Dtype, Error, Mask, Result, Tensor, WireFormat};

/// Extents and type of the tensors of a call: q `[batch, q_len, q_heads, head_dim]`, k and v
/// `[batch, kv_len, kv_heads, head_dim]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Batch entries.
    pub batch: u32,
    /// Queries.
    pub q_len: u32,
    /// Keys and values.
    pub kv_len: u32,
    /// Query heads.
    pub q_heads: u32,
    /// Key and value heads; divides `q_heads`.
    pub kv_heads: u32,
    /// Elements of a head; a multiple of 8.
    pub head_dim: u32,
    /// Storage type of q, k, v and o.
    pub dtype: Dtype,
}

impl Shape {
    /// The shape of these tensors.
    ///
    /// # Errors
    /// [`Error::Request`] for tensors that do not fit each other.
    pub fn of(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Self> {
        let [batch, q_len, q_heads, head_dim] = q.shape();
        let [_, kv_len, kv_heads, _] = k.shape();
        if k.shape() != [batch, kv_len, kv_heads, head_dim]
            || v.shape() != k.shape()
            || [k.dtype(), v.dtype()] != [q.dtype(); 2]
        {
            return Err(Error::request(
                format!(
                    "q of shape {:?} in {}, k {:?} in {}, v {:?} in {}",
                    q.shape(),
                    q.dtype(),
                    k.shape(),
                    k.dtype(),
                    v.shape(),
                    v.dtype()
                ),
                "give k and v one shape, with the batch, the dim and the type of q",
            ));
        }
        let extent = |value: usize| {
            u32::try_from(value).map_err(|_| {
                Error::request(format!("an extent of {value}"), format!("use at most {}", u32::MAX))
            })
        };
        Ok(Self {
            batch: extent(batch)?,
            q_len: extent(q_len)?,
            kv_len: extent(kv_len)?,
            q_heads: extent(q_heads)?,
            kv_heads: extent(kv_heads)?,
            head_dim: extent(head_dim)?,
            dtype: q.dtype(),
        })
    }

    /// Query heads for each key/value head.
    pub fn group(&self) -> u32 {
        self.q_heads / self.kv_heads.max(1)
    }

    /// Refuses a call whose running state is larger than a device reads, by its
    /// [`most_state_bytes`](kyklos::backend::Backend::most_state_bytes).
    pub(crate) fn check_state(&self, most_state_bytes: Option<u64>) -> Result<()> {
        let [batch, rows, heads, dim] =
            [self.batch, self.q_len, self.q_heads, self.head_dim].map(|extent| extent as usize);
        let bytes = StateShape { batch, rows, heads, dim }.ml_bytes() as u64;
        if most_state_bytes.is_some_and(|most| bytes > most) {
            return Err(Error::request(
                format!("a call whose sums take {bytes} bytes, more than this device binds at once"),
                "make it smaller: fewer queries, heads or batch entries",
            ));
        }
        Ok(())
    }
}

/// What a call computes beside its tensors, as the options of [`Attention`].
///
/// ```
/// use kyklos::Mask;
/// use kyklos_helpers::Call;
///
/// let call = Call { mask: Mask::causal(), scale: Some(0.125), ..Call::default() };
/// ```
#[derive(Clone, Debug, Default)]
pub struct Call {
    /// Which keys a query sees.
    pub mask: Mask,
    /// Factor on q·k; `1/√head_dim` if there is none.
    pub scale: Option<f32>,
    /// As [`Attention::softcap`].
    pub softcap: Option<f32>,
    /// As [`Attention::sinks`].
    pub sinks: Vec<f32>,
    /// As [`Attention::q_offset`].
    pub q_offset: u32,
    /// A bias tensor with its rows, in the layout of [`BiasTensor`]. Forecasts do not read the
    /// rows: there may be none.
    pub bias: Option<(BiasTensor, Bytes)>,
    /// The form of q, k, v and o between owner and helpers. Every form but
    /// [`WireFormat::Same`] rounds them.
    pub wire: WireFormat,
    /// Whether the call computes the gradients of q, k and v instead of the output.
    pub gradients: bool,
}

/// A part of a call: some heads, and some of their queries, with all keys and all batch entries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Key/value heads, with the query heads that use them.
    pub kv_heads: Range<u32>,
    /// Queries.
    pub rows: Range<u32>,
}

impl Part {
    /// The whole call.
    pub fn whole(shape: &Shape) -> Self {
        Self { kv_heads: 0..shape.kv_heads, rows: 0..shape.q_len }
    }

    /// Its query heads.
    pub fn q_heads(&self, shape: &Shape) -> Range<u32> {
        self.kv_heads.start * shape.group()..self.kv_heads.end * shape.group()
    }

    /// The shape of its tensors.
    pub fn shape(&self, shape: &Shape) -> Shape {
        let kv_heads = self.kv_heads.end - self.kv_heads.start;
        Shape {
            q_len: self.rows.end - self.rows.start,
            q_heads: kv_heads * shape.group(),
            kv_heads,
            ..*shape
        }
    }

    /// Its options, with its rows of a bias.
    pub fn call(&self, call: &Call, shape: &Shape) -> Call {
        let heads = self.q_heads(shape);
        let of_heads =
            |sinks: &Vec<f32>| sinks.get(heads.start as usize..heads.end as usize).map(<[_]>::to_vec);
        Call {
            sinks: of_heads(&call.sinks).unwrap_or_default(),
            q_offset: call.q_offset.saturating_add(self.rows.start),
            bias: self.bias(call, shape),
            ..call.clone()
        }
    }

    /// Its part of the bias tensor.
    fn bias(&self, call: &Call, shape: &Shape) -> Option<(BiasTensor, Bytes)> {
        let (tensor, rows) = call.bias.as_ref()?;
        let row_bytes = tensor.row_bytes(shape.dtype, shape.kv_len);
        let heads = if tensor.heads == 1 { 0..1 } else { self.q_heads(shape) };
        let of_rows = if tensor.shared_rows { 0..1 } else { self.rows.clone() };
        let all_rows = if tensor.shared_rows { 1 } else { shape.q_len as usize };
        let all_heads = tensor.heads as usize;
        let part = BiasTensor { heads: heads.end - heads.start, ..*tensor };
        let whole_heads = part.heads as usize == all_heads;
        if whole_heads && of_rows.len() == all_rows {
            return Some((part, rows.clone()));
        }
        let mut bytes = Vec::new();
        for entry in 0..tensor.batch as usize {
            for row in of_rows.clone() {
                let first =
                    ((entry * all_rows + row as usize) * all_heads + heads.start as usize) * row_bytes;
                bytes.extend_from_slice(&rows[first..first + heads.len() * row_bytes]);
            }
        }
        Some((part, bytes.into()))
    }

    /// Its rows and heads of `q`, and of tensors that are shaped as q.
    ///
    /// # Errors
    /// As [`Tensor::view`].
    pub fn of_queries(&self, q: &Tensor, shape: &Shape) -> Result<Tensor> {
        narrowed(q, self.rows.clone(), self.q_heads(shape))
    }

    /// Its heads of `k` or `v`.
    ///
    /// # Errors
    /// As [`Tensor::view`].
    pub fn of_keys(&self, k: &Tensor) -> Result<Tensor> {
        let tokens = u32::try_from(k.shape()[1]).unwrap_or(u32::MAX);
        narrowed(k, 0..tokens, self.kv_heads.clone())
    }
}

/// Some tokens and heads of a dense tensor.
fn narrowed(tensor: &Tensor, tokens: Range<u32>, heads: Range<u32>) -> Result<Tensor> {
    let [batch, all_tokens, all_heads, dim] = tensor.shape();
    let shape = [batch, tokens.len(), heads.len(), dim];
    let strides = [all_tokens * all_heads * dim, all_heads * dim, dim, 1];
    tensor.view(shape, strides, tokens.start as usize * strides[1] + heads.start as usize * dim)
}

impl Call {
    /// The options as a session takes them.
    pub(crate) fn attention(&self) -> Attention {
        let mut attention =
            Attention::new().mask(self.mask.clone()).sinks(self.sinks.clone()).q_offset(self.q_offset);
        if let Some(scale) = self.scale {
            attention = attention.scale(scale);
        }
        if let Some(softcap) = self.softcap {
            attention = attention.softcap(softcap);
        }
        if let Some((tensor, rows)) = &self.bias {
            attention = attention.bias(*tensor, rows.clone());
        }
        if !self.gradients {
            attention = attention.execution(kyklos::Execution::new().inference(true));
        }
        attention
    }

    /// The problem of this call, checked, but for the rows of a bias.
    ///
    /// # Errors
    /// [`Error::Request`] for a call that no device can compute.
    pub fn problem(&self, shape: &Shape) -> Result<AttentionProblem> {
        let &Shape { batch, q_len, kv_len, q_heads, kv_heads, head_dim, dtype } = shape;
        let problem =
            AttentionProblem::new([batch, kv_len, q_heads, kv_heads, head_dim], dtype, self.mask.clone())?
                .with_queries(q_len, self.q_offset)?;
        let scale = self.scale.unwrap_or(problem.scale);
        let bias = self.bias.as_ref().map(|(tensor, _)| *tensor);
        let problem =
            problem.with_logits(scale, self.softcap)?.with_sinks(self.sinks.clone())?.with_bias(bias)?;
        Ok(problem)
    }

    /// Refuses a bias whose rows are not those of the call.
    ///
    /// # Errors
    /// [`Error::Request`].
    pub(crate) fn check_bias_rows(&self, shape: &Shape) -> Result<()> {
        let Some((tensor, rows)) = &self.bias else { return Ok(()) };
        let wanted = tensor.bytes(shape.dtype, shape.q_len, shape.kv_len);
        if rows.len() as u64 == wanted {
            return Ok(());
        }
        Err(Error::request(
            format!("a bias tensor of {} bytes, the call needs {wanted}", rows.len()),
            "give a row for each query, or one row with shared_rows",
        ))
    }
}
