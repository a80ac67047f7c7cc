//! What a caller asks of a session: the attention to compute, and how ranks share it.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use crate::backend::{Backend, Device};
use crate::plan::{ProvedPlans, World};
use crate::{
    AttentionProblem, BiasKind, BiasTensor, Dtype, Error, Mask, Mesh, Placement, PlacementKind, Result,
    Results, Strategy, Tensor, TokenRuns, WireFormat,
};

/// The attention to compute: `softmax(scale · q kᵀ, masked) v`. Lengths, heads and types come from the tensors of the call.
/// Each option has a default; all ranks use the same ones.
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
    /// This rank's rows of the attention bias tensor, or the whole tensor if all queries share its rows.
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

/// The options that are the same on all ranks.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Options {
    pub(crate) mask: Mask,
    pub(crate) scale: Option<f32>,
    pub(crate) softcap: Option<f32>,
    pub(crate) sinks: Vec<f32>,
    pub(crate) q_offset: u32,
    pub(crate) bias: Option<BiasTensor>,
    pub(crate) bias_gradient: bool,
    pub(crate) execution: Execution,
}

/// How the ranks share a call. It changes the speed and the order of sums, not what is computed.
///
/// ```
/// use kyklos::{Execution, Mesh, PlacementKind, WireFormat};
/// let execution = Execution::new().mesh(Mesh::new(2, 2)?).placement(PlacementKind::Zigzag).wire(WireFormat::F16);
/// # Ok::<(), kyklos::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Execution {
    pub(crate) strategy: Option<Strategy>,
    pub(crate) mesh: Option<Mesh>,
    pub(crate) placement: PlacementKind,
    /// Of queries, and of keys and values.
    pub(crate) owners: Option<(Placement, Placement)>,
    pub(crate) wire: WireFormat,
    pub(crate) fixed_order: bool,
    pub(crate) inference: bool,
    pub(crate) replicated: Range<u32>,
    pub(crate) same_queries: bool,
    pub(crate) results: Results,
    /// The plans themselves, which decide all of it.
    pub(crate) plans: Option<GivenPlans>,
}

/// Plans that the caller has made.
#[derive(Clone, Debug)]
pub(crate) struct GivenPlans(pub(crate) Arc<ProvedPlans>);

impl PartialEq for GivenPlans {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Attention {
    /// Every query sees every key; `scale = 1/√dim`; no softcap, sinks or bias; query 0 is at position 0.
    pub fn new() -> Self {
        Self::default()
    }

