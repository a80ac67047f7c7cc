//! Output rows that travel from the owners of their queries to other ranks
//! ([`Results`](crate::Results)).

use kyklos_rank::Rank;

use super::build::PlanBuilder;
use super::price::Traffic;
use crate::plan::{BufferId, BufferName, Content, Recv, Send};
use crate::problem::Results;

/// Sends the rows of this rank's queries to the ranks that get them, takes the rows that this rank
/// gets, and frees its own.
pub(super) fn send(builder: &mut PlanBuilder<'_>) {
    let set = builder.set;
    let (results, me, ranks) = (set.problem.results, builder.rank, set.mesh.size());
    if results == Results::Owner {
        return;
    }
    let own = builder.output();
    let rows = |rank: Rank| set.q_placement.of_rank(rank).len();
    // The nearest successor first, so that no two ranks send to the same peer at once.
    let others: Vec<Rank> = (1..ranks).map(|distance| Rank((me.0 + distance) % ranks)).collect();
    let mut sends = Vec::new();
    if rows(me) > 0 {
        let to = others.iter().filter(|rank| results.gathered_on(**rank));
        sends.extend(to.map(|rank| Send { to: rank.0, parts: vec![builder.whole(own)] }));
    }
    let mut arriving: Vec<(Rank, BufferId)> = Vec::new();
    if results.gathered_on(me) {
        for from in others.into_iter().filter(|rank| rows(*rank) > 0) {
            let (tokens, heads) = (set.q_placement.of_rank(from).clone(), 0..set.problem.q_heads);
            let buffer = builder.declare(BufferName::of_rank("o", from), Content::Output, tokens, heads);
            arriving.push((from, buffer));
        }
    }
    let recvs = arriving.iter().map(|(from, buffer)| Recv { from: from.0, parts: vec![*buffer] }).collect();
    let exchange = builder.exchange(sends, recvs);
    let place = |builder: &PlanBuilder<'_>, rank: Rank| {
        let first: usize = (0..rank.0).map(|before| rows(Rank(before))).sum();
        builder.tokens_of(builder.all_output(), first..first + rows(rank))
    };
    if results.gathered_on(me) {
        let into = place(builder, me);
        builder.repack(builder.whole(own), into);
    }
    builder.wait(exchange);
    builder.free(own);
    for (from, buffer) in arriving {
        let into = place(builder, from);
        builder.unpack(buffer, into);
    }
}

/// Bytes of all these messages.
pub(super) fn bytes(traffic: &Traffic<'_>) -> u128 {
    let ranks = (0..traffic.q.mesh().size()).map(Rank);
    let rows = |rank: Rank| -> u128 {
        let rows = traffic.q.of_rank(rank).len();
        u128::from(Content::Output.bytes(traffic.problem, rows, traffic.problem.q_heads))
    };
    let gathering = ranks.clone().filter(|rank| traffic.problem.results.gathered_on(*rank));
    gathering.map(|to| ranks.clone().filter(|from| *from != to).map(rows).sum::<u128>()).sum()
}
