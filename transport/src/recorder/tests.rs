use super::*;

#[test]
fn the_latest_events_are_kept_in_order_and_the_others_are_counted() {
    let recorder = Recorder::new(Rank(0), 2, "job".to_owned());
    let posted = EVENTS as u64 + 100;
    for op in 0..posted {
        recorder.note(EventKind::Sent, Rank(1), Tag { op, message: 0 }, 10);
    }
    let seen = recorder.look();
    assert_eq!(seen.forgotten, 100);
    let ops: Vec<u64> = seen.events.iter().map(|event| event.tag.op).collect();
    assert_eq!(ops, (100..posted).collect::<Vec<_>>());
    assert!(seen.events.is_sorted_by_key(|event| event.at_ns));
    assert_eq!((seen.peers[1].messages_sent, seen.peers[1].bytes_sent), (posted, 10 * posted));
}

#[test]
fn the_ring_never_grows_and_strangers_are_not_counted() {
    let recorder = Recorder::new(Rank(0), 1, String::new());
    let capacity = lock(&recorder.ring).events.capacity();
    for _ in 0..3 * EVENTS {
        recorder.note(EventKind::Received, Rank(7), Tag { op: 0, message: 0 }, 1);
    }
    assert_eq!(lock(&recorder.ring).events.capacity(), capacity);
    assert_eq!(recorder.peers(), [PeerRecord::default()]);
}

#[test]
fn calls_that_ended_early_are_bounded() {
    let recorder = Recorder::new(Rank(0), 2, String::new());
    let tag = Tag { op: 0, message: 0 };
    let pending = Pending { operation: "send", peer: Rank(1), tag, bytes_done: 0, bytes_expected: 1 };
    for _ in 0..2 * ENDED_EARLY {
        recorder.ended_early(pending, Duration::ZERO);
    }
    assert_eq!(recorder.look().ended_early.len(), ENDED_EARLY);
}