    /// The call that these plans compute: of [`plan_world`](crate::plan_world) or [`plan_placed`](crate::plan_placed) for
    /// [`Session::attend`](crate::Session::attend), of [`plan_backward`](crate::plan_backward) for
    /// [`Session::backward`](crate::Session::backward), or of [`Self::plans`]. Every rank gives the same plans, and passes the tokens
    /// that they give it. Where the problem has an attention bias tensor, its rows follow by [`Self::bias`].
    ///
    /// ```
    /// # #[cfg(feature = "cpu")] {
    /// use std::sync::Arc;
    ///
    /// use kyklos::backend::Device;
    /// use kyklos::plan::{ProvedPlans, explain};
    /// use kyklos::{Attention, AttentionProblem, Dtype, Mask, Mesh, PlacementKind, Session, Split, Strategy, Tensor, plan_world};
    /// use kyklos_transport::in_process_group;
    ///
    /// let problem = AttentionProblem::new([1, 64, 4, 2, 32], Dtype::F32, Mask::causal())?;
    /// let mesh = Mesh::new(1, 1)?;
    /// let world = plan_world(&problem, mesh, PlacementKind::Zigzag, &Split::Even, Strategy::Dense)?;
    /// let plans = Arc::new(ProvedPlans::new(world)?);
    /// println!("{}", explain(plans.world(), plans.checks(), None));
    ///
    /// let mut session = Session::new(in_process_group(1).remove(0), Device::cpu());
    /// let q = Tensor::new([1, 64, 4, 32], vec![0.5_f32; 64 * 4 * 32])?;
    /// let kv = Tensor::new([1, 64, 2, 32], vec![0.5_f32; 64 * 2 * 32])?;
    /// let output = session.attend(&Attention::planned(&plans), &q, &kv, &kv)?;
    /// # }
    /// # Ok::<(), kyklos::Error>(())
    /// ```
    pub fn planned(plans: &Arc<ProvedPlans>) -> Self {
        let World { problem, mesh, strategy, .. } = plans.world();
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

    /// Which keys a query sees, by global position: in all batch entries, or in each ([`Mask::per_entry`]).
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

    /// One logit without a value for each query head ([`AttentionProblem::sinks`]).
    #[must_use]
    pub fn sinks(mut self, sinks: Vec<f32>) -> Self {
        self.options.sinks = sinks;
        self
    }

    /// Position of the first query of the call, the first one of rank 0; key 0 of the call is at position 0, and masks compare
    /// positions. All ranks give the same number. 0 where queries and keys are of the same tokens. Where 8 new tokens follow
    /// 100 cached ones and the keys are of all 108, it is 100.
    #[must_use]
    pub fn q_offset(mut self, q_offset: u32) -> Self {
        self.options.q_offset = q_offset;
        self
    }

    /// An attention bias tensor. `rows` are those of this rank's queries, `[its batch, tokens, its heads, row]`. With
    /// [`BiasTensor::shared_rows`] they are the whole tensor `[its batch, 1, its heads, row]`, the same bytes on all ranks. The
    /// layout of a row is in [`BiasKind`](crate::BiasKind).
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

    /// The extents of the tensor of [`Self::bias`]: its rows of each batch entry and head, and its keys. Then a call of other queries or
    /// keys is refused by these axes; without them only the number of bytes is compared, which does not see a key more or less.
    #[must_use]
    pub fn bias_axes(mut self, rows: u32, keys: u32) -> Self {
        self.bias_axes = Some([rows, keys]);
        self
    }

    /// An additive bias tensor, as [`Self::bias`], from this rank's rows as a tensor `[batch or 1, tokens, query heads or 1, keys]` of the
    /// type of q. Where it is on the session's device, no element passes through the host: it is read in place, and copied once on the
    /// device if it is not dense.
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
    /// [`Error::Request`] for rows that do not end on a 4-byte boundary: an odd number of keys in a 2-byte type.
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

    /// The same call with its bias tensor on `device`, for several calls: otherwise each call brings it there.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Device`]; [`Error::Request`] for a tensor of another device.
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

    /// A backward pass of this call also computes the gradient of its additive bias tensor. The forward pass is the same with it.
    #[must_use]
    pub fn bias_gradient(mut self) -> Self {
        self.options.bias_gradient = true;
        self
    }

    /// A text that tells this call apart from other calls of the same shape, such as a layer and a step; at most
    /// [`MAX_LABEL_BYTES`] bytes. Ranks with different labels get an error.
    #[must_use]
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.label = label.into();
        self
    }

    /// How the ranks share the call.
    #[must_use]
    pub fn execution(mut self, execution: Execution) -> Self {
        self.options.execution = execution;
        self
    }
}

/// The name of a bias tensor's buffer in errors.
pub(crate) const BIAS: &str = "attention bias tensor";

/// Longest label of a call, in bytes.
pub const MAX_LABEL_BYTES: usize = 128;

impl Execution {
    /// The mesh that sends fewest bytes, with its default strategy. Tokens in the order of the ranks.
    pub fn new() -> Self {
        Self::default()
    }

    /// The strategy. By default that of the mesh ([`Strategy::of_mesh`]); without a mesh, the one that sends the fewest bytes: few
    /// queries travel to the keys, else keys travel.
    #[must_use]
    pub fn strategy(mut self, strategy: Strategy) -> Self {
        self.strategy = Some(strategy);
        self
    }

    /// The mesh, of all ranks of the group. By default the one that sends fewest bytes.
    #[must_use]
    pub fn mesh(mut self, mesh: Mesh) -> Self {
        self.mesh = Some(mesh);
        self
    }

    /// Which tokens the ranks hold, given how many: by default rank 0 holds the first ones, rank 1 the next ones, and so on.
    /// Other placements need a [`Self::mesh`].
    #[must_use]
    pub fn placement(mut self, placement: PlacementKind) -> Self {
        self.placement = placement;
        self
    }

    /// Exactly these tokens on each rank: the owners of queries and, separately, of keys and values. Each rank passes its tokens in
    /// the order of the lists. Replaces [`Self::placement`].
    #[must_use]
    pub fn owners(mut self, queries: Placement, keys: Placement) -> Self {
        self.owners = Some((queries, keys));
        self
    }

    /// Format of keys and values that are sent between shards.
    #[must_use]
    pub fn wire(mut self, wire: WireFormat) -> Self {
        self.wire = wire;
        self
    }

    /// Sums in an order that does not depend on the mesh ([`AttentionProblem::fixed_order`]).
    #[must_use]
    pub fn fixed_order(mut self, fixed_order: bool) -> Self {
        self.fixed_order = fixed_order;
        self
    }

