//! What a caller asks of a session: the attention to compute, and how ranks share it.

mod execution;
mod options;

use std::sync::Arc;

use bytes::Bytes;

use crate::backend::{Backend, Device};
use crate::error::{Error, Result};
use crate::tensor::Tensor;
use kyklos_plan::plan::{PlanSet, ProvedPlans};
use kyklos_plan::{BiasKind, BiasTensor, Dtype, Mask};

pub use execution::Execution;
pub(crate) use execution::GivenPlans;
pub(crate) use options::{Extents, Options};

/// The attention to compute: `softmax(scale · q kᵀ, masked) v`. Lengths, heads and types come from
/// the tensors of the call. Each option has a default; all ranks use the same ones.
///
/// ```
/// use kyklos::{Attention, Execution, Mask, Strategy};
///
/// let call = Attention::new().mask(Mask::causal()).softcap(30.0).label("layer 3");
/// let call = call.execution(Execution::new().strategy(Strategy::Ring));
/// ```
#[derive(Clone, Debug, Default)]
pub struct Attention {
    pub(crate) options: Options,
    pub(crate) label: String,
    /// This rank's rows of the attention bias tensor, or the whole tensor if all queries share its
    /// rows.
    pub(crate) bias_rows: Option<BiasRows>,
    /// Rows and keys of that tensor, where they are known: ranks compare them before they plan.
    pub(crate) bias_axes: Option<[u32; 2]>,
    /// Hash of a tensor that must be the same on all ranks.
    pub(crate) shared_bias: Option<u64>,
}

/// Rows of an attention bias tensor.
#[derive(Clone, Debug)]
pub(crate) enum BiasRows {
    /// In the layout of [`BiasKind`](crate::BiasKind).
    Bytes(Bytes),
    /// Numbers, rows without padding.
    Tensor(Tensor),
    /// In the layout of [`BiasKind`](crate::BiasKind), on a device.
    Words(Tensor),
}

impl BiasRows {
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::Bytes(rows) => rows.len() as u64,
            Self::Tensor(rows) | Self::Words(rows) => {
                rows.shape().iter().product::<usize>() as u64 * rows.dtype().bytes() as u64
            }
        }
    }
}

impl Attention {
    /// Every query sees every key; `scale = 1/√dim`; no softcap, sinks or bias; query 0 is at
    /// position 0.
    pub fn new() -> Self {
        Self::default()
    }

    /// The call that these plans compute: of [`plan_forward`](crate::plan_forward) or
    /// [`plan_placed`](crate::plan_placed) for [`Session::attend`](crate::Session::attend), of
    /// [`plan_backward`](crate::plan_backward) for
    /// [`Session::backward`](crate::Session::backward), or of [`Self::plans`]. A backward pass
    /// follows only plans of a problem without
    /// [`AttentionProblem::inference`](crate::AttentionProblem::inference). Every rank gives the
    /// same plans, and passes the tokens that they give it. Where the problem has an attention
    /// bias tensor, its rows follow by [`Self::bias`].
    ///
    /// ```
    /// # #[cfg(feature = "cpu")] {
    /// use std::sync::Arc;
    ///
    /// use kyklos::backend::Device;
    /// use kyklos::plan::{ProvedPlans, explain};
    /// use kyklos::{Attention, AttentionProblem, Dtype, Mask, Mesh, PlacementKind, Session, Split, Strategy, Tensor, plan_forward};
    /// use kyklos_transport::in_process_group;
    ///
    /// let problem = AttentionProblem::new([1, 64, 4, 2, 32], Dtype::F32, Mask::causal())?;
    /// let mesh = Mesh::new(1, 1)?;
    /// let set = plan_forward(&problem, mesh, PlacementKind::Zigzag, &Split::Even, Strategy::Dense)?;
    /// let plans = Arc::new(ProvedPlans::new(set)?);
    /// println!("{}", explain(plans.set(), plans.checks(), None));
    ///
    /// let mut session = Session::new(in_process_group(1).remove(0), Device::cpu());
    /// let q = Tensor::new([1, 64, 4, 32], vec![0.5_f32; 64 * 4 * 32])?;
    /// let kv = Tensor::new([1, 64, 2, 32], vec![0.5_f32; 64 * 2 * 32])?;
    /// let output = session.attend(&Attention::planned(&plans), &q, &kv, &kv)?;
    /// # }
    /// # Ok::<(), kyklos::Error>(())
    /// ```
    pub fn planned(plans: &Arc<ProvedPlans>) -> Self {
        let PlanSet { problem, mesh, strategy, .. } = plans.set();
        let execution = Execution {
            strategy: Some(*strategy),
            mesh: Some(*mesh),
            wire: problem.wire,
            fixed_order: problem.fixed_order,
            inference: problem.inference,
            replicated: problem.replicated.clone(),
            same_queries: problem.same_queries,
            results: problem.results,
            plans: Some(GivenPlans(plans.clone())),
            ..Execution::new()
        };
        let options = Options {
            mask: problem.mask.clone(),
            scale: Some(problem.scale),
            softcap: problem.softcap,
            sinks: problem.sinks.clone(),
            q_offset: problem.q_offset,
            bias: problem.bias,
            bias_gradient: problem.bias_gradient,
            execution,
        };
        Self { options, ..Self::new() }
    }

