//! From options to a problem on a mesh. Wrong requests are refused here, before any device is
//! opened.

pub(crate) mod description;

use std::sync::Arc;

use kyklos::machine::memory_bytes_of;
use kyklos::plan::ProvedPlans;
use kyklos::simulate::{
    Candidate, Cluster, EstimatedPlan, Feasibility, PlanQuery, Prediction, Shares, candidates, choose,
    fewest_bytes, predict, predict_backward,
};
use kyklos::{
    AttentionProblem, BiasKind, Dtype, MAX_RANKS, Mesh, PlacementKind, Split, Strategy, plan, plan_backward,
    plan_forward,
};

use self::description::nothing_fits;
use crate::failure::{Failure, Result};
use crate::options::{List, OrAuto, ProblemArgs, SplitName};
use crate::tensors::{InputFile, Source};

/// A problem with a chosen mesh, strategy and placement.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) problem: AttentionProblem,
    pub(crate) source: Source,
    pub(crate) mesh: Mesh,
    pub(crate) strategy: Strategy,
    pub(crate) placement: PlacementKind,
    pub(crate) split: Split,
    /// Predicted time of the forward pass in seconds, with `--hardware`.
    pub(crate) predicted_s: Option<f64>,
    /// Of the backward pass, with `--grad`.
    pub(crate) predicted_backward_s: Option<f64>,
    /// The description of `--hardware`.
    pub(crate) cluster: Option<Arc<Cluster>>,
    /// Where the options leave the shares to the speed of the devices: what they say of the mesh,
    /// strategy and placement.
    pub(crate) open: Option<Open>,
    /// Whether gradients are computed too.
    pub(crate) gradients: bool,
}

/// What the options say where they leave the shares to the speed of the devices.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Open {
    mesh: Option<Mesh>,
    strategy: Option<Strategy>,
    placement: Option<PlacementKind>,
    /// `--split auto`: also where the devices are of one kind.
    always: bool,
}

/// Predicted times in seconds.
#[derive(Clone, Copy, Debug)]
struct Predicted {
    forward_s: f64,
    /// With `--grad`.
    backward_s: Option<f64>,
}

impl Predicted {
    fn both_s(self) -> f64 {
        self.forward_s + self.backward_s.unwrap_or(0.0)
    }
}

/// The predicted seconds of the forward pass of a candidate that fits.
pub(crate) fn forward_s(priced: &EstimatedPlan) -> Option<f64> {
    match &priced.passes {
        Some(passes) => Some(passes.forward.wall_s()),
        None => priced.prediction().map(Prediction::wall_s),
    }
}

/// A problem before mesh, strategy and placement are chosen.
#[derive(Clone, Debug)]
pub(crate) struct ProblemRequest {
    pub(crate) problem: AttentionProblem,
    pub(crate) source: Source,
    pub(crate) wanted: PlanQuery,
}

impl ProblemRequest {
    /// Reads the options and the header of the input file. `launched` is the number of processes
    /// that a launcher has started, if one has.
    pub(crate) fn new(args: &ProblemArgs, seed: u64, launched: Option<u32>) -> Result<Self> {
        let (problem, source) = problem(args, seed)?;
        let wanted = PlanQuery {
            ranks: ranks(args, launched)?,
            mesh: args.mesh.chosen(),
            strategy: args.strategy.chosen().map(|name| name.0),
            placement: args.placement.chosen(),
            split: split(args),
            gradients: args.grad,
        };
        Ok(Self { problem, source, wanted })
    }

    /// The candidate with the shortest predicted time on `cluster`, and that time.
    fn by_time(&self, cluster: &Cluster) -> Result<(Candidate, Predicted)> {
        let priced = choose(&self.problem, &self.wanted, cluster)?;
        let refused = || match priced.first().map(|priced| &priced.verdict) {
            Some(Feasibility::Refused(error)) => nothing_fits(priced.len(), error),
            _ => Failure::run("there is no plan to choose from"),
        };
        let fastest = priced.iter().find_map(|priced| {
            let backward_s = priced.passes.as_ref().map(|passes| passes.backward.wall_s());
            Some((priced.candidate, Predicted { forward_s: forward_s(priced)?, backward_s }))
        });
        fastest.ok_or_else(refused)
    }

