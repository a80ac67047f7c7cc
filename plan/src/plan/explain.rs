//! Plans in print: a table, and JSON.

use std::cmp::Reverse;
use std::fmt::Write;

use kyklos_rank::Rank;

use super::Content;
use super::check::RankCheck;
use super::step::{Buffer, BufferId, GradientStep, Plan, PlanSet, Slice, Step};
use crate::bias::BiasKind;
use crate::problem::AttentionProblem;
use crate::strategy_list::Strategy;
use crate::tokens::TokenRuns;

/// The plan set as a table of ranks, then the steps of `rank` (of all ranks where it is `None`).
pub fn explain(set: &PlanSet, checks: &[RankCheck], rank: Option<Rank>) -> String {
    let problem = &set.problem;
    let mut out = String::new();
    let queries = if problem.q_len == problem.kv_len {
        format!("S {}", problem.kv_len)
    } else {
        format!("Sq {} Skv {}", problem.q_len, problem.kv_len)
    };
    let _ = writeln!(
        out,
        "problem    B {} {queries} Hq {} Hkv {} D {} {}, mask {}{}{}",
        problem.batch,
        problem.q_heads,
        problem.kv_heads,
        problem.head_dim,
        problem.dtype,
        problem.mask,
        if problem.sinks.is_empty() { "" } else { ", sinks" },
        bias_in_words(problem)
    );
    if problem.wire.rounds() {
        let _ = writeln!(out, "wire       {}", expected_of_wire(problem));
    }
    if !problem.replicated.is_empty() {
        let std::ops::Range { start, end } = problem.replicated;
        let _ = writeln!(out, "replicated keys {start}..{end} are on every rank");
    }
    if problem.fixed_order {
        let _ = writeln!(
            out,
            "order      sums over tiles of {} keys along one tree: the same bytes on any mesh of one type of device",
            crate::problem::TILE_KEYS
        );
    }
    let (rank_of_sums, sums) = largest_sums(set);
    if sums > LEAST_BINDING_BYTES {
        let _ = writeln!(
            out,
            "limits     the sums of all query rows of rank {rank_of_sums} take {}: a wgpu device that binds less at once \
             refuses the call, and some bind no more than {}",
            bytes(sums),
            bytes(LEAST_BINDING_BYTES)
        );
    }
    let ranks = set.mesh.size();
    let plural = if ranks == 1 { "" } else { "s" };
    let _ = writeln!(out, "mesh       {} (ulysses x ring), {ranks} rank{plural}", set.mesh);
    let _ = writeln!(out, "strategy   {}, {} placement", set.strategy, set.q_placement.name());
    let _ = writeln!(out);
    let rows = set.plans.iter().zip(checks).map(|(plan, check)| {
        let queries = &set.q_placement.held_by(Rank(plan.rank));
        vec![
            plan.rank.to_string(),
            queries.len().to_string(),
            queries.to_string(),
            plan.steps
                .iter()
                .filter(|step| matches!(step, Step::Attend { .. } | Step::AttendBackward(_)))
                .count()
                .to_string(),
            check.messages_sent.to_string(),
            bytes(check.bytes_sent),
            bytes(check.peak_bytes),
        ]
    });
    out.push_str(&table(&["rank", "tokens", "which", "blocks", "messages", "sent", "peak"], rows.collect()));
    for plan in &set.plans {
        if rank.is_none_or(|rank| rank.0 == plan.rank) {
            let _ = writeln!(out, "\nsteps of rank {}", plan.rank);
            for (index, step) in plan.steps.iter().enumerate() {
                let _ = writeln!(out, "{index:>4}  {}", describe(set, plan, step));
            }
        }
    }
    out
}

/// The rank with the largest m and l of a running state, and their bytes.
fn largest_sums(set: &PlanSet) -> (u32, u64) {
    let sums = |buffer: &Buffer| {
        let rows = u64::from(set.problem.batch) * buffer.tokens.len() as u64;
        rows * u64::from(buffer.head_count()) * SUMS_BYTES
    };
    let of_rank = |plan: &Plan| {
        let states = plan.buffers.iter().filter(|buffer| buffer.content == Content::State);
        (plan.rank, states.map(sums).max().unwrap_or(0))
    };
    set.plans.iter().map(of_rank).max_by_key(|(rank, bytes)| (*bytes, Reverse(*rank))).unwrap_or_default()
}

