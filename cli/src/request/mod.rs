//! From options to a problem on a mesh. Wrong requests are refused here, before any device is opened.

pub(crate) mod description;

use std::sync::Arc;

use kyklos::plan::ProvedPlans;
use kyklos::simulate::{Candidate, Cluster, Verdict, Wanted, choose};
use kyklos::{
    AttentionProblem, Dtype, MAX_WORLD, Mesh, PlacementKind, Split, Strategy, meshes_by_bytes, plan,
    plan_world,
};

use self::description::nothing_fits;
use crate::failure::{Failure, Result};
use crate::options::{List, OrAuto, ProblemArgs, SplitName};
use crate::tensors::{InputFile, Source};

/// A problem with a chosen mesh, strategy and placement.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) problem: AttentionProblem,
    /// The text of the mask on the command line.
    pub(crate) mask_text: String,
    pub(crate) source: Source,
    pub(crate) mesh: Mesh,
    pub(crate) strategy: Strategy,
    pub(crate) placement: PlacementKind,
    pub(crate) split: Split,
    /// Predicted time in seconds, with `--hardware`.
    pub(crate) predicted_s: Option<f64>,
}

/// A problem before mesh, strategy and placement are chosen.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    pub(crate) problem: AttentionProblem,
    pub(crate) source: Source,
    pub(crate) wanted: Wanted,
}

impl Asked {
    /// Reads the options and the header of the input file. `launched` is the number of processes that a launcher has
    /// started, if one has.
    pub(crate) fn new(args: &ProblemArgs, seed: u64, launched: Option<u32>) -> Result<Self> {
        let (problem, source) = problem(args, seed)?;
        let split = match (&args.split, &args.tokens) {
            (Some(SplitName::Tokens(List(weights))), _) => Split::Weights(weights.clone()),
            (Some(SplitName::Work(List(weights))), _) => Split::Work(weights.clone()),
            (_, Some(tokens)) => Split::Tokens(tokens.0.clone()),
            _ => Split::Even,
        };
        let wanted = Wanted {
            ranks: ranks(args, launched)?,
            mesh: args.mesh.chosen(),
            strategy: args.strategy.chosen().map(|name| name.0),
            placement: args.placement.chosen(),
            split,
        };
        Ok(Self { problem, source, wanted })
    }

    /// The candidate that sends the fewest bytes: the only criterion without a description of devices and links.
    fn by_bytes(&self) -> Result<Candidate> {
        let Wanted { ranks, mesh, strategy, placement, ref split } = self.wanted;
        let mesh = match mesh {
            Some(mesh) => mesh,
            None => {
                let kind = placement.unwrap_or_else(|| placement_for(&self.problem));
                let priced = meshes_by_bytes(&self.problem, ranks, kind, split, strategy)?;
                priced.first().map_or_else(|| Mesh::new(1, ranks), |(mesh, _)| Ok(*mesh))?
            }
        };
        let strategy = strategy.unwrap_or_else(|| Strategy::of_mesh(mesh));
        let placement = match placement {
            Some(kind) => kind,
            None if mesh.ring() > 1 => placement_for(&self.problem),
            None => PlacementKind::Contiguous,
        };
        Ok(Candidate { strategy, mesh, placement })
    }

    /// The candidate with the shortest predicted time on `cluster`, and that time in seconds.
    fn by_time(&self, cluster: &Cluster) -> Result<(Candidate, f64)> {
        let priced = choose(&self.problem, &self.wanted, cluster)?;
        let refused = || match priced.first().map(|priced| &priced.verdict) {
            Some(Verdict::Refused(error)) => nothing_fits(priced.len(), error),
            _ => Failure::run("there is no plan to choose from"),
        };
        let fastest =
            priced.iter().find_map(|priced| Some((priced.candidate, priced.prediction()?.wall_s())));
        fastest.ok_or_else(refused)
    }
}

impl Request {
    /// Reads the options and the header of the input file, and makes all choices that are `auto`. `launched` is the number
    /// of processes that a launcher has started, if one has.
    pub(crate) fn new(args: &ProblemArgs, seed: u64, launched: Option<u32>) -> Result<Self> {
        let asked = Asked::new(args, seed, launched)?;
        let (Candidate { strategy, mesh, placement }, predicted_s) = match &args.hardware {
            Some(path) => {
                let (fastest, predicted_s) = asked.by_time(&description::read(path)?)?;
                (fastest, Some(predicted_s))
            }
            None => (asked.by_bytes()?, None),
        };
        let Asked { problem, source, wanted: Wanted { split, .. } } = asked;
        let mask_text = args.mask.text.clone();
        Ok(Self { problem, mask_text, source, mesh, strategy, placement, split, predicted_s })
    }

    /// The plans of all ranks, proved.
    pub(crate) fn plan(&self) -> Result<ProvedPlans> {
        let world = plan_world(&self.problem, self.mesh, self.placement, &self.split, self.strategy)?;
        Ok(ProvedPlans::new(world)?)
    }