    /// On a ring of unlike devices of `cluster`: the fastest candidate with shares by their speed,
    /// these shares, and the predicted time.
    fn by_shares(&self, cluster: &Cluster) -> Result<Option<(Candidate, Split, Predicted)>> {
        let Self { problem, wanted, .. } = self;
        let capacities = cluster.capacities(problem, wanted.ranks)?;
        let ring =
            PlanQuery { mesh: Some(wanted.mesh.unwrap_or(Mesh::new(1, wanted.ranks)?)), ..wanted.clone() };
        if problem.fixed_order || capacities.iter().all(|capacity| *capacity == capacities[0]) {
            return Ok(None);
        }
        let mut fastest: Option<(Candidate, Split, Predicted)> = None;
        for candidate in candidates(problem, &ring)? {
            let is_usual =
                wanted.strategy.is_some() || candidate.strategy == Strategy::of_mesh(candidate.mesh);
            if candidate.mesh.ring() == 1 || candidate.strategy.moves_queries() || !is_usual {
                continue;
            }
            // A candidate that does not fit is refused where all of them are compared.
            let Ok(shares) = Shares::level(problem, candidate, &capacities, Some(cluster)) else { continue };
            let Ok(forward) = predict(problem, candidate, &shares.split, cluster) else { continue };
            let backward = wanted
                .gradients
                .then(|| predict_backward(problem, candidate.of_backward(problem), &shares.split, cluster));
            let Ok(backward) = backward.transpose() else { continue };
            let fits = backward.iter().chain([&forward]).all(|pass| pass.fits(cluster).is_ok());
            let backward_s = backward.as_ref().map(Prediction::wall_s);
            let predicted = Predicted { forward_s: forward.wall_s(), backward_s };
            if fits && fastest.as_ref().is_none_or(|(.., least)| predicted.both_s() < least.both_s()) {
                fastest = Some((candidate, shares.split, predicted));
            }
        }
        Ok(fastest)
    }
}

impl Request {
    /// Reads the options and the header of the input file, and makes all choices that are `auto`.
    /// `launched` is the number of processes that a launcher has started, if one has.
    pub(crate) fn new(args: &ProblemArgs, seed: u64, launched: Option<u32>) -> Result<Self> {
        let asked = ProblemRequest::new(args, seed, launched)?;
        let mut shared = None;
        let cluster = args.hardware.as_deref().map(description::read).transpose()?.map(Arc::new);
        let (Candidate { strategy, mesh, placement }, predicted) = match &cluster {
            Some(cluster) => {
                let (mut fastest, mut predicted) = asked.by_time(cluster)?;
                if is_auto(args)
                    && let Some((candidate, split, other)) = asked.by_shares(cluster)?
                    && other.both_s() < predicted.both_s()
                {
                    (fastest, predicted, shared) = (candidate, other, Some(split));
                }
                (fastest, Some(predicted))
            }
            None => (fewest_bytes(&asked.problem, &asked.wanted)?, None),
        };
        let is_open = is_auto(args) && args.hardware.is_none();
        let ProblemRequest { problem, source, wanted } = asked;
        let PlanQuery {
            mesh: wanted_mesh,
            strategy: wanted_strategy,
            placement: wanted_placement,
            split,
            ..
        } = wanted;
        let open = Open {
            mesh: wanted_mesh,
            strategy: wanted_strategy,
            placement: wanted_placement,
            always: args.split.is_some(),
        };
        Ok(Self {
            problem,
            source,
            mesh,
            strategy,
            placement,
            split: shared.unwrap_or(split),
            predicted_s: predicted.map(|predicted| predicted.forward_s),
            predicted_backward_s: predicted.and_then(|predicted| predicted.backward_s),
            cluster,
            open: is_open.then_some(open),
            gradients: args.grad,
        })
    }

    /// Whether devices are measured even if they are of one kind.
    pub(crate) fn always_measures(&self) -> bool {
        self.open.is_some_and(|open| open.always)
    }

