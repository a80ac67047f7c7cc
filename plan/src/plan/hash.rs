//! The plan hash, which all ranks compare before the first data byte is sent.

use kyklos_rank::Rank;

use crate::plan::{Direction, PlanSet};

/// BLAKE3 of all inputs from which the plans of all ranks are made: format version, problem and
/// mask, mesh, every rank's token list, strategy, wire format, and `identities`: the identity of
/// each rank, and other texts that the caller wants to be the same on all ranks.
///
/// The canonical encoding is JSON with fixed field order; floats are written so that they read back
/// to the same bits.
pub fn plan_hash(set: &PlanSet, identities: &[String]) -> [u8; 32] {
    #[derive(serde::Serialize)]
    struct Canonical<'a> {
        format: u32,
        problem: &'a crate::problem::AttentionProblem,
        mesh: String,
        strategy: &'a str,
        placement: &'a str,
        q_tokens: Vec<Vec<(u32, u32, u32)>>,
        kv_tokens: Vec<Vec<(u32, u32, u32)>>,
        #[serde(skip_serializing_if = "Vec::is_empty")]
        kv_spare: Vec<u32>,
        wire: &'a str,
        #[serde(skip_serializing_if = "Direction::is_forward")]
        direction: Direction,
        identities: &'a [String],
    }
    // Rebuilt token by token, so that equal lists give equal runs.
    let lists = |placement: &crate::placement::Placement| {
        let runs = |tokens: &crate::tokens::TokenRuns| {
            let tokens = tokens.canonical();
            tokens.runs().iter().map(|run| (run.start, run.count, run.stride)).collect()
        };
        placement.ranks().iter().map(runs).collect()
    };
    let spare: Vec<u32> = (0..set.mesh.size()).map(|rank| set.kv_placement.spare(Rank(rank))).collect();
    let canonical = Canonical {
        format: PLAN_FORMAT,
        problem: &set.problem,
        mesh: set.mesh.to_string(),
        strategy: set.strategy.name(),
        placement: set.q_placement.name(),
        q_tokens: lists(&set.q_placement),
        kv_tokens: lists(&set.kv_placement),
        kv_spare: if spare.iter().all(|rows| *rows == 0) { Vec::new() } else { spare },
        wire: set.problem.wire.name(),
        direction: set.direction,
        identities,
    };
    let text = serde_json::to_vec(&canonical).expect("plain data without maps always serialises");
    *blake3::hash(&text).as_bytes()
}

/// Increased whenever the same inputs would make other plans.
pub const PLAN_FORMAT: u32 = 5;
