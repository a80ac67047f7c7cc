//! Which shards consist of whole tiles, as a fixed order of sums needs
//! (`AttentionProblem::fixed_order`).

use std::ops::Range;

use kyklos_rank::Rank;

use super::facts::{Moves, StrategyFacts};
use super::streams::Part;
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use crate::placement::{Placement, ShardShape};
use crate::problem::{AttentionProblem, TILE_KEYS};
use crate::remedy::Remedy;
use crate::strategy_list::Strategy;
use crate::tokens::TokenRuns;

/// Refuses plans whose order of sums depends on the owners of keys.
pub(super) fn fits(problem: &AttentionProblem, mesh: Mesh, strategy: Strategy, kv: &Placement) -> Result<()> {
    if !problem.fixed_order {
        return Ok(());
    }
    let facts = strategy.facts();
    if facts.moves == Moves::Queries {
        return Err(Error::request(
            format!("a fixed order with strategy {strategy}"),
            "its ranks send sums over their own keys, which cannot be put in the order of tiles: use a strategy that sends keys",
        ));
    }
    if tiles(kv.replicated(), problem.kv_len).is_err() {
        return Err(Error::request(
            format!(
                "a fixed order with keys {} on every rank: they begin or end inside a tile of {TILE_KEYS} keys",
                kv.replicated()
            ),
            format!("replicate from one multiple of {TILE_KEYS} to another"),
        ));
    }
    for r in 0..mesh.ring() {
        let shard = kv.of_shard(r);
        let parts = parts_of_shard(facts);
        for part in (0..parts).map(|part| shard.slice(Part::new(part, parts).of(shard.len()))) {
            if let Err(key) = tiles(&part, problem.kv_len) {
                return Err(Error::request(
                    format!(
                        "a fixed order where shard {r} holds {part}: key {key} begins or ends a part of a tile of {TILE_KEYS} keys"
                    ),
                    remedy(problem, mesh, kv, facts),
                ));
            }
        }
    }
    Ok(())
}

/// The number of parts of a shard that travel, and are attended, separately.
fn parts_of_shard(facts: &StrategyFacts) -> usize {
    facts.streams.iter().map(|stream| stream.part.count()).max().unwrap_or(1)
}

/// Counts of tokens for which shards consist of whole tiles, if the placement allows any.
fn remedy(problem: &AttentionProblem, mesh: Mesh, kv: &Placement, facts: &StrategyFacts) -> Remedy {
    let (ring, ulysses, keys) = (mesh.ring(), mesh.ulysses(), problem.kv_len);
    let Some(shape) = kv.kind().map(|kind| kind.facts().shape) else {
        return format!(
            "let every part of a shard that is sent hold whole tiles of {TILE_KEYS} keys, each ascending"
        )
        .into();
    };
    let parts = parts_of_shard(facts);
    let runs = if shape == ShardShape::TwoRuns { 2 } else { 1 };
    let unit = TILE_KEYS * u32::try_from(parts.max(runs)).expect("a shard has a few parts");
    let fits = keys.is_multiple_of(unit);
    if !fits && parts > 1 && shape != ShardShape::ManyRuns {
        return "a part of a shard that is sent would end inside a tile: use another strategy".into();
    }
    if !fits && shape == ShardShape::TwoRuns || shape == ShardShape::ManyRuns {
        return "use contiguous placement".into();
    }
    if problem.q_len != keys || keys / unit < ring || !kv.replicated().is_empty() {
        return format!("let every shard have a multiple of {unit} keys, or use fewer shards").into();
    }
    let units = keys / unit;
    let counts = (0..mesh.size()).map(|rank| {
        let (r, u) = mesh.coordinates(Rank(rank));
        let over = if r + 1 == ring { keys % unit } else { 0 };
        let shard = (units / ring + u32::from(r < units % ring)) * unit + over;
        shard / ulysses + u32::from(u < shard % ulysses)
    });
    Remedy::UseTokens(counts.collect())
}

/// The tiles of `tokens`. In a fixed order all attended tokens form whole tiles.
pub(super) fn whole_tiles(tokens: &TokenRuns, kv_len: u32) -> Vec<(u32, Range<usize>)> {
    tiles(tokens, kv_len).expect("a plan set in fixed order is refused where shards are off the grid")
}

/// Numbers of the tiles that `tokens` holds, and their places in the list; or a key at which a part
/// of a tile begins or ends. The last tile of the sequence may have fewer keys.
fn tiles(tokens: &TokenRuns, kv_len: u32) -> std::result::Result<Vec<(u32, Range<usize>)>, u32> {
    let mut found = Vec::new();
    let mut at = 0;
    for run in tokens.runs() {
        let end = run.start + run.count;
        if run.stride != 1 || !run.start.is_multiple_of(TILE_KEYS) {
            return Err(run.start);
        }
        if !end.is_multiple_of(TILE_KEYS) && end != kv_len {
            return Err(end);
        }
        for start in (run.start..end).step_by(TILE_KEYS as usize) {
            let count = TILE_KEYS.min(end - start) as usize;
            found.push((start / TILE_KEYS, at..at + count));
            at += count;
        }
    }
    Ok(found)
}