    /// Refuses inputs and outputs of `ranks` ranks that do not fit the memory of this machine.
    pub(crate) fn fits_in_memory(&self, ranks: u32) -> Result<()> {
        let problem = &self.problem;
        let rows = |tokens: u32, heads: u32| {
            u128::from(problem.batch) * u128::from(tokens) * u128::from(heads) * u128::from(problem.head_dim)
        };
        let elements = 2 * (rows(problem.q_len, problem.q_heads) + rows(problem.kv_len, problem.kv_heads));
        let pairs = problem.bias.map_or(0, |pairs| {
            u128::from(pairs.batch)
                * u128::from(pairs.heads)
                * u128::from(problem.q_len)
                * pairs.row_bytes(problem.dtype, problem.kv_len) as u128
        });
        let bytes = elements * problem.dtype.bytes() as u128 + pairs;
        let share = bytes * u128::from(ranks) / u128::from(self.mesh.world());
        match memory_bytes() {
            Some(memory) if share > u128::from(memory) => Err(Failure::request(
                format!(
                    "the tensors of the ranks here take {}, this machine has {}",
                    plan::bytes(u64::try_from(share).unwrap_or(u64::MAX)),
                    plan::bytes(memory)
                ),
                "use fewer tokens, heads or batch entries",
            )),
            _ => Ok(()),
        }
    }
}

/// The number of ranks: from `--ranks`, the launcher or the mesh, which must not contradict each other.
fn ranks(args: &ProblemArgs, launched: Option<u32>) -> Result<u32> {
    let of_mesh = args.mesh.chosen().map(Mesh::world);
    let here = args.ranks.map(std::num::NonZeroU32::get);
    let (ranks, said) = match (here, launched) {
        (Some(ranks), _) => (ranks, "--ranks says"),
        (None, Some(ranks)) => (ranks, "the launcher started"),
        (None, None) => (of_mesh.unwrap_or(1), "there are"),
    };
    if ranks > MAX_WORLD {
        return Err(Failure::request(format!("{said} {ranks} ranks"), format!("use at most {MAX_WORLD}")));
    }
    match (args.mesh, of_mesh) {
        (OrAuto::Is(mesh), Some(world)) if world != ranks => Err(Failure::request(
            format!("mesh {mesh} has {world} ranks, {said} {ranks}"),
            format!("use a mesh of {ranks} ranks, such as --mesh 1x{ranks}, or {world} ranks"),
        )),
        _ => Ok(ranks),
    }
}

fn problem(args: &ProblemArgs, seed: u64) -> Result<(AttentionProblem, Source)> {
    let mask = args.mask.mask.clone();
    let (problem, source) = match (&args.input, args.shape) {
        (Some(path), _) => {
            let file = InputFile::open(path)?;
            if let Some(dtype) = args.dtype.filter(|dtype| *dtype != file.dtype) {
                return Err(Failure::request(
                    format!("--dtype {dtype}, but {} holds {}", path.display(), file.dtype),
                    "leave --dtype away, or convert the file",
                ));
            }
            let shape = [file.batch, file.kv_len, file.q_heads, file.kv_heads, file.head_dim];
            let problem =
                AttentionProblem::new(shape, file.dtype, mask)?.with_queries(file.q_len, args.q_offset)?;
            let problem =
                problem.with_sinks(file.sinks.clone())?.with_bias(file.pairs.map(|pairs| pairs.tensor))?;
            (problem, Source::File(Arc::new(file)))
        }
        (None, Some(shape)) => {
            let problem = AttentionProblem::new(shape.0, args.dtype.unwrap_or(Dtype::F32), mask)?;
            let queries = problem.q_len;
            let sinks = if args.sinks { Source::made_up_sinks(seed, problem.q_heads) } else { Vec::new() };
            (problem.with_queries(queries, args.q_offset)?.with_sinks(sinks)?, Source::MadeUp { seed })
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
    Ok((problem, source))
}

/// Zigzag where later queries have clearly more work than earlier ones, as under a causal mask; else contiguous,
/// which keeps neighbouring tokens on one rank.
fn placement_for(problem: &AttentionProblem) -> PlacementKind {
    const SAMPLES: u64 = 64;
    let work = |half: u64| -> u64 {
        (0..SAMPLES)
            .map(|i| (2 * i + 1 + half * 2 * SAMPLES) * u64::from(problem.q_len) / (4 * SAMPLES))
            .filter_map(|token| u32::try_from(token).ok())
            .filter(|token| *token < problem.q_len)
            .map(|token| problem.mask.visible(0, problem.q_position(token), problem.kv_len).keys())
            .sum()
    };
    let (front, back) = (work(0), work(1));
    if back * 4 > front * 5 { PlacementKind::Zigzag } else { PlacementKind::Contiguous }
}

/// Bytes of memory of this machine; only Linux says it in a file.
fn memory_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("MemTotal:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn placement_of(mask: &str) -> PlacementKind {
        placement_for(&AttentionProblem::new([1, 4096, 8, 2, 64], Dtype::F32, mask.parse().unwrap()).unwrap())
    }

    #[test]
    fn zigzag_is_for_masks_whose_work_grows_along_the_sequence() {
        assert_eq!(placement_of("causal"), PlacementKind::Zigzag);
        assert_eq!(placement_of("causal+window:3000,-1"), PlacementKind::Zigzag);
        assert_eq!(placement_of("full"), PlacementKind::Contiguous);
        assert_eq!(placement_of("window:64,0"), PlacementKind::Contiguous);
        assert_eq!(placement_of("window:0,-1"), PlacementKind::Contiguous);
        let empty = AttentionProblem::new([1, 0, 1, 1, 8], Dtype::F32, kyklos::Mask::causal()).unwrap();
        assert_eq!(placement_for(&empty), PlacementKind::Contiguous);
    }
}
