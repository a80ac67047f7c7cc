//! All plans together: every message is received, and no rank waits for ever.

use std::collections::HashSet;
use std::ops::Range;

use kyklos_rank::Rank;

use crate::error::{Error, Result};
use crate::plan::{BufferId, Content, Plan, PlanSet, Recv, Send, Slice, Step};
use crate::tokens::TokenRuns;

/// Checks that every message that is sent is received, and holds the content that the receiver
/// declared.
pub(super) fn messages_meet(set: &PlanSet) -> Result<()> {
    let mut inboxes: Vec<Vec<Message<'_>>> = set.plans.iter().map(|_| Vec::new()).collect();
    for plan in &set.plans {
        for (step, id, sends, _) in exchanges(plan) {
            for Send { to, parts } in sends {
                inboxes[*to as usize].push(Message { id, from: plan.rank, step, parts });
            }
        }
    }
    let mut never_received = Vec::new();
    for (plan, inbox) in set.plans.iter().zip(&mut inboxes) {
        // One exchange has at most one message from each rank, so no message is found twice.
        inbox.sort_unstable_by_key(Message::key);
        let mut received = 0;
        for (step, id, _, recvs) in exchanges(plan) {
            for recv in recvs {
                let fault = |fault: String| Err(Error::plan(Rank(plan.rank), Some(step), fault));
                let Ok(found) = inbox.binary_search_by_key(&(id, recv.from), Message::key) else {
                    return fault(format!("waits for a message from rank {}, which sends none", recv.from));
                };
                received += 1;
                let parts = inbox[found].parts;
                let sender = &set.plans[recv.from as usize];
                let fits = |(slice, id): (&Slice, &BufferId)| {
                    let (theirs, ours) = (sender.buffer(slice.buffer), plan.buffer(*id));
                    theirs.content == ours.content
                        && sender.slice_heads(slice) == ours.heads
                        && sender.slice_tokens(slice) == ours.tokens
                        && theirs.met == ours.met
                        && theirs.met_heads == ours.met_heads
                };
                if parts.len() != recv.parts.len() || !parts.iter().zip(&recv.parts).all(fits) {
                    let says = |content: Content, tokens: &TokenRuns, heads: &Range<u32>| {
                        format!("{content:?} of tokens {tokens}, heads {heads:?}")
                    };
                    let theirs = parts.iter().map(|slice| {
                        let content = sender.buffer(slice.buffer).content;
                        says(content, &sender.slice_tokens(slice), &sender.slice_heads(slice))
                    });
                    let ours = recv.parts.iter().map(|id| {
                        let buffer = plan.buffer(*id);
                        says(buffer.content, &buffer.tokens, &buffer.heads)
                    });
                    return fault(format!(
                        "rank {} sends [{}], this rank expects [{}]",
                        recv.from,
                        theirs.collect::<Vec<_>>().join("; "),
                        ours.collect::<Vec<_>>().join("; "),
                    ));
                }
            }
        }
        if received < inbox.len() {
            let awaited: HashSet<(u32, u32)> = exchanges(plan)
                .flat_map(|(_, id, _, recvs)| recvs.iter().map(move |recv| (id, recv.from)))
                .collect();
            let lost = inbox.iter().find(|message| !awaited.contains(&message.key()));
            never_received.extend(lost.map(|message| (message.from, plan.rank, message.id, message.step)));
        }
    }
    match never_received.into_iter().min() {
        Some((from, to, id, step)) => Err(Error::plan(
            Rank(from),
            Some(step),
            format!("sends rank {to} a message in exchange {id} that rank {to} never receives"),
        )),
        None => Ok(()),
    }
}

/// A message on its way to a rank.
struct Message<'a> {
    id: u32,
    from: u32,
    /// The step of the sender.
    step: usize,
    parts: &'a [Slice],
}

impl Message<'_> {
    fn key(&self) -> (u32, u32) {
        (self.id, self.from)
    }
}

/// The exchanges of a plan: step, id, sends and receives.
fn exchanges(plan: &Plan) -> impl Iterator<Item = (usize, u32, &[Send], &[Recv])> {
    plan.steps.iter().enumerate().filter_map(|(index, step)| match step {
        Step::Exchange { id, sends, recvs } => Some((index, *id, sends.as_slice(), recvs.as_slice())),
        _ => None,
    })
}

