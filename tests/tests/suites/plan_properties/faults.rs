//! Planted faults in plans. No fault may pass the proof.

use kyklos::plan::{Content, GradientStep, PlanSet, Recv, Send, Slice, Step};

use crate::plan_properties::Random;

pub(crate) type Fault = fn(&mut PlanSet, &mut Random) -> Option<&'static str>;

/// Each fault breaks a plan in one way. It returns false if the plan has nothing to break in this
/// way.
pub(crate) const FAULTS: &[Fault] = &[
    |set, random| {
        let (rank, step) = pick(set, random, |step| matches!(step, Step::Attend { .. }))?;
        set.plans[rank].steps.remove(step);
        Some("a dropped block")
    },
    |set, random| {
        let (rank, step) = pick(set, random, |step| matches!(step, Step::Attend { .. }))?;
        let again = set.plans[rank].steps[step].clone();
        set.plans[rank].steps.insert(step, again);
        Some("a block counted twice")
    },
    |set, random| {
        let (rank, step) = pick(set, random, |step| matches!(step, Step::Wait { .. }))?;
        set.plans[rank].steps.remove(step);
        Some("a wait that is missing")
    },
    |set, random| {
        let (rank, step) = pick(set, random, |step| matches!(step, Step::Exchange { .. }))?;
        set.plans[rank].steps.remove(step);
        Some("a dropped hop")
    },
    |set, random| {
        let (rank, step) = pick(set, random, |step| matches!(step, Step::Repack { .. }))?;
        let plan = &mut set.plans[rank];
        let Step::Repack { into, .. } = plan.steps.remove(step) else {
            return None;
        };
        // This fault does not apply if the mask hides everything and no step reads the copy, if keys are
        // replicated, or if attention runs over keys in halves.
        let of_copy = |part: &Slice| {
            let (start, end) = (part.tokens.start, part.tokens.end);
            part.buffer == into.buffer && start < into.tokens.end && into.tokens.start < end
        };
        let read = |step: &Step| match step {
            Step::Repack { .. } => false,
            Step::Exchange { sends, .. } => sends.iter().flat_map(|send| &send.parts).any(of_copy),
            Step::Convert { from, .. } => of_copy(from),
            Step::Attend { kv, .. } if kv.buffer == into.buffer => of_copy(kv),
            _ => uses(step, into.buffer),
        };
        (into.buffer == plan.output || plan.steps[step..].iter().any(read))
            .then_some("a copy that is missing")
    },
    |set, random| {
        let (rank, step) = pick(set, random, |step| matches!(step, Step::Free { .. }))?;
        let free = set.plans[rank].steps.remove(step);
        let Step::Free { buffer } = &free else { return None };
        if set.plans[rank].buffer(*buffer).tokens.is_empty() {
            return None;
        }
        if random.below(2) == 0 {
            return Some("a buffer that is never freed");
        }
        // Before its last use.
        let last = set.plans[rank].steps[..step].iter().rposition(|step| uses(step, *buffer))?;
        set.plans[rank].steps.insert(last, free);
        Some("a buffer freed before its last use")
    },
    |set, random| {
        // The owner is taken from the wrong side of the ring.
        let arrived = |set: &PlanSet, rank: usize, buffer: usize| {
            set.plans[rank].buffers[buffer].name.to_string().starts_with("kv of shard")
                && set.plans[rank].buffers[buffer].tokens.len() > 1
        };
        let rank = random.below(set.plans.len() as u32) as usize;
        let buffer = (0..set.plans[rank].buffers.len()).find(|buffer| arrived(set, rank, *buffer))?;
        let tokens = &set.plans[rank].buffers[buffer].tokens;
        let other: Vec<u32> = tokens.iter().map(|token| token ^ 1).collect();
        let other = kyklos::TokenRuns::from_positions(other);
        if other == *tokens {
            return None;
        }
        set.plans[rank].buffers[buffer].tokens = other;
        Some("a block under the wrong owner")
    },
    |set, random| {
        let (rank, step) =
            pick(set, random, |step| matches!(step, Step::Exchange { sends, .. } if !sends.is_empty()))?;
        let (count, me) = (set.mesh.size(), set.plans[rank].rank);
        let Step::Exchange { sends, .. } = &mut set.plans[rank].steps[step] else {
            return None;
        };
        let to = sends[0].to;
        sends[0].to = (0..count).find(|other| *other != to && *other != me)?;
        Some("a message to the wrong rank")
    },
    |set, random| {
        let (rank, step) = pick(set, random, |step| matches!(step, Step::Attend { .. }))?;
        let Step::Attend { q, .. } = &mut set.plans[rank].steps[step] else {
            return None;
        };
        q.tokens.end -= 1;
        Some("a query row left out")
    },
    |set, random| {
        let (rank, step) = pick(set, random, |step| matches!(step, Step::Attend { .. }))?;
        let buffers = set.plans[rank].buffers.clone();
        let Step::Attend { kv, .. } = &mut set.plans[rank].steps[step] else {
            return None;
        };
        if buffers[kv.buffer.0].content != Content::KeyValue || !set.problem.mask.is_full() {
            return None;
        }
        kv.tokens.end -= 1;
        Some("a key left out")
    },
    |set, random| {
        let (rank, step) = pick(set, random, |step| matches!(step, Step::Attend { bias: Some(_), .. }))?;
        let Step::Attend { bias, .. } = &mut set.plans[rank].steps[step] else {
            return None;
        };
        *bias = None;
        Some("an attention bias tensor left out")
    },
    |set, random| {
        let (rank, step) = pick(set, random, |step| matches!(step, Step::Attend { bias: Some(_), .. }))?;
        let Step::Attend { bias: Some(bias), .. } = &mut set.plans[rank].steps[step] else {
            return None;
        };
        bias.tokens.end -= 1;
        Some("the attention bias tensor of other rows")
    },
    |set, random| {
        let (rank, step) = pick(set, random, |step| matches!(step, Step::Convert { .. }))?;
        set.plans[rank].steps.remove(step);
        Some("a conversion left out")
    },
    |set, random| {
        let (rank, step) = pick(set, random, |step| matches!(step, Step::Convert { .. }))?;
        let Step::Convert { from, .. } = &mut set.plans[rank].steps[step] else { return None };
        from.heads.end -= 1;
        Some("a conversion of fewer heads")
    },
    |set, random| {
        let (rank, step) = pick(set, random, |step| matches!(step, Step::Merge { .. }))?;
        set.plans[rank].steps.remove(step);
        Some("a merge left out")
    },
    |set, random| {
        // The plan declares fewer keys for a state than it contains. Both sides declare the same, so that
        // they agree.
        let (rank, step) =
            pick(set, random, |step| matches!(step, Step::Exchange { sends, .. } if !sends.is_empty()))?;
        let Step::Exchange { id, sends, .. } = set.plans[rank].steps[step].clone() else { return None };
        let sent = &mut set.plans[rank].buffers[sends[0].parts[0].buffer.0];
        if sent.content != Content::State {
            return None;
        }
        let fewer = sent.met.slice(1..sent.met.len());
        sent.met = fewer.clone();
        let receiver = &mut set.plans[sends[0].to as usize];
        let Recv { parts, .. } = receiver.steps.iter().find_map(|step| match step {
            Step::Exchange { id: theirs, recvs, .. } if *theirs == id => {
                recvs.iter().find(|recv| recv.from == rank as u32).cloned()
            }
            _ => None,
        })?;
        receiver.buffers[parts[0].0].met = fewer;
        Some("a state of other keys")
    },
    |set, random| {
        // A rank waits for its next hop before it posts it.
        let rank = random.below(set.plans.len() as u32) as usize;
        let steps = &mut set.plans[rank].steps;
        let wait = steps.iter().position(|step| matches!(step, Step::Wait { .. }))?;
        let Step::Wait { id } = steps[wait] else {
            return None;
        };
        let post = steps
            .iter()
            .position(|step| matches!(step, Step::Exchange { id: posted, .. } if *posted == id))?;
        steps.swap(post, wait);
        Some("a wait before its post")
    },
    |set, random| {
        // On both sides, so that this is the only fault.
        let from = random.below(set.mesh.size());
        let to = (0..set.mesh.size()).find(|to| *to != from)?;
        let id = u32::MAX;
        for (rank, sends, recvs) in [
            (from, vec![Send { to, parts: Vec::new() }], Vec::new()),
            (to, Vec::new(), vec![Recv { from, parts: Vec::new() }]),
        ] {
            let steps = &mut set.plans[rank as usize].steps;
            steps.splice(0..0, [Step::Exchange { id, sends, recvs }, Step::Wait { id }]);
        }
        Some("a message without parts")
    },
];