    /// No backward pass follows ([`AttentionProblem::inference`]). [`Self::same_queries`] and caches imply it.
    #[must_use]
    pub fn inference(mut self, inference: bool) -> Self {
        self.inference = inference;
        self
    }

    /// Keys that every rank holds from the start ([`AttentionProblem::replicated`]). In the k and v of each rank they come first.
    #[must_use]
    pub fn replicated(mut self, replicated: Range<u32>) -> Self {
        // An empty range has one form only.
        self.replicated = if replicated.is_empty() { 0..0 } else { replicated };
        self
    }

    /// The ranks that get output rows: by default the owners of the queries.
    #[must_use]
    pub fn results(mut self, results: Results) -> Self {
        self.results = results;
        self
    }

    /// All ranks pass the same queries, and each gets all output rows ([`AttentionProblem::same_queries`]): as in decoding,
    /// where every rank computes the same new token. Each rank attends to its own keys, and one exchange of running states
    /// completes the rows on all ranks. Ranks with devices of one type get the same bytes. That the queries are the same
    /// is not checked. Not together with [`Self::results`], [`Self::fixed_order`], a rounded [`Self::wire`] or a Ulysses mesh.
    #[must_use]
    pub fn same_queries(mut self) -> Self {
        self.same_queries = true;
        self
    }
}

impl Options {
    /// The problem of this call with these extents.
    pub(crate) fn problem(&self, extents: &Extents) -> Result<AttentionProblem> {
        let &Extents { batch, q_len, kv_len, q_heads, kv_heads, head_dim, dtype } = extents;
        let Execution { wire, fixed_order, replicated, same_queries, results, .. } = &self.execution;
        let problem =
            AttentionProblem::new([batch, kv_len, q_heads, kv_heads, head_dim], dtype, self.mask.clone())?
                .with_queries(q_len, self.q_offset)?;
        let scale = self.scale.unwrap_or(problem.scale);
        problem
            .with_logits(scale, self.softcap)?
            .with_sinks(self.sinks.clone())?
            .with_bias(self.bias)?
            .with_bias_gradient(self.bias_gradient)?
            .with_wire(*wire)?
            .with_fixed_order(*fixed_order)?
            .with_inference(self.execution.inference || *same_queries)
            .with_replicated(replicated.clone())?
            .with_same_queries(*same_queries)?
            .with_results(*results)
    }

    /// Hashes of the parts in which ranks may differ by mistake, each with its name in errors. Without tensors.
    pub(crate) fn digests(&self) -> [(&'static str, u64); 5] {
        let Self { mask, scale, softcap, sinks, q_offset, bias, bias_gradient, execution } = self;
        let Execution {
            strategy,
            mesh,
            placement,
            owners,
            wire,
            fixed_order,
            inference: _,
            replicated,
            same_queries,
            results,
            plans,
        } = execution;
        // Rebuilt token by token, so that equal lists give equal texts.
        let runs = |tokens: &TokenRuns| tokens.canonical().runs().to_vec();
        let lists = |placement: &Placement| placement.ranks().iter().map(runs).collect::<Vec<_>>();
        let owners = owners.as_ref().map(|(queries, keys)| [lists(queries), lists(keys)]);
        let plans = plans.as_ref().map(|GivenPlans(plans)| plans.hash());
        let bits = |value: &Option<f32>| value.map(f32::to_bits);
        let sinks: Vec<u32> = sinks.iter().map(|sink| sink.to_bits()).collect();
        [
            ("mask", digest(format!("{mask} {q_offset}").as_bytes())),
            (
                "scale, softcap or sinks",
                digest(format!("{:?} {:?} {sinks:?}", bits(scale), bits(softcap)).as_bytes()),
            ),
            ("attention bias tensor", digest(format!("{bias:?} {bias_gradient}").as_bytes())),
            ("mesh or strategy", digest(format!("{strategy:?} {mesh:?}").as_bytes())),
            (
                "placement, wire format, order of sums, replicated keys, same queries or results",
                digest(
                    format!("{placement} {owners:?} {wire:?} {fixed_order} {replicated:?} {same_queries} {results:?} {plans:?}")
                        .as_bytes(),
                ),
            ),
        ]
    }
}

/// The extents of a call over all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Extents {
    pub(crate) batch: u32,
    pub(crate) q_len: u32,
    pub(crate) kv_len: u32,
    pub(crate) q_heads: u32,
    pub(crate) kv_heads: u32,
    pub(crate) head_dim: u32,
    pub(crate) dtype: Dtype,
}

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