/// Runs all plans in step: a wait passes when every message of its exchange has been posted on the
/// other side too.
pub(super) fn no_rank_waits_for_ever(set: &PlanSet) -> Result<()> {
    let schedules: Vec<Schedule<'_>> = set.plans.iter().map(Schedule::new).collect();
    // A rank has posted exactly the exchanges before its current step.
    let mut at = vec![0; set.plans.len()];
    loop {
        let mut moved = false;
        for (rank, plan) in set.plans.iter().enumerate() {
            while let Some(step) = plan.steps.get(at[rank]) {
                if let Step::Wait { id } = step {
                    let behind = |peer: usize| schedules[peer].post(*id).is_some_and(|step| step < at[peer]);
                    if !schedules[rank].peers_of(*id).all(behind) {
                        break;
                    }
                }
                at[rank] += 1;
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    match set.plans.iter().find(|plan| at[plan.rank as usize] < plan.steps.len()) {
        Some(plan) => Err(Error::plan(
            Rank(plan.rank),
            Some(at[plan.rank as usize]),
            "waits for ever: the other side posts the exchange only after this rank has gone on".to_owned(),
        )),
        None => Ok(()),
    }
}

/// Checks that the plans also end where each rank carries out its exchanges one after the other, in
/// the order in which it posts them, as a stream of a device does: an exchange then begins when the
/// one before is complete, and is complete when the other side of each of its messages has begun.
///
/// # Errors
/// [`Error::Plan`] that names a rank and the step that would wait for ever.
pub fn check_in_order(set: &PlanSet) -> Result<()> {
    let schedules: Vec<Schedule<'_>> = set.plans.iter().map(Schedule::new).collect();
    let orders: Vec<Vec<(usize, u32)>> =
        set.plans.iter().map(|plan| exchanges(plan).map(|(step, id, ..)| (step, id)).collect()).collect();
    // The step of each rank, and how many of its exchanges are complete.
    let (mut at, mut complete) = (vec![0; set.plans.len()], vec![0; set.plans.len()]);
    // The first exchange of a rank that is not complete.
    let current = |rank: usize, complete: &[usize]| orders[rank].get(complete[rank]).copied();
    loop {
        let mut moved = false;
        for (rank, plan) in set.plans.iter().enumerate() {
            while let Some(step) = plan.steps.get(at[rank]) {
                if let Step::Wait { id } = step {
                    let posted = schedules[rank].post(*id).unwrap_or(usize::MAX);
                    if current(rank, &complete).is_some_and(|(step, _)| step <= posted) {
                        break;
                    }
                }
                at[rank] += 1;
                moved = true;
            }
            while let Some((step, id)) = current(rank, &complete).filter(|(step, _)| *step < at[rank]) {
                let has_begun = |peer: usize| {
                    let Some(theirs) = schedules[peer].post(id) else { return false };
                    current(peer, &complete)
                        .is_none_or(|(step, _)| step > theirs || (step == theirs && step < at[peer]))
                };
                debug_assert_eq!(schedules[rank].post(id), Some(step));
                if !schedules[rank].peers_of(id).all(has_begun) {
                    break;
                }
                complete[rank] += 1;
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    match (0..set.plans.len()).find_map(|rank| Some((rank, current(rank, &complete)?.0))) {
        Some((rank, step)) => Err(Error::plan(
            Rank(set.plans[rank].rank),
            Some(step),
            "waits for ever where exchanges are carried out one after the other".to_owned(),
        )),
        None => Ok(()),
    }
}

/// Where a plan posts its exchanges.
struct Schedule<'a> {
    plan: &'a Plan,
    /// Id and step, by id.
    posts: Vec<(u32, u32)>,
}

impl<'a> Schedule<'a> {
    fn new(plan: &'a Plan) -> Self {
        let posts = exchanges(plan).map(|(step, id, ..)| (id, u32::try_from(step).expect("steps are few")));
        let mut posts: Vec<_> = posts.collect();
        posts.sort_unstable_by_key(|(id, _)| *id);
        Self { plan, posts }
    }

    /// The step that posts `exchange`.
    fn post(&self, exchange: u32) -> Option<usize> {
        // Ids count from 0, with gaps only where a rank has no part in an exchange.
        let guess = self.posts.get(exchange as usize).filter(|(id, _)| *id == exchange);
        let found = guess.or_else(|| {
            self.posts.binary_search_by_key(&exchange, |(id, _)| *id).ok().map(|found| &self.posts[found])
        });
        found.map(|(_, step)| *step as usize)
    }

    fn peers_of(&self, exchange: u32) -> impl Iterator<Item = usize> {
        let (sends, recvs) = match self.post(exchange).map(|step| &self.plan.steps[step]) {
            Some(Step::Exchange { sends, recvs, .. }) => (sends.as_slice(), recvs.as_slice()),
            _ => (&[][..], &[][..]),
        };
        let peers = sends.iter().map(|send| send.to).chain(recvs.iter().map(|recv| recv.from));
        peers.map(|peer| peer as usize)
    }
}
