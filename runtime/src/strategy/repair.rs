//! A round over the shards that lost ranks, finished by those who are left (ADR 0021).
//!
//! Everybody knows everybody's plan, and how far each rank came with it: so everybody knows which keys each running state
//! has met and who holds which block, and makes the same plans from it. A block goes straight from one that has it, its owner
//! or whoever it had come to, to each that has not met it and sees any of it. In each of some rounds a rank sends at
//! most one block and gets at most one, the nearest first, as in the ring; it is posted before what is here is
//! computed.

use std::collections::BTreeMap;
use std::ops::Range;

use kyklos_transport::Rank;

use super::build::PlanBuilder;
use crate::plan::{BufferId, Content, Lost, Plan, Recv, Send, Slice, Step, StepProgress, World, left};
use crate::{AttentionProblem, Error, Mesh, Remedy, Result, Strategy, TILE_KEYS, TokenRuns, lower};

/// Whether those who are left can finish a call of `problem` on `mesh` by `strategy`, if they still have all keys.
///
/// # Errors
/// [`Error::Request`] that says why not.
pub fn can_repair(problem: &AttentionProblem, mesh: Mesh, strategy: Strategy) -> Result<()> {
    if mesh.ulysses() > 1 {
        return Err(Error::request(
            format!("mesh {mesh}, to be finished without ranks that are lost"),
            Remedy::RecoverOnRing,
        ));
    }
    if strategy.moves_queries() {
        return Err(Error::request(
            format!("strategy {strategy}, to be finished without ranks that are lost"),
            Remedy::RecoverBySendingKeys,
        ));
    }
    if problem.fixed_order {
        return Err(Error::request(
            format!(
                "sums in a fixed order, of {TILE_KEYS} keys each, to be finished without ranks that are lost"
            ),
            Remedy::RecoverInAnyOrder,
        ));
    }
    Ok(())
}

/// Plans by which `ranks`, those of `before` that are left, finish what they began there, each from where it came. They
/// are numbered anew, in their order; the queries of the others get no answer.
///
/// # Errors
/// [`Error::KeysLost`] when nobody who is left has all keys that are still needed, [`Error::Request`] as
/// [`can_repair`], [`Error::Plan`] when a rank cannot have come where it says. The same on all ranks.
pub fn repair(before: &World, ranks: &[Rank], reached: &[StepProgress]) -> Result<World> {
    can_repair(&before.problem, before.mesh, before.strategy)?;
    if before.lost != Lost::default() {
        return Err(Error::request(
            "a second loss while those who were left finished what they had begun",
            "what they have left is not put together again: begin again",
        ));
    }
    let blocks = Block::all(before)?;
    let mut have = Vec::with_capacity(ranks.len());
    for (rank, reached) in ranks.iter().zip(reached) {
        have.push(Has::of(before, *rank, reached, &blocks)?);
    }
    let rounds = rounds(before, ranks, &blocks, &have)?;
    let lost = Lost { queries: before.q_placement.without(ranks), keys: before.kv_placement.without(ranks) };
    let mut world = World {
        problem: before.problem.clone(),
        mesh: Mesh::new(1, u32::try_from(ranks.len()).expect("ranks are counted in u32"))?,
        q_placement: before.q_placement.of_ranks(ranks)?,
        kv_placement: before.kv_placement.of_ranks(ranks)?,
        strategy: before.strategy,
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
    /// Before the loss.
    owner: Rank,
    /// List positions in the owner's own tokens.
    part: Range<usize>,
    tokens: TokenRuns,
}

impl Block {
    /// The pieces into which the messages of `world` cut everybody's keys, by owner and place.
    fn all(world: &World) -> Result<Vec<Self>> {
        let shards = world.kv_placement.ranks();
        // Where each key lies: whose it is, and at which place of its list.
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
                    let fault = format!("`{}` is of no rank's keys as they lie there", buffer.name);
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

/// Keys and values that come by a message.
fn arrivals(plan: &Plan) -> impl Iterator<Item = BufferId> {
    let recvs = plan.steps.iter().flat_map(|step| match step {
        Step::Exchange { recvs, .. } => recvs.as_slice(),
        _ => &[],
    });
    let keys = |id: &BufferId| matches!(plan.buffer(*id).content, Content::KeyValue | Content::WireKeyValue);
    recvs.flat_map(|recv: &Recv| recv.parts.iter().copied()).filter(keys)
}

/// What a rank has when the repair begins, and what it lacks.
struct Has {
    /// The running state, and the keys that it has met.
    state: Option<(BufferId, TokenRuns)>,
    finished: bool,
    /// Whether it has still to attend to its own keys, and those of everybody.
    own: bool,
    /// Blocks of others that are here, by block.
    blocks: BTreeMap<usize, BufferId>,
    /// Blocks of others that it has not met, and that a row of it sees.
    lacks: Vec<usize>,
}

impl Has {
    fn of(before: &World, rank: Rank, reached: &StepProgress, blocks: &[Block]) -> Result<Self> {
        let left = left(before, rank, reached)?;
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

/// A block on its way, between ranks of the repair.
struct Move {
    from: usize,
    to: usize,
    block: usize,
}

/// Who sends what to whom, round by round.
fn rounds(before: &World, ranks: &[Rank], blocks: &[Block], have: &[Has]) -> Result<Vec<Vec<Move>>> {
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

/// The plan of rank `at`, which had `old` before.
fn finish(world: &World, at: usize, old: &Plan, has: &Has, blocks: &[Block], rounds: &[Vec<Move>]) -> Plan {
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
    // In which round each block is sent for the last time.
    let sends = (0..).zip(rounds).filter_map(|(number, round)| Some((sent_in(round)?.1, number)));
    let last_sent: BTreeMap<usize, usize> = sends.collect();
    // Of the blocks that are here those stay that are still needed, by this rank or by others.
    let needed = |block: &usize| has.lacks.contains(block) || last_sent.contains_key(block);
    let here: BTreeMap<usize, BufferId> = has
        .blocks
        .iter()
        .filter(|(block, _)| needed(block))
        .map(|(block, was)| (*block, builder.keep(*was, old.buffer(*was), TokenRuns::default())))
        .collect();
    // What is sent of each block, and what was made for that.
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
        // The last time there is nothing left to move.
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
        // What is not sent any more goes.
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