fn pick(set: &PlanSet, random: &mut Random, wanted: fn(&Step) -> bool) -> Option<(usize, usize)> {
    let rank = random.below(set.plans.len() as u32) as usize;
    let found: Vec<usize> =
        (0..set.plans[rank].steps.len()).filter(|step| wanted(&set.plans[rank].steps[*step])).collect();
    let index = random.below(found.len() as u32) as usize;
    found.get(index).map(|step| (rank, *step))
}

fn uses(step: &Step, buffer: kyklos::plan::BufferId) -> bool {
    match step {
        Step::Repack { from, into } => from.buffer == buffer || into.buffer == buffer,
        Step::Exchange { sends, .. } => {
            sends.iter().flat_map(|send| &send.parts).any(|part| part.buffer == buffer)
        }
        Step::Attend { q, kv, state, bias } => {
            [q.buffer, kv.buffer, *state].contains(&buffer)
                || bias.as_ref().is_some_and(|bias| bias.buffer == buffer)
        }
        Step::AttendBackward(step) => {
            let GradientStep { q, d_o, stats, kv, dq, d_kv, bias, d_bias } = &**step;
            [q, d_o, stats, kv, d_kv].iter().any(|slice| slice.buffer == buffer)
                || *dq == buffer
                || [bias, d_bias].into_iter().flatten().any(|bias| bias.buffer == buffer)
        }
        Step::Accumulate { from, into } => *from == buffer || into.buffer == buffer,
        Step::Convert { from, into } => from.buffer == buffer || *into == buffer,
        Step::Merge { from, into } | Step::Finalize { state: from, into } => {
            *from == buffer || *into == buffer
        }
        Step::Wait { .. } | Step::Free { .. } => false,
    }
}