    /// How ranks with unlike devices run the problem: on a ring, unless the options name something
    /// else. None where their speed cannot decide the shares.
    pub(crate) fn by_speed(&self) -> Result<Option<Candidate>> {
        let Some(open) = self.open else { return Ok(None) };
        let mesh = match open.mesh {
            Some(mesh) => mesh,
            None => Mesh::new(1, self.mesh.size())?,
        };
        let strategy = open.strategy.unwrap_or_else(|| Strategy::of_mesh(mesh));
        let placement = open.placement.unwrap_or_else(|| PlacementKind::for_problem(&self.problem));
        let by_work = mesh.ring() > 1 && !self.problem.fixed_order && !strategy.moves_queries();
        let candidate = Candidate { strategy, mesh, placement };
        Ok(Some(candidate).filter(|_| by_work && strategy.accepts(mesh).is_ok()))
    }

    /// The plans of all ranks, proved.
    pub(crate) fn plan(&self) -> Result<ProvedPlans> {
        let set = plan_forward(&self.problem, self.mesh, self.placement, &self.split, self.strategy)?;
        Ok(ProvedPlans::new(set)?)
    }

    /// The plans of the backward pass, proved; none where no gradients are asked for. A strategy
    /// without a backward pass is replaced by the default of its mesh.
    pub(crate) fn plan_backward(&self) -> Result<Option<ProvedPlans>> {
        if !self.gradients {
            return Ok(None);
        }
        let strategy = self.backward_strategy();
        let set = plan_backward(&self.problem, self.mesh, self.placement, &self.split, strategy)?;
        Ok(Some(ProvedPlans::new(set)?))
    }

    /// The strategy of the backward pass.
    pub(crate) fn backward_strategy(&self) -> Strategy {
        self.strategy.of_backward(&self.problem, self.mesh)
    }

    /// Refuses inputs and outputs of `ranks` ranks that do not fit the memory of this machine, or
    /// what `processes` processes like this one, which have these ranks, may use of it.
    pub(crate) fn fits_in_memory(&self, ranks: u32, processes: u32) -> Result<()> {
        let problem = &self.problem;
        let rows = |tokens: u32, heads: u32| {
            u128::from(problem.batch) * u128::from(tokens) * u128::from(heads) * u128::from(problem.head_dim)
        };
        // q and o, k and v; their gradients too.
        let tensors = if self.gradients { 4 } else { 2 };
        let elements =
            tensors * (rows(problem.q_len, problem.q_heads) + rows(problem.kv_len, problem.kv_heads));
        // Every rank holds a tensor whose row all queries share.
        let bias = problem.bias.map_or(0, |tensor| {
            let copies = if tensor.shared_rows { self.mesh.size() } else { 1 };
            u128::from(copies) * u128::from(tensor.bytes(problem.dtype, problem.q_len, problem.kv_len))
        });
        // The gradient of a bias is f32; rank 0 collects it.
        let of_bias = if problem.bias_gradient { 2 * bias * 4 / problem.dtype.bytes() as u128 } else { 0 };
        let bytes = elements * problem.dtype.bytes() as u128 + bias + of_bias;
        let share = bytes * u128::from(ranks) / u128::from(self.mesh.size());
        match memory_bytes_of(processes) {
            Some(memory) if share > u128::from(memory) => Err(Failure::request(
                format!(
                    "the tensors of the ranks here take {}, this machine has {} for them",
                    plan::bytes(u64::try_from(share).unwrap_or(u64::MAX)),
                    plan::bytes(memory)
                ),
                "use fewer tokens, heads or batch entries",
            )),
            _ => Ok(()),
        }
    }
}

