//! Forming a group again.

use std::sync::atomic::Ordering;

use bytes::Bytes;
use kyklos_transport::Group;
use kyklos_transport::{Abort, AbortCause, Posted, Progress, Rank, Regroup, TransportError};
use pollster::block_on;

use super::{LONG, Ranks, abort_of, close, ready, tag};

fn abort(group: &Ranks, culprit: u32) {
    group[culprit as usize].abort(Abort {
        culprit: Rank(culprit),
        cause: AbortCause::Failed("on purpose".to_owned()),
        progress: Progress { op: 1, step: 1 },
    });
    for rank in group {
        abort_of(block_on(rank.agree(ready(1), LONG)).unwrap_err());
    }
}

/// All these ranks form the next group, with the same members and epoch.
fn reform(group: Ranks) -> (Ranks, Vec<Rank>, u32) {
    let forming: Vec<Posted<Group>> =
        group.iter().map(|rank| rank.reform(Regroup::Survivors, LONG)).collect();
    drop(group);
    let formed: Ranks = forming.into_iter().map(|posted| block_on(posted).unwrap()).collect();
    let (members, epoch) = (formed[0].members.clone(), formed[0].epoch);
    for (rank, one) in (0..).zip(&formed) {
        assert_eq!((&one.members, one.epoch), (&members, epoch));
        assert_eq!((one.rank(), one.size()), (Rank(rank), members.len() as u32));
        assert!(!one.stop_flag().load(Ordering::Acquire));
    }
    (formed, members, epoch)
}

/// All ranks agree, and send messages to each other with tags that the last group used.
fn works(group: &Ranks) {
    let size = group.len() as u32;
    let votes: Vec<_> = group.iter().map(|rank| rank.agree(ready(3), LONG)).collect();
    votes.into_iter().for_each(|vote| assert_eq!(block_on(vote).unwrap().len(), group.len()));
    for from in 0..size {
        for to in (0..size).filter(|&to| to != from) {
            let received = group[to as usize].post_recv(Rank(from), tag(0, from), &[100_000], LONG);
            let sent = vec![Bytes::from(vec![from as u8; 100_000])];
            block_on(group[from as usize].post_send(Rank(to), tag(0, from), sent, LONG)).unwrap();
            assert_eq!(block_on(received).unwrap(), [vec![from as u8; 100_000]]);
        }
    }
}

pub(crate) fn survivors_form_the_next_group_whichever_rank_died(make: fn(u32) -> Ranks) {
    for victim in [2, 0] {
        let mut group = make(4);
        works(&group);
        drop(group.remove(victim));
        for rank in &group {
            let error = block_on(rank.agree(ready(1), LONG)).unwrap_err();
            assert_eq!(abort_of(error).culprit, Rank(victim as u32));
        }
        let (mut next, members, epoch) = reform(group);
        let left: Vec<Rank> = (0..4).filter(|&rank| rank != victim as u32).map(Rank).collect();
        assert_eq!(members, left);
        works(&next);
        // One after the other.
        drop(next.remove(1));
        for rank in &next {
            assert_eq!(abort_of(block_on(rank.agree(ready(1), LONG)).unwrap_err()).culprit, Rank(1));
        }
        let (last, members, later) = reform(next);
        assert_eq!(members, [left[0], left[2]]);
        assert!(later > epoch, "{later} after {epoch}");
        works(&last);
        close(last);
    }
}

pub(crate) fn a_failed_group_forms_again_with_all_ranks(make: fn(u32) -> Ranks) {
    let mut group = make(3);
    for _ in 0..2 {
        abort(&group, 1);
        let (next, members, _) = reform(group);
        assert_eq!(members, [Rank(0), Rank(1), Rank(2)]);
        works(&next);
        group = next;
    }
    close(group);
}

pub(crate) fn too_few_survivors_form_no_group(make: fn(u32) -> Ranks) {
    let mut group = make(4);
    drop(group.drain(..2));
    let short = std::time::Duration::from_secs(12);
    for rank in &group {
        abort_of(block_on(rank.agree(ready(1), LONG)).unwrap_err());
    }
    let forming: Vec<_> = group.iter().map(|rank| rank.reform(Regroup::Survivors, short)).collect();
    for posted in forming {
        let error = block_on(posted).unwrap_err();
        let TransportError::Bootstrap { text, .. } = &error else { panic!("{error:?}") };
        assert!(text.contains("too few") || text.contains("did not say") || text.contains("lost"), "{text}");
    }
}

pub(crate) fn a_working_group_is_not_formed_again(make: fn(u32) -> Ranks) {
    let group = make(2);
    let error = block_on(group[0].reform(Regroup::Survivors, LONG)).unwrap_err();
    assert!(matches!(error, TransportError::Misuse { .. }), "{error:?}");
    works(&group);
    close(group);
}