    /// Which keys a query sees, by global position: in all batch entries, or in each
    /// ([`Mask::per_entry`]).
    #[must_use]
    pub fn mask(mut self, mask: Mask) -> Self {
        self.options.mask = mask;
        self
    }

    /// Factor on q·k.
    #[must_use]
    pub fn scale(mut self, scale: f32) -> Self {
        self.options.scale = Some(scale);
        self
    }

    /// Logits become `softcap · tanh(logit / softcap)` before the mask.
    #[must_use]
    pub fn softcap(mut self, softcap: f32) -> Self {
        self.options.softcap = Some(softcap);
        self
    }

    /// One logit without a value for each query head
    /// ([`AttentionProblem::sinks`](crate::AttentionProblem::sinks)).
    #[must_use]
    pub fn sinks(mut self, sinks: Vec<f32>) -> Self {
        self.options.sinks = sinks;
        self
    }

    /// Position of the first query of the call, the first one of rank 0; key 0 of the call is at
    /// position 0, and masks compare positions. All ranks give the same number. 0 where queries
    /// and keys are of the same tokens. Where 8 new tokens follow 100 cached ones and the keys
    /// are of all 108, it is 100.
    #[must_use]
    pub fn q_offset(mut self, q_offset: u32) -> Self {
        self.options.q_offset = q_offset;
        self
    }

    /// An attention bias tensor. `rows` are those of this rank's queries, `[its batch, tokens, its
    /// heads, row]`. With [`BiasTensor::shared_rows`] they are the whole tensor `[its batch, 1,
    /// its heads, row]`, the same bytes on all ranks. The layout of a row is in
    /// [`BiasKind`](crate::BiasKind).
    ///
    /// ```
    /// use kyklos::{Attention, BiasKind, BiasTensor};
    ///
    /// // A key mask [2, 40]: entry 0 sees the even keys, entry 1 the first 25.
    /// let keys = BiasTensor { kind: BiasKind::Mask, batch: 2, heads: 1, shared_rows: true };
    /// let visible = |entry: u32, key: u32| if entry == 0 { key % 2 == 0 } else { key < 25 };
    /// let words = (0..2).flat_map(|entry| BiasTensor::pack((0..40).map(move |key| visible(entry, key))));
    /// let rows: Vec<u8> = words.flat_map(u32::to_ne_bytes).collect();
    /// let call = Attention::new().bias(keys, rows.into());
    /// ```
    #[must_use]
    pub fn bias(mut self, bias: BiasTensor, rows: Bytes) -> Self {
        self.options.bias = Some(bias);
        self.shared_bias = bias.shared_rows.then(|| digest(&rows));
        self.bias_rows = Some(BiasRows::Bytes(rows));
        self.bias_axes = None;
        self
    }

    /// The extents of the tensor of [`Self::bias`]: its rows of each batch entry and head, and its
    /// keys. Then a call of other queries or
    /// keys is refused by these axes; without them only the number of bytes is compared, which does
    /// not see a key more or less.
    #[must_use]
    pub fn bias_axes(mut self, rows: u32, keys: u32) -> Self {
        self.bias_axes = Some([rows, keys]);
        self
    }

