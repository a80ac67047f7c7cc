//! A program can read afterwards what a rank did.

use kyklos_transport::{Abort, AbortCause, EventKind, Progress, Rank, Vote};
use pollster::block_on;

use super::{LONG, Ranks, payload, tag};

pub(crate) fn a_rank_records_what_it_did_and_what_an_abort_ended(make: fn(u32) -> Ranks) {
    let group = make(2);
    let vote = |bytes| Vote::Ready { plan_hash: [1; 32], note: payload(bytes, 1) };
    let votes = [group[0].agree(vote(30), LONG), group[1].agree(vote(12), LONG)];
    votes.into_iter().for_each(|vote| assert_eq!(block_on(vote).unwrap().len(), 2));
    group[1].report_progress(Progress { op: 0, step: 3 });
    let receive = group[1].post_recv(Rank(0), tag(0, 7), &[1000], LONG);
    block_on(group[0].post_send(Rank(1), tag(0, 7), vec![payload(1000, 1)], LONG)).unwrap();
    block_on(receive).unwrap();
    let (sender, receiver) = (group[0].recorder().look(), group[1].recorder().look());
    assert_eq!((sender.peers[1].messages_sent, sender.peers[1].bytes_sent), (1, 1000));
    assert_eq!((receiver.peers[0].messages_received, receiver.peers[0].bytes_received), (1, 1000));
    assert_eq!((sender.peers[1].bytes_received, receiver.peers[0].bytes_sent), (0, 0));
    assert_eq!(receiver.progress, Progress { op: 0, step: 3 });
    // In this order. The transport may record other events between them.
    let mut kinds = receiver.events.iter().map(|event| event.kind);
    for kind in
        [EventKind::Voted, EventKind::Agreed, EventKind::Step, EventKind::ReceivePosted, EventKind::Received]
    {
        assert!(kinds.any(|other| other == kind), "no {} at its place in {:?}", kind.name(), receiver.events);
    }
    // Of a vote the bytes of its note, of the agreement those of all notes.
    let bytes = |kind| receiver.events.iter().find(|event| event.kind == kind).map(|event| event.bytes);
    assert_eq!((bytes(EventKind::Voted), bytes(EventKind::Agreed)), (Some(12), Some(42)));
    let received = receiver.events.iter().find(|event| event.kind == EventKind::Received).unwrap();
    assert_eq!((received.peer, received.tag, received.step, received.bytes), (Rank(0), tag(0, 7), 3, 1000));

    let waiting = group[1].post_recv(Rank(0), tag(1, 0), &[50], LONG);
    let outstanding = group[1].outstanding();
    assert_eq!(outstanding.len(), 1);
    let pending = outstanding[0].pending;
    assert_eq!((pending.operation, pending.peer, pending.bytes_expected), ("receive", Rank(0), 50));
    let abort = Abort {
        culprit: Rank(0),
        cause: AbortCause::Failed("on purpose".to_owned()),
        progress: Progress { op: 1, step: 0 },
    };
    group[0].abort(abort.clone());
    block_on(waiting).unwrap_err();
    let seen = group[1].recorder().look();
    assert_eq!(seen.abort.unwrap().1, abort);
    assert_eq!(seen.ended_early.iter().map(|call| call.pending).collect::<Vec<_>>(), [pending]);
    assert_eq!(group[1].outstanding(), []);
}
