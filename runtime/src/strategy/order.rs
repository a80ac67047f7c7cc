//! Sums in an order that no mesh changes (`AttentionProblem::fixed_order`).
//!
//! Floating-point sums depend on their order, and in a ring every rank meets keys in another one. So each tile of
//! [`TILE_KEYS`] keys, counted from position 0, is attended to by itself, and the states of tiles are merged along one
//! binary tree over their numbers: a pair of neighbours as soon as both are there, the lower one first. What arrives when
//! does not matter then, and of a stretch of tiles in a row only about log₂ of them are kept. A tile that no query of a
//! rank sees is left out: merging a state that has seen nothing changes no bit.

use std::collections::BTreeMap;
use std::ops::Range;

use kyklos_transport::Rank;

use super::Strategy;
use super::build::{Inputs, PlanBuilder};
use crate::plan::{BufferId, Content, Slice};
use crate::{AttentionProblem, Error, Mesh, Placement, PlacementKind, Remedy, Result, TokenRuns};

/// Keys of a tile. Kernels must give a row the same bytes whatever rows they compute with it, and divide keys into
/// steps of their own from the first key of a call on.
pub const TILE_KEYS: u32 = 256;

/// Merged states that wait for their neighbours.
#[derive(Debug, Default)]
pub(super) struct Reduction {
    /// By height in the tree, and number at this height.
    waiting: BTreeMap<(u32, u32), BufferId>,
}

/// Attention of all of `inputs.q` against the keys at the list positions `part` of `inputs.kv`, tile by tile.
pub(super) fn attend_tiles(builder: &mut PlanBuilder<'_>, inputs: Inputs, part: Range<usize>) {
    let tokens = builder.buffer(inputs.kv).tokens.slice(part.clone());
    for (tile, range) in whole_tiles(&tokens, builder.world.problem.kv_len) {
        let keys = builder.tokens_of(inputs.kv, part.start + range.start..part.start + range.end);
        let (tokens, heads) =
            (builder.buffer(inputs.q).tokens.clone(), builder.buffer(inputs.q).heads.clone());
        let state = builder.declare(format!("state of tile {tile}"), Content::State, tokens, heads);
        if builder.attend_some(inputs, keys, state) {
            take(builder, (0, tile), state);
        }
    }
}

/// The keys in `kv` in two halves, each of which can be attended to by itself.
pub(super) fn halves(builder: &PlanBuilder<'_>, kv: BufferId) -> [Slice; 2] {
    let (tokens, problem) = (&builder.buffer(kv).tokens, &builder.world.problem);
    let middle = if problem.fixed_order {
        let tiles = whole_tiles(tokens, problem.kv_len);
        tiles.get(tiles.len() / 2).map_or(0, |(_, tile)| tile.start)
    } else {
        tokens.len() / 2
    };
    [0..middle, middle..tokens.len()].map(|half| builder.tokens_of(kv, half))
}

/// The sum over all tiles, if any was attended to. Neighbours that are missing now were seen by nobody.
pub(super) fn total(builder: &mut PlanBuilder<'_>) -> Option<BufferId> {
    loop {
        let (&(height, _), _) = builder.reduction().waiting.first_key_value()?;
        if builder.reduction().waiting.len() == 1 {
            return builder.reduction().waiting.pop_first().map(|(_, state)| state);
        }
        let above = builder.reduction().waiting.split_off(&(height + 1, 0));
        let lowest = std::mem::replace(&mut builder.reduction().waiting, above);
        for ((_, number), state) in lowest {
            take(builder, (height + 1, number / 2), state);
        }
    }
}

/// Merges `state` with its neighbour if that waits, and so on up the tree; else it waits.
fn take(builder: &mut PlanBuilder<'_>, (mut height, mut number): (u32, u32), mut state: BufferId) {
    while let Some(neighbour) = builder.reduction().waiting.remove(&(height, number ^ 1)) {
        let (lower, upper) = if number % 2 == 0 { (state, neighbour) } else { (neighbour, state) };
        builder.merge(upper, lower);
        builder.free(upper);
        (state, height, number) = (lower, height + 1, number / 2);
    }
    builder.reduction().waiting.insert((height, number), state);
}

/// Refuses what would make the order of sums depend on who holds which keys.
pub(super) fn fits(problem: &AttentionProblem, mesh: Mesh, strategy: Strategy, kv: &Placement) -> Result<()> {
    if !problem.fixed_order {
        return Ok(());
    }
    if strategy.moves_queries() {
        return Err(Error::request(
            format!("a fixed order with strategy {strategy}"),
            "its ranks send sums over their own keys, which no order of tiles can be made of: use a strategy that sends keys",
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
        let parts = if strategy == Strategy::TwoWay {
            vec![shard.slice(0..shard.len().div_ceil(2)), shard.slice(shard.len().div_ceil(2)..shard.len())]
        } else {
            vec![shard]
        };
        for part in parts {
            if let Err(key) = tiles(&part, problem.kv_len) {
                return Err(Error::request(
                    format!(
                        "a fixed order where shard {r} holds {part}: key {key} begins or ends a part of a tile of {TILE_KEYS} keys"
                    ),
                    remedy(problem, mesh, kv, strategy),
                ));
            }
        }
    }
    Ok(())
}

/// Counts of tokens that would be on the grid, where the placement allows any.
fn remedy(problem: &AttentionProblem, mesh: Mesh, kv: &Placement, strategy: Strategy) -> Remedy {
    let (ring, ulysses, keys) = (mesh.ring(), mesh.ulysses(), problem.kv_len);
    let halves = if kv.kind() == PlacementKind::Zigzag || strategy == Strategy::TwoWay { 2 } else { 1 };
    let unit = TILE_KEYS * halves;
    if matches!(kv.kind(), PlacementKind::Striped | PlacementKind::PerDocument)
        || kv.kind() == PlacementKind::Zigzag && !keys.is_multiple_of(unit)
    {
        return "use contiguous placement".into();
    }
    if !keys.is_multiple_of(unit) && halves == 2 {
        return "its halves of shards cannot all be on that grid: use another strategy".into();
    }
    if problem.q_len != keys || keys / unit < ring || !kv.replicated().is_empty() {
        return format!("let every shard have a multiple of {unit} keys, or use fewer shards").into();
    }
    let units = keys / unit;
    let counts = (0..mesh.world()).map(|rank| {
        let (r, u) = mesh.coordinates(Rank(rank));
        let over = if r + 1 == ring { keys % unit } else { 0 };
        let shard = (units / ring + u32::from(r < units % ring)) * unit + over;
        shard / ulysses + u32::from(u < shard % ulysses)
    });
    Remedy::UseTokens(counts.collect())
}

/// The tiles of tokens that are on the grid, as all are that are attended to.
fn whole_tiles(tokens: &TokenRuns, kv_len: u32) -> Vec<(u32, Range<usize>)> {
    tiles(tokens, kv_len).expect("a world in fixed order is refused where shards are off the grid")
}

/// Numbers of the tiles that `tokens` holds, and where in the list they lie; or a key at which a part of a tile begins or
/// ends. The last tile of the sequence is as long as there are keys.
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
