//! How the ranks share a call.

use std::ops::Range;
use std::sync::Arc;

use kyklos_plan::plan::ProvedPlans;
use kyklos_plan::{Mesh, Placement, PlacementKind, Results, Strategy, WireFormat};

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

impl Execution {
    /// The mesh that sends fewest bytes, with its default strategy. Tokens in the order of the
    /// ranks.
    pub fn new() -> Self {
        Self::default()
    }

    /// The strategy. By default that of the mesh ([`Strategy::of_mesh`]); without a mesh, the one
    /// that sends the fewest bytes: few queries travel to the keys, else keys travel.
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

    /// Which tokens the ranks hold, given how many: by default rank 0 holds the first ones, rank 1
    /// the next ones, and so on. Other placements need a [`Self::mesh`].
    #[must_use]
    pub fn placement(mut self, placement: PlacementKind) -> Self {
        self.placement = placement;
        self
    }

    /// Exactly these tokens on each rank: the owners of queries and, separately, of keys and
    /// values. Each rank passes its tokens in the order of the lists. Replaces
    /// [`Self::placement`].
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

    /// Sums in an order that does not depend on the mesh
    /// ([`AttentionProblem::fixed_order`](crate::AttentionProblem::fixed_order)).
    #[must_use]
    pub fn fixed_order(mut self, fixed_order: bool) -> Self {
        self.fixed_order = fixed_order;
        self
    }

    /// No backward pass follows
    /// ([`AttentionProblem::inference`](crate::AttentionProblem::inference)).
    /// [`Self::same_queries`] and caches imply it.
    #[must_use]
    pub fn inference(mut self, inference: bool) -> Self {
        self.inference = inference;
        self
    }

    /// Keys that every rank holds from the start
    /// ([`AttentionProblem::replicated`](crate::AttentionProblem::replicated)). In the k and v of
    /// each rank they come first.
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

    /// All ranks pass the same queries, and each gets all output rows
    /// ([`AttentionProblem::same_queries`](crate::AttentionProblem::same_queries)): as in decoding,
    /// where every rank computes the same new token. Each rank attends to its own keys, and one
    /// exchange of running states completes the rows on all ranks. Ranks with devices of one
    /// type get the same bytes. That the queries are the same is not checked. Not together with
    /// [`Self::results`], [`Self::fixed_order`], a rounded [`Self::wire`] or a Ulysses mesh.
    #[must_use]
    pub fn same_queries(mut self) -> Self {
        self.same_queries = true;
        self
    }
}
