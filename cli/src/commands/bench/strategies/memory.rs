//! Memory of a cell: an upper bound before it starts, and the largest use of this process.

use kyklos::plan::{ProvedPlans, bytes};
use kyklos_transport::Rank;

use crate::failure::{Failure, Result};

/// The ranks that share the memory of this machine.
#[derive(Clone, Debug)]
pub(super) enum RanksHere {
    /// Threads of this process.
    All(u32),
    /// This rank, and others of its machine with about as much.
    Like(Rank, u32),
}

/// Refuses a cell whose plan buffers and tensors on this machine may take more than `limit` bytes.
pub(super) fn fits(plans: &ProvedPlans, here: &RanksHere, limit: Option<u64>) -> Result<()> {
    let Some(limit) = limit else { return Ok(()) };
    let of_ranks: u64 = match here {
        RanksHere::All(ranks) => {
            (0..*ranks).map(|rank| of_rank(plans, Rank(rank))).fold(0, u64::saturating_add)
        }
        RanksHere::Like(rank, count) => of_rank(plans, *rank).saturating_mul(u64::from(*count)),
    };
    let (batch, kv_len, kv_heads, head_dim, dtype) = (
        plans.set().problem.batch,
        plans.set().problem.kv_len,
        plans.set().problem.kv_heads,
        plans.set().problem.head_dim,
        plans.set().problem.dtype,
    );
    // Whole keys and values, for the comparison with the oracle.
    let whole = 2 * tensor([batch, kv_len, kv_heads, head_dim], dtype.bytes());
    let needed = of_ranks.saturating_add(whole);
    if needed <= limit {
        return Ok(());
    }
    let text = format!(
        "may take {} on a machine, the limit is {}: use fewer tokens, heads or batch entries, or raise --memory",
        bytes(needed),
        bytes(limit)
    );
    Err(Failure::refused(text))
}

/// The buffers of its plan, and its tensors in host memory: q, k, v, o and lse.
fn of_rank(plans: &ProvedPlans, rank: Rank) -> u64 {
    let set = plans.set();
    let (batch, q_heads, kv_heads, head_dim, dtype) = (
        set.problem.batch,
        set.problem.q_heads,
        set.problem.kv_heads,
        set.problem.head_dim,
        set.problem.dtype,
    );
    let tokens = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    let queries = tokens(set.q_placement.of_rank(rank).len());
    let keys = tokens(set.kv_placement.held_by(rank).len());
    let q_and_o = 2 * tensor([batch, queries, q_heads, head_dim], dtype.bytes());
    let lse = tensor([batch, queries, q_heads, 1], 4);
    let k_and_v = 2 * tensor([batch, keys, kv_heads, head_dim], dtype.bytes());
    [q_and_o, lse, k_and_v].into_iter().fold(plans.peak_bytes(rank), u64::saturating_add)
}

fn tensor(shape: [u32; 4], element: usize) -> u64 {
    shape.iter().fold(element as u64, |bytes, extent| bytes.saturating_mul(u64::from(*extent)))
}

/// From now on [`process_peak_bytes`] counts anew. Linux only.
pub(super) fn forget_peak() {
    // Where it cannot be forgotten, the peak is that of the process so far.
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}

/// The most memory of this process at a time. Linux only.
pub(super) fn process_peak_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

#[cfg(test)]
mod tests {
    use kyklos::{AttentionProblem, Dtype, Mask, Mesh, PlacementKind, Split, Strategy, plan_forward};

    use super::*;

    fn plans() -> ProvedPlans {
        let problem = AttentionProblem::new([2, 64, 4, 2, 16], Dtype::F32, Mask::full()).unwrap();
        let mesh = Mesh::new(1, 4).unwrap();
        let placement = PlacementKind::Contiguous;
        ProvedPlans::new(plan_forward(&problem, mesh, placement, &Split::Even, Strategy::Ring).unwrap())
            .unwrap()
    }

    #[test]
    fn the_bound_counts_plans_and_tensors_of_all_ranks_here() {
        let plans = plans();
        // A rank has 16 of 64 tokens: q and o, lse, k and v.
        let tensors = 2 * (2 * 16 * 4 * 16 * 4) + 2 * 16 * 4 * 4 + 2 * (2 * 16 * 2 * 16 * 4);
        let whole = 2 * (2 * 64 * 2 * 16 * 4);
        let all: u64 = (0..4).map(|rank| plans.peak_bytes(Rank(rank)) + tensors).sum::<u64>() + whole;
        assert!(fits(&plans, &RanksHere::All(4), Some(all)).is_ok());
        let refused = fits(&plans, &RanksHere::All(4), Some(all - 1)).unwrap_err();
        assert!(refused.exit == 2 && refused.text.contains("--memory"), "{refused:?}");
        let like = 3 * (plans.peak_bytes(Rank(1)) + tensors) + whole;
        assert!(fits(&plans, &RanksHere::Like(Rank(1), 3), Some(like)).is_ok());
        assert!(fits(&plans, &RanksHere::Like(Rank(1), 3), Some(like - 1)).is_err());
        assert!(fits(&plans, &RanksHere::All(4), None).is_ok());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_peak_of_the_process_grows_with_what_it_uses() {
        forget_peak();
        let before = process_peak_bytes().unwrap();
        let used = std::hint::black_box(vec![1_u8; 64 << 20]);
        let after = process_peak_bytes().unwrap();
        assert!(after >= before + (60 << 20) && used.len() == 64 << 20, "{before} {after}");
    }
}