    /// An additive bias tensor, as [`Self::bias`], from this rank's rows as a tensor `[batch or 1,
    /// tokens, query heads or 1, keys]` of the
    /// type of q. Where it is on the session's device, no element passes through the host: it is
    /// read in place, and copied once on the device if it is not dense.
    ///
    /// ```
    /// use kyklos::{Attention, Tensor};
    ///
    /// // Two tokens, one row for all heads, 40 keys.
    /// let distance = (0..80).map(|index| -0.1 * (index % 40) as f32).collect();
    /// let call = Attention::new().bias_tensor(&Tensor::new([1, 2, 1, 40], distance)?)?;
    /// # Ok::<(), kyklos::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Request`] for rows that do not end on a 4-byte boundary: an odd number of keys in a
    /// 2-byte type.
    pub fn bias_tensor(mut self, rows: &Tensor) -> Result<Self> {
        let [batch, queries, heads, keys] = rows.shape();
        if !(keys * rows.dtype().bytes()).is_multiple_of(4) {
            return Err(Error::request(
                format!("a bias tensor with rows of {keys} keys in {}", rows.dtype()),
                "give it an even number of keys, or the padded rows in host memory",
            ));
        }
        let extent = |value: usize| {
            let beyond = |_| {
                Error::request(
                    format!("a bias tensor with an extent of {value}"),
                    format!("use at most {}", u32::MAX),
                )
            };
            u32::try_from(value).map_err(beyond)
        };
        let (batch, heads) = (extent(batch)?, extent(heads)?);
        self.bias_axes = Some([extent(queries)?, extent(keys)?]);
        self.options.bias = Some(BiasTensor { kind: BiasKind::Additive, batch, heads, shared_rows: false });
        self.shared_bias = None;
        self.bias_rows = Some(BiasRows::Tensor(rows.clone()));
        Ok(self)
    }

    /// The same call with its bias tensor on `device`, for several calls: otherwise each call
    /// brings it there.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Device`]; [`Error::Request`] for a tensor of another
    /// device.
    pub fn to_device(mut self, device: &Device) -> Result<Self> {
        self.bias_rows = match self.bias_rows {
            Some(BiasRows::Bytes(rows)) => {
                let words = [1, 1, 1, rows.len() / 4];
                let buffer = device.upload(BIAS, rows)?;
                Some(BiasRows::Words(Tensor::on_device(words, Dtype::F32, device, buffer)))
            }
            Some(BiasRows::Tensor(rows)) => Some(BiasRows::Tensor(rows.to_device(device)?)),
            rows => rows,
        };
        Ok(self)
    }

    /// A backward pass of this call also computes the gradient of its additive bias tensor. The
    /// forward pass is the same with it.
    #[must_use]
    pub fn bias_gradient(mut self) -> Self {
        self.options.bias_gradient = true;
        self
    }

    /// A text that tells this call apart from other calls of the same shape, such as a layer and a
    /// step; at most [`MAX_LABEL_BYTES`] bytes. Ranks with different labels get an error.
    #[must_use]
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.label = label.into();
        self
    }

    /// How the ranks share the call. A call of given plans ([`Self::planned`]) takes none beside
    /// theirs.
    #[must_use]
    pub fn execution(mut self, execution: Execution) -> Self {
        // Without the plans, the session would make others, of other tokens.
        let plans = self.options.execution.plans.take();
        self.options.execution = Execution { plans, ..execution };
        self
    }

    /// The call of other plans with the bias tensor and the label of this one: its backward pass,
    /// of the plans of [`plan_backward`](crate::plan_backward).
    #[must_use]
    pub fn with_plans(&self, plans: &Arc<ProvedPlans>) -> Self {
        Self { options: Self::planned(plans).options, ..self.clone() }
    }
}

/// The name of a bias tensor's buffer in errors.
pub(crate) const BIAS: &str = "attention bias tensor";

/// Longest label of a call, in bytes.
pub const MAX_LABEL_BYTES: usize = 128;

/// The first bytes of a hash.
fn digest(bytes: &[u8]) -> u64 {
    let hash = blake3::hash(bytes);
    let mut first = [0; 8];
    first.copy_from_slice(&hash.as_bytes()[..8]);
    u64::from_le_bytes(first)
}

/// Refuses a label that does not fit a vote.
pub(crate) fn checked_label(label: &str) -> Result<()> {
    if label.len() <= MAX_LABEL_BYTES {
        return Ok(());
    }
    Err(Error::request(
        format!("a label of {} bytes", label.len()),
        format!("use at most {MAX_LABEL_BYTES} bytes"),
    ))
}
