//! Survivors complete the current operation after other ranks failed, if they hold the lost keys (ADR 0021).
//!
//! Every survivor knows the plan of every rank and the progress of every survivor. So each survivor knows the keys that
//! every running state has met and the rank that holds each block, and all make the same plans. A block is sent by its
//! owner, or by a rank that had received it, to each rank that sees keys of it and has not used it yet. In a round a
//! rank sends at most one block and receives at most one, the nearest first, as in the ring; it posts the exchange
//! before it computes.

use std::collections::BTreeMap;
use std::ops::Range;

use kyklos_transport::Rank;

use super::build::PlanBuilder;
use crate::plan::{
    BufferId, Content, Direction, LostTokens, Plan, Recv, Send, Slice, Step, StepProgress, World,
    remaining_buffers,
};
use crate::{
    AttentionProblem, Error, Mesh, Remedy, Result, Results, Strategy, TILE_KEYS, TokenRuns, WireFormat, lower,
};

/// Whether survivors can complete a call of `problem` on `mesh` by `strategy`, if they hold all keys.
///
/// # Errors
/// [`Error::Request`] with the reason, if they cannot.
pub fn can_repair(problem: &AttentionProblem, mesh: Mesh, strategy: Strategy) -> Result<()> {
    if mesh.ulysses() > 1 {
        return Err(Error::request(
            format!("mesh {mesh}, to be completed without lost ranks"),
            Remedy::RecoverOnRing,
        ));
    }
    if strategy.moves_queries() {
        return Err(Error::request(
            format!("strategy {strategy}, to be completed without lost ranks"),
            Remedy::RecoverBySendingKeys,
        ));
    }
    if problem.results != Results::Owner {
        return Err(Error::request(
            "results that are sent to other ranks, to be completed without lost ranks",
            "leave the results on the owners of the queries",
        ));
    }
    if problem.fixed_order {
        return Err(Error::request(
            format!("sums in a fixed order, of {TILE_KEYS} keys each, to be completed without lost ranks"),
            Remedy::RecoverInAnyOrder,
        ));
    }
    // A lost rank does not say whether its elements were in the range.
    if problem.wire == WireFormat::F16 {
        return Err(Error::request(
            "f16 on the wire, to be completed without lost ranks",
            "send tensors as they are, or as int8",
        ));
    }
    Ok(())
}

/// Plans by which `ranks`, the survivors of `before`, complete the operation, where `reached` is the progress of each. The
/// survivors are numbered anew, in their order; the output rows of the lost ranks are missing.
///
/// # Errors
/// [`Error::KeysLost`] when no survivor holds a block that is still needed, [`Error::Request`] as [`can_repair`],
/// [`Error::Plan`] when the plan of a rank cannot have this progress. The same on all ranks.
pub fn repair(before: &World, ranks: &[Rank], reached: &[StepProgress]) -> Result<World> {
    can_repair(&before.problem, before.mesh, before.strategy)?;
    if before.direction == Direction::Backward {
        return Err(Error::request(
            "a backward pass, to be completed without lost ranks",
            "repeat the forward pass and the backward pass on the ranks that are left",
        ));
    }
    if before.lost != LostTokens::default() {
        return Err(Error::request(
            "a second rank failed while survivors completed the operation of a first",
            "a second failure during recovery is unsupported: restart the operation",
        ));
    }
    let blocks = Block::all(before)?;
    let mut have = Vec::with_capacity(ranks.len());
    for (rank, reached) in ranks.iter().zip(reached) {
        have.push(Holdings::of(before, *rank, reached, &blocks)?);
    }
    let rounds = rounds(before, ranks, &blocks, &have)?;
    let lost =
        LostTokens { queries: before.q_placement.without(ranks), keys: before.kv_placement.without(ranks) };
    let mut world = World {
        problem: before.problem.clone(),
        mesh: Mesh::new(1, u32::try_from(ranks.len()).expect("ranks are counted in u32"))?,
        q_placement: before.q_placement.of_ranks(ranks)?,
        kv_placement: before.kv_placement.of_ranks(ranks)?,
        strategy: before.strategy,
        direction: Direction::Forward,
        plans: Vec::with_capacity(ranks.len()),
        lost,
    };
    for (at, (rank, has)) in ranks.iter().zip(&have).enumerate() {
        let plan = finish(&world, at, before.plan(*rank), has, &blocks, &rounds);
        world.plans.push(plan);
    }
    Ok(world)
}

/// Keys that travel together.
struct Block {
    /// The rank of its owner before the failure.
    owner: Rank,
    /// List positions in the owner's own tokens.
    part: Range<usize>,
    tokens: TokenRuns,
}