/// m and l of a row and head, in f32.
const SUMS_BYTES: u64 = 8;
/// What every device of WebGPU binds at once (its limit maxStorageBufferBindingSize).
const LEAST_BINDING_BYTES: u64 = 128 << 20;

/// The expected error of the wire format, in words.
pub fn expected_of_wire(problem: &AttentionProblem) -> String {
    let error = problem.wire.expected_error(problem.head_dim, problem.scale);
    format!(
        "keys and values of other shards as {}, rounded once: on normal data about {error:.1e} of the output (relative L2)",
        problem.wire
    )
}

/// The plan set for JSON: the problem, the mesh, and every rank's buffers, steps and proof. It is
/// written while it is walked: a tree of values for thousands of steps of hundreds of ranks would
/// take gigabytes.
#[derive(Debug, serde::Serialize)]
pub struct Explained<'a> {
    problem: &'a AttentionProblem,
    mesh: String,
    ranks: u32,
    strategy: Strategy,
    placement: &'static str,
    wire_expected_error: f64,
    predicted_s: Option<f64>,
    #[serde(serialize_with = "each")]
    plans: (&'a PlanSet, &'a [RankCheck]),
}

impl<'a> Explained<'a> {
    /// The plan set, the figures of its proof, and the seconds that a simulation predicts, if there
    /// was one.
    pub fn new(set: &'a PlanSet, checks: &'a [RankCheck], predicted_s: Option<f64>) -> Self {
        let PlanSet { problem, mesh, strategy, q_placement, .. } = set;
        Self {
            problem,
            mesh: mesh.to_string(),
            ranks: mesh.size(),
            strategy: *strategy,
            placement: q_placement.name(),
            wire_expected_error: problem.wire.expected_error(problem.head_dim, problem.scale),
            predicted_s,
            plans: (set, checks),
        }
    }
}

fn each<S: serde::Serializer>(
    (set, checks): &(&PlanSet, &[RankCheck]),
    serializer: S,
) -> Result<S::Ok, S::Error> {
    #[derive(serde::Serialize)]
    struct One<'a> {
        rank: u32,
        tokens: TokenRuns,
        check: &'a RankCheck,
        buffers: &'a [Buffer],
        steps: &'a [Step],
    }
    serializer.collect_seq(set.plans.iter().zip(*checks).map(|(plan, check)| One {
        rank: plan.rank,
        tokens: set.q_placement.held_by(Rank(plan.rank)),
        check,
        buffers: &plan.buffers,
        steps: &plan.steps,
    }))
}

impl PlanSet {
    /// Step `step` of the plan of `rank` in words; `None` where there is no such rank or step.
    pub fn step_in_words(&self, rank: Rank, step: u32) -> Option<String> {
        let plan = self.plans.get(rank.0 as usize)?;
        plan.steps.get(step as usize).map(|step| describe(self, plan, step))
    }
}

/// One step in words.
pub fn describe(set: &PlanSet, plan: &Plan, step: &Step) -> String {
    let name = |id: &BufferId| plan.buffer(*id).name.to_string();
    let size = |slice: &Slice| bytes(plan.slice_bytes(&set.problem, slice));
    match step {
        Step::Repack { from, into } => {
            format!("repack    {} -> {}, {}", name(&from.buffer), name(&into.buffer), size(from))
        }
        Step::Exchange { id, sends, recvs } => {
            let sends = sends.iter().map(|send| {
                let parts: Vec<_> = send.parts.iter().map(|part| name(&part.buffer)).collect();
                let sum = send.parts.iter().map(|part| plan.slice_bytes(&set.problem, part)).sum();
                format!("to rank {}: {} ({})", send.to, parts.join(" + "), bytes(sum))
            });
            let recvs = recvs.iter().map(|recv| {
                let parts: Vec<_> = recv.parts.iter().map(name).collect();
                format!("from rank {}: {}", recv.from, parts.join(" + "))
            });
            format!("exchange  #{id} {}", sends.chain(recvs).collect::<Vec<_>>().join(", "))
        }
        Step::Wait { id } => format!("wait      #{id}"),
        Step::Attend { q, kv, state, bias } => format!(
            "attend    {} ({} tokens, heads {:?}) x {} ({} tokens){} -> {}",
            name(&q.buffer),
            q.tokens.len(),
            plan.slice_heads(q),
            name(&kv.buffer),
            kv.tokens.len(),
            bias.as_ref().map_or_else(String::new, |bias| format!(" with {}", name(&bias.buffer))),
            name(state)
        ),
        Step::AttendBackward(step) => {
            let GradientStep { q, kv, dq, d_kv, d_bias, .. } = &**step;
            format!(
                "gradients {} ({} tokens, heads {:?}) x {} ({} tokens) -> {}, {}{}",
                name(&q.buffer),
                q.tokens.len(),
                plan.slice_heads(q),
                name(&kv.buffer),
                kv.tokens.len(),
                name(dq),
                name(&d_kv.buffer),
                d_bias.as_ref().map_or_else(String::new, |sum| format!(", {}", name(&sum.buffer)))
            )
        }
        Step::Accumulate { from, into } => {
            format!("add       {} -> {}, {}", name(from), name(&into.buffer), size(into))
        }
        Step::Convert { from, into } => {
            format!("convert   {} -> {}, {}", name(&from.buffer), name(into), size(from))
        }
        Step::Merge { from, into } => format!("merge     {} -> {}", name(from), name(into)),
        Step::Finalize { state, into } => format!("finalize  {} -> {}", name(state), name(into)),
        Step::Free { buffer } => format!("free      {}", name(buffer)),
    }
}

