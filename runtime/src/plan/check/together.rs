//! All plans together: messages meet, and nobody waits for ever.

use std::collections::{HashMap, HashSet};

use kyklos_transport::Rank;

use crate::plan::{BufferId, Content, Plan, Slice, Step, World};
use crate::{Error, Result, TokenRuns};

/// Every message that is sent is received, and holds what the receiver declared.
pub(super) fn messages_meet(world: &World) -> Result<()> {
    let mut sent = HashMap::new();
    for plan in &world.plans {
        for (index, step) in plan.steps.iter().enumerate() {
            if let Step::Exchange { id, sends, .. } = step {
                for send in sends {
                    sent.insert((plan.rank, send.to, *id), (index, &send.parts));
                }
            }
        }
    }
    for plan in &world.plans {
        for (index, step) in plan.steps.iter().enumerate() {
            let Step::Exchange { id, recvs, .. } = step else {
                continue;
            };
            for recv in recvs {
                let fault = |fault: String| Err(Error::plan(Rank(plan.rank), Some(index), fault));
                let Some((_, parts)) = sent.remove(&(recv.from, plan.rank, *id)) else {
                    return fault(format!("waits for a message from rank {}, which sends none", recv.from));
                };
                let sender = &world.plans[recv.from as usize];
                let what = |slice: &Slice| {
                    let content = sender.buffer(slice.buffer).content;
                    (content, sender.slice_tokens(slice), sender.slice_heads(slice))
                };
                let declared = |id: &BufferId| {
                    let buffer = plan.buffer(*id);
                    (buffer.content, buffer.tokens.clone(), buffer.heads.clone())
                };
                let says = |(content, tokens, heads): &(Content, TokenRuns, std::ops::Range<u32>)| {
                    format!("{content:?} of tokens {tokens}, heads {heads:?}")
                };
                let (theirs, ours): (Vec<_>, Vec<_>) =
                    (parts.iter().map(what).collect(), recv.parts.iter().map(declared).collect());
                if theirs != ours {
                    return fault(format!(
                        "rank {} sends [{}], this rank expects [{}]",
                        recv.from,
                        theirs.iter().map(says).collect::<Vec<_>>().join("; "),
                        ours.iter().map(says).collect::<Vec<_>>().join("; "),
                    ));
                }
            }
        }
    }
    match sent.into_iter().min_by_key(|(key, _)| *key) {
        Some(((from, to, id), (index, _))) => Err(Error::plan(
            Rank(from),
            Some(index),
            format!("sends rank {to} a message in exchange {id} that rank {to} never receives"),
        )),
        None => Ok(()),
    }
}

/// Runs all plans in step: a wait passes when every message of its exchange has been posted on the other side too.
pub(super) fn nobody_waits_for_ever(world: &World) -> Result<()> {
    let mut at = vec![0; world.plans.len()];
    let mut posted: HashSet<(u32, u32)> = HashSet::new();
    loop {
        let mut moved = false;
        for (rank, plan) in world.plans.iter().enumerate() {
            while let Some(step) = plan.steps.get(at[rank]) {
                match step {
                    Step::Exchange { id, .. } => {
                        posted.insert((plan.rank, *id));
                    }
                    Step::Wait { id } if !peers_of(plan, *id).all(|peer| posted.contains(&(peer, *id))) => {
                        break;
                    }
                    _ => {}
                }
                at[rank] += 1;
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    match world.plans.iter().find(|plan| at[plan.rank as usize] < plan.steps.len()) {
        Some(plan) => Err(Error::plan(
            Rank(plan.rank),
            Some(at[plan.rank as usize]),
            "waits for ever: the other side posts the exchange only after this rank has gone on".to_owned(),
        )),
        None => Ok(()),
    }
}

fn peers_of(plan: &Plan, exchange: u32) -> impl Iterator<Item = u32> + '_ {
    plan.steps
        .iter()
        .filter_map(move |step| match step {
            Step::Exchange { id, sends, recvs } if *id == exchange => Some((sends, recvs)),
            _ => None,
        })
        .flat_map(|(sends, recvs)| sends.iter().map(|send| send.to).chain(recvs.iter().map(|recv| recv.from)))
}