impl Block {
    /// The parts of every rank's keys that the messages of `world` carry, by owner and position.
    fn all(world: &World) -> Result<Vec<Self>> {
        let shards = world.kv_placement.ranks();
        // For each key its owner, and its position in the owner's list.
        let mut places = vec![None; world.problem.kv_len as usize];
        for (owner, tokens) in (0..).map(Rank).zip(shards) {
            tokens.iter().enumerate().for_each(|(at, token)| places[token as usize] = Some((owner, at)));
        }
        let mut cuts: Vec<Vec<usize>> = shards.iter().map(|tokens| vec![0, tokens.len()]).collect();
        for plan in &world.plans {
            for buffer in arrivals(plan).map(|id| plan.buffer(id)) {
                let first = buffer.tokens.runs().first().and_then(|run| places[run.start as usize]);
                let part = first.map(|(owner, at)| (owner, at..at + buffer.tokens.len()));
                let fits = |(owner, part): &(Rank, Range<usize>)| {
                    world.kv_placement.of_rank(*owner).slice(part.clone()) == buffer.tokens
                };
                let Some((owner, part)) = part.filter(fits) else {
                    let fault = format!("`{}` is not a part of any rank's keys", buffer.name);
                    return Err(Error::plan(Rank(plan.rank), None, fault));
                };
                cuts[owner.0 as usize].extend([part.start, part.end]);
            }
        }
        let mut blocks = Vec::new();
        for ((owner, tokens), mut cuts) in (0..).map(Rank).zip(shards).zip(cuts) {
            cuts.sort_unstable();
            cuts.dedup();
            let parts = cuts.windows(2).map(|pair| pair[0]..pair[1]);
            blocks.extend(parts.map(|part| Self { owner, tokens: tokens.slice(part.clone()), part }));
        }
        Ok(blocks)
    }
}

/// Buffers of keys and values that a message fills.
fn arrivals(plan: &Plan) -> impl Iterator<Item = BufferId> {
    let recvs = plan.steps.iter().flat_map(|step| match step {
        Step::Exchange { recvs, .. } => recvs.as_slice(),
        _ => &[],
    });
    let keys = |id: &BufferId| matches!(plan.buffer(*id).content, Content::KeyValue | Content::WireKeyValue);
    recvs.flat_map(|recv: &Recv| recv.parts.iter().copied()).filter(keys)
}

/// The buffers of a survivor when the repair begins, and the blocks that it lacks.
struct Holdings {
    /// The running state, and the keys that it has met.
    state: Option<(BufferId, TokenRuns)>,
    finished: bool,
    /// Whether it still has to attend to its own keys, and to the keys that every rank holds.
    own: bool,
    /// Blocks of other ranks that it holds, by block.
    blocks: BTreeMap<usize, BufferId>,
    /// Blocks of other ranks that its state has not met, and of which a row of it sees keys.
    lacks: Vec<usize>,
}

impl Holdings {
    fn of(before: &World, rank: Rank, reached: &StepProgress, blocks: &[Block]) -> Result<Self> {
        let left = remaining_buffers(before, rank, reached)?;
        let plan = before.plan(rank);
        let arrived: Vec<BufferId> = arrivals(plan).filter(|id| left.blocks.contains(id)).collect();
        let here = |block: &Block| arrived.iter().copied().find(|id| plan.buffer(*id).tokens == block.tokens);
        let others = || blocks.iter().enumerate().filter(|(_, block)| block.owner != rank);
        let here = others().filter_map(|(index, block)| Some((index, here(block)?))).collect();
        // A ring has one state of a rank's own rows, from its first block to its output.
        let state = left.states.into_iter().next();
        let mut met = vec![false; before.problem.kv_len as usize];
        for key in state.iter().flat_map(|(_, keys)| keys.iter()) {
            met[key as usize] = true;
        }
        let rows = before.q_placement.of_rank(rank);
        let lacks = |tokens: &TokenRuns| {
            let unmet = tokens.runs().first().is_some_and(|run| !met[run.start as usize]);
            !left.finished && unmet && lower::any_visible(&before.problem, rows, tokens)
        };
        Ok(Self {
            finished: left.finished,
            own: lacks(&plan.buffer(plan.kv).tokens),
            blocks: here,
            lacks: others().filter(|(_, block)| lacks(&block.tokens)).map(|(index, _)| index).collect(),
            state,
        })
    }
}

/// A message with a block, between ranks of the repair.
struct Move {
    from: usize,
    to: usize,
    block: usize,
}

/// The messages of each round.
fn rounds(before: &World, ranks: &[Rank], blocks: &[Block], have: &[Holdings]) -> Result<Vec<Vec<Move>>> {
    let world = before.mesh.world();
    let mut wanted: Vec<Vec<usize>> = Vec::with_capacity(ranks.len());
    for (rank, has) in ranks.iter().zip(have) {
        let mut wants: Vec<usize> =
            has.lacks.iter().copied().filter(|block| !has.blocks.contains_key(block)).collect();
        wants.sort_by_key(|block| (rank.0 + world - blocks[*block].owner.0) % world);
        wanted.push(wants);
    }
    let holders: Vec<Vec<usize>> = (0..blocks.len())
        .map(|block| {
            let owns = |rank: &Rank| *rank == blocks[block].owner;
            let holds = |at: &usize| owns(&ranks[*at]) || have[*at].blocks.contains_key(&block);
            (0..ranks.len()).filter(holds).collect()
        })
        .collect();
    for (rank, wants) in ranks.iter().zip(&wanted) {
        if let Some(block) = wants.iter().find(|block| holders[**block].is_empty()) {
            let Block { owner, tokens, .. } = &blocks[*block];
            return Err(Error::KeysLost { rank: owner.0, keys: tokens.clone(), seen_by: rank.0 });
        }
    }
    let mut rounds = Vec::new();
    while wanted.iter().any(|wants| !wants.is_empty()) {
        let mut busy = vec![false; ranks.len()];
        let mut round = Vec::new();
        for (to, wants) in wanted.iter_mut().enumerate() {
            let idle = |block: usize| holders[block].iter().copied().find(|from| !busy[*from]);
            let next = wants.iter().enumerate().find_map(|(place, block)| Some((place, idle(*block)?)));
            if let Some((place, from)) = next {
                busy[from] = true;
                round.push(Move { from, to, block: wants.remove(place) });
            }
        }
        rounds.push(round);
    }
    Ok(rounds)
}