/// The kind of the problem's attention bias tensor, as it follows the mask in a list; empty where
/// there is none.
pub fn bias_in_words(problem: &AttentionProblem) -> &'static str {
    match problem.bias.map(|tensor| (tensor.kind, tensor.shared_rows)) {
        None => "",
        Some((BiasKind::Mask, false)) => ", mask tensor",
        Some((BiasKind::Mask, true)) => ", mask tensor over keys",
        Some((BiasKind::Additive, false)) => ", bias",
        Some((BiasKind::Additive, true)) => ", bias over keys",
    }
}

/// Bytes in the unit that keeps three or four digits.
pub fn bytes(bytes: u64) -> String {
    #[expect(clippy::cast_precision_loss, reason = "rounded for reading")]
    let value = bytes as f64;
    match bytes {
        0..1_024 => format!("{bytes} B"),
        1_024..1_048_576 => format!("{:.1} KiB", value / 1024.0),
        1_048_576..1_073_741_824 => format!("{:.1} MiB", value / 1_048_576.0),
        _ => format!("{:.2} GiB", value / 1_073_741_824.0),
    }
}

/// Columns as wide as their widest cell, numbers to the right.
pub fn table(header: &[&str], rows: Vec<Vec<String>>) -> String {
    let mut all = vec![header.iter().map(|cell| (*cell).to_owned()).collect::<Vec<_>>()];
    all.extend(rows);
    let width = |column: usize| all.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let numeric = |column: usize| {
        all.len() > 1
            && all[1..].iter().all(|row| row[column].starts_with(|c: char| c.is_ascii_digit() || c == '-'))
    };
    let right: Vec<bool> = (0..header.len()).map(numeric).collect();
    let mut out = String::new();
    for row in &all {
        let mut line = String::new();
        for (column, cell) in row.iter().enumerate() {
            let pad = " ".repeat(widths[column] - cell.chars().count());
            let _ = if right[column] { write!(line, "{pad}{cell}  ") } else { write!(line, "{cell}{pad}  ") };
        }
        out.push_str(line.trim_end());
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AttentionProblem, Dtype, Mask, Mesh, PlacementKind, Split, plan_forward};

    #[test]
    fn sums_that_some_devices_do_not_bind_are_told() {
        for (ranks, heads, told) in [
            (1, 32, None),
            (1, 33, Some("of rank 0 take 132.0 MiB")),
            (2, 33, None),
            (2, 66, Some("of rank 0 take 132.0 MiB")),
        ] {
            let problem = AttentionProblem::new([1, 1 << 19, heads, 1, 8], Dtype::F32, Mask::full()).unwrap();
            let mesh = Mesh::new(1, ranks).unwrap();
            let set = plan_forward(&problem, mesh, PlacementKind::Contiguous, &Split::Even, Strategy::Ring)
                .unwrap();
            let text = explain(&set, &[], Some(Rank(0)));
            match told {
                Some(words) => assert!(text.contains(words), "{text}"),
                None => assert!(!text.contains("limits"), "{text}"),
            }
        }
    }
}