/// The number of ranks: from `--ranks`, the launcher or the mesh, which must not contradict each
/// other.
fn ranks(args: &ProblemArgs, launched: Option<u32>) -> Result<u32> {
    let of_mesh = args.mesh.chosen().map(Mesh::size);
    let here = args.ranks.map(std::num::NonZeroU32::get);
    let (ranks, said) = match (here, launched) {
        (Some(ranks), _) => (ranks, "--ranks says"),
        (None, Some(ranks)) => (ranks, "the launcher started"),
        (None, None) => (of_mesh.unwrap_or(1), "there are"),
    };
    if ranks > MAX_RANKS {
        return Err(Failure::request(format!("{said} {ranks} ranks"), format!("use at most {MAX_RANKS}")));
    }
    match (args.mesh, of_mesh) {
        (OrAuto::Is(mesh), Some(size)) if size != ranks => Err(Failure::request(
            format!("mesh {mesh} has {size} ranks, {said} {ranks}"),
            format!("use a mesh of {ranks} ranks, such as --mesh 1x{ranks}, or {size} ranks"),
        )),
        _ => Ok(ranks),
    }
}

/// Whether the options leave the shares to the speed of the devices.
fn is_auto(args: &ProblemArgs) -> bool {
    let by_hand = args.tokens.is_some() || args.q_tokens.is_some();
    !by_hand && matches!(args.split, None | Some(SplitName::Auto))
}

/// The shares of the ranks. The parser refuses options that contradict each other.
fn split(args: &ProblemArgs) -> Split {
    let counts = |List(counts): &List<u32>| Split::Tokens(counts.clone());
    match (&args.split, &args.tokens, &args.q_tokens, &args.kv_tokens) {
        (Some(SplitName::Tokens(List(weights))), ..) => Split::Weights(weights.clone()),
        (Some(SplitName::Work(List(weights))), ..) => Split::Work(weights.clone()),
        (_, Some(both), ..) => counts(both),
        (_, _, Some(queries), Some(keys)) => {
            Split::Separate { queries: Box::new(counts(queries)), keys: Box::new(counts(keys)) }
        }
        _ => Split::Even,
    }
}

fn problem(args: &ProblemArgs, seed: u64) -> Result<(AttentionProblem, Source)> {
    let mask = args.mask.clone();
    let (problem, source) = match (&args.input, args.shape) {
        (Some(path), _) => {
            let file = InputFile::open(path, args.grad)?;
            if let Some(dtype) = args.dtype.filter(|dtype| *dtype != file.dtype) {
                return Err(Failure::request(
                    format!("--dtype {dtype}, but {} holds {}", path.display(), file.dtype),
                    "leave --dtype out, or convert the file",
                ));
            }
            let shape = [file.batch, file.kv_len, file.q_heads, file.kv_heads, file.head_dim];
            let problem =
                AttentionProblem::new(shape, file.dtype, mask)?.with_queries(file.q_len, args.q_offset)?;
            let problem =
                problem.with_sinks(file.sinks.clone())?.with_bias(file.bias.map(|bias| bias.tensor))?;
            (problem, Source::File(Arc::new(file)))
        }
        (None, Some(shape)) => {
            let problem = AttentionProblem::new(shape.0, args.dtype.unwrap_or(Dtype::F32), mask)?;
            let queries = problem.q_len;
            let sinks = if args.sinks { Source::random_sinks(seed, problem.q_heads) } else { Vec::new() };
            (problem.with_queries(queries, args.q_offset)?.with_sinks(sinks)?, Source::Random { seed })
        }
        (None, None) => {
            return Err(Failure::request(
                "neither --input nor --shape is given",
                "name a safetensors file with q, k, v, or generate random tensors with --shape 1,4096,8,2,64",
            ));
        }
    };
    let scale = args.scale.unwrap_or(problem.scale);
    let problem = problem.with_logits(scale, args.softcap)?.with_wire(args.wire)?;
    let problem = problem.with_fixed_order(args.fixed_order)?.with_replicated(args.replicated.0.clone())?;
    if args.grad_bias && problem.bias.is_none_or(|bias| bias.kind == BiasKind::Mask) {
        return Err(Failure::request(
            "--grad-bias without a tensor of numbers that are added to the logits",
            "name an input file with the tensor `bias`, or leave --grad-bias out: a mask has no gradient",
        ));
    }
    let problem = problem.with_bias_gradient(args.grad_bias)?.with_inference(!args.grad);
    Ok((problem, source))
}