/// The plan of rank `at` of the repair, whose interrupted plan is `old`.
fn finish(
    world: &World,
    at: usize,
    old: &Plan,
    has: &Holdings,
    blocks: &[Block],
    rounds: &[Vec<Move>],
) -> Plan {
    let rank = Rank(u32::try_from(at).expect("ranks are counted in u32"));
    let mut builder = PlanBuilder::new(world, rank);
    let inputs = builder.inputs();
    let heads = builder.buffer(inputs.kv).heads.clone();
    let has_rows = !builder.buffer(inputs.q).tokens.is_empty();
    let state = match &has.state {
        _ if has.finished => None,
        Some((was, met)) => Some(builder.keep(*was, old.buffer(*was), met.clone())),
        None => Some(builder.state(inputs.q)),
    };
    if has.finished && has_rows {
        builder.keep_output(old.output);
    }
    let sent_in = |round: &[Move]| round.iter().find(|moved| moved.from == at).map(|m| (m.to, m.block));
    // The last round in which each block is sent.
    let sends = (0..).zip(rounds).filter_map(|(number, round)| Some((sent_in(round)?.1, number)));
    let last_sent: BTreeMap<usize, usize> = sends.collect();
    // A block is kept while this rank or another one still needs it.
    let needed = |block: &usize| has.lacks.contains(block) || last_sent.contains_key(block);
    let here: BTreeMap<usize, BufferId> = has
        .blocks
        .iter()
        .filter(|(block, _)| needed(block))
        .map(|(block, was)| (*block, builder.keep(*was, old.buffer(*was), TokenRuns::default())))
        .collect();
    // For each block the slice that is sent, and the new buffers for it.
    let mut made: BTreeMap<usize, (Slice, Vec<BufferId>)> = BTreeMap::new();
    let mut arrived: Option<BufferId> = None;
    for number in 0..=rounds.len() {
        let round = rounds.get(number).map_or(&[][..], Vec::as_slice);
        let send = sent_in(round).map(|(to, block)| {
            let (slice, _) = made.entry(block).or_insert_with(|| match here.get(&block) {
                Some(kept) => (builder.whole(*kept), Vec::new()),
                None => {
                    let first = builder.own_keys(inputs.kv).tokens.start;
                    let Range { start, end } = blocks[block].part;
                    let slice = builder.tokens_of(inputs.kv, first + start..first + end);
                    let mut copies = Vec::new();
                    (builder.for_the_wire(slice, &mut copies), copies)
                }
            });
            (block, Send { to: to as u32, parts: vec![slice.clone()] })
        });
        let (sent, sends) = send.map_or((None, Vec::new()), |(block, send)| (Some(block), vec![send]));
        let recv = round.iter().find(|moved| moved.to == at).map(|moved| {
            let Block { owner, tokens, .. } = &blocks[moved.block];
            let buffer = builder.arrival(owner.0, tokens.clone(), heads.clone());
            (buffer, Recv { from: moved.from as u32, parts: vec![buffer] })
        });
        let (arriving, recvs) = recv.map_or((None, Vec::new()), |(buffer, recv)| (Some(buffer), vec![recv]));
        // After the last round there is nothing to send.
        let exchange = if number < rounds.len() { builder.exchange(sends, recvs) } else { None };
        if let Some(state) = state {
            if number == 0 && has.own {
                builder.attend(inputs, state);
            }
            let local = here.iter().filter(|(block, _)| number == 0 && has.lacks.contains(block));
            for buffer in local.map(|(_, buffer)| *buffer).chain(arrived) {
                builder.attend_arrived(inputs, buffer, state);
            }
        }
        if let Some(buffer) = arrived.take() {
            builder.free(buffer);
        }
        builder.wait(exchange);
        arrived = arriving;
        // Frees blocks after their last send.
        if let Some(block) = sent.filter(|block| last_sent[block] == number) {
            made.remove(&block)
                .into_iter()
                .flat_map(|(_, copies)| copies)
                .for_each(|copy| builder.free(copy));
        }
        let done = here.iter().filter(|(block, _)| last_sent.get(block).copied().unwrap_or(0) == number);
        done.for_each(|(_, buffer)| builder.free(*buffer));
    }
    if let Some(state) = state {
        builder.finalize(state, builder.output());
    }
    builder.finish()
}
