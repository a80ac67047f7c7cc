//! Messages arrive complete, in any order of posting, and invalid calls are refused.

use std::time::{Duration, Instant};

use bytes::Bytes;
use kyklos_transport::{Event, EventKind, Rank, TransportError};
use pollster::block_on;

use super::{LONG, Ranks, abort_of, close, payload, tag};

pub(crate) fn payloads_of_all_sizes_and_part_counts_arrive_unchanged(make: fn(u32) -> Ranks) {
    let group = make(2);
    let messages: [&[usize]; 10] = [
        &[1],
        &[7, 1, 0, 3],
        &[1000],
        &[64 << 10],
        &[(64 << 10) + 1],
        &[100_000, 3, 200_001],
        &[1 << 20; 5],
        &[20 << 20],
        &[0, 5 << 20, 0, 17],
        &[1; 300],
    ];
    for (message, part_bytes) in messages.iter().enumerate() {
        for receive_first in [true, false] {
            let tag = tag(u64::from(receive_first), message as u32);
            let parts: Vec<Bytes> =
                (0..).zip(*part_bytes).map(|(seed, &bytes)| payload(bytes, seed)).collect();
            let (sent, received);
            if receive_first {
                received = group[1].post_recv(Rank(0), tag, part_bytes, LONG);
                std::thread::sleep(Duration::from_millis(2));
                sent = group[0].post_send(Rank(1), tag, parts.clone(), LONG);
            } else {
                sent = group[0].post_send(Rank(1), tag, parts.clone(), LONG);
                std::thread::sleep(Duration::from_millis(2));
                received = group[1].post_recv(Rank(0), tag, part_bytes, LONG);
            }
            let received = block_on(received).unwrap();
            assert_eq!(received.len(), parts.len());
            assert!(received == parts, "the payload of {part_bytes:?} has changed");
            block_on(sent).unwrap();
        }
    }
    close(group);
}

pub(crate) fn both_sides_may_send_first(make: fn(u32) -> Ranks) {
    let group = make(2);
    let bytes = 20 << 20;
    let sent: Vec<_> = (0..2)
        .map(|me: u32| {
            group[me as usize].post_send(Rank(1 - me), tag(0, 0), vec![payload(bytes, u64::from(me))], LONG)
        })
        .collect();
    for me in 0..2_u32 {
        let received = group[me as usize].post_recv(Rank(1 - me), tag(0, 0), &[bytes], LONG);
        assert!(block_on(received).unwrap() == [payload(bytes, u64::from(1 - me))]);
    }
    for sent in sent {
        block_on(sent).unwrap();
    }
    close(group);
}

pub(crate) fn bursts_from_everyone_to_everyone_arrive(make: fn(u32) -> Ranks) {
    for size in 1..=5_u32 {
        let group = make(size);
        let mut sent = Vec::new();
        let mut received = Vec::new();
        let bytes = |from: u32, to: u32, message: u32| {
            1 + (from * 7919 + to * 104_729 + message * 31_337) as usize % 200_000
        };
        for from in 0..size {
            for to in (0..size).filter(|&to| to != from) {
                for message in 0..20 {
                    let bytes = bytes(from, to, message);
                    let parts = vec![payload(bytes, u64::from(from * 100 + message))];
                    sent.push(group[from as usize].post_send(Rank(to), tag(3, message), parts, LONG));
                    let posted = group[to as usize].post_recv(Rank(from), tag(3, message), &[bytes], LONG);
                    received.push((from, message, bytes, posted));
                }
            }
        }
        for (from, message, bytes, posted) in received {
            assert!(block_on(posted).unwrap() == [payload(bytes, u64::from(from * 100 + message))]);
        }
        for sent in sent {
            block_on(sent).unwrap();
        }
        close(group);
    }
}

/// Rank 0 sends 300 messages in order, and rank 1 receives them in reverse order. Half of them are
/// large. The transport may delay messages, but requested messages must arrive.
pub(crate) fn tags_are_matched_in_any_order(make: fn(u32) -> Ranks) {
    let group = make(2);
    let bytes = |message: u32| if message.is_multiple_of(2) { 50 } else { 600_000 };
    let sent: Vec<_> = (0..300)
        .map(|message| {
            let parts = vec![payload(bytes(message), u64::from(message))];
            group[0].post_send(Rank(1), tag(0, message), parts, LONG)
        })
        .collect();
    for message in (0..300).rev() {
        let received = group[1].post_recv(Rank(0), tag(0, message), &[bytes(message)], LONG);
        assert!(block_on(received).unwrap() == [payload(bytes(message), u64::from(message))], "{message}");
    }
    for sent in sent {
        block_on(sent).unwrap();
    }
    close(group);
}

pub(crate) fn a_send_waits_for_its_receive(make: fn(u32) -> Ranks) {
    let group = make(2);
    for (message, bytes) in [(0, 10), (1, 1 << 20)] {
        let mut sent = group[0].post_send(Rank(1), tag(0, message), vec![payload(bytes, 1)], LONG);
        std::thread::sleep(Duration::from_millis(150));
        let early = block_on(std::future::poll_fn(|context| {
            std::task::Poll::Ready(std::pin::Pin::new(&mut sent).poll(context).is_ready())
        }));
        assert!(!early, "a send of {bytes} bytes ended before its receive was posted");
        block_on(group[1].post_recv(Rank(0), tag(0, message), &[bytes], LONG)).unwrap();
        block_on(sent).unwrap();
    }
    close(group);
}

pub(crate) fn a_send_reports_how_long_it_waited_for_its_receive(make: fn(u32) -> Ranks) {
    let group = make(2);
    let late = Duration::from_millis(150);
    // Small messages may leave before they are requested, large ones may not.
    for (message, bytes) in [(0, 10), (2, 1 << 20)] {
        let send = |message| {
            (Instant::now(), group[0].post_send(Rank(1), tag(0, message), vec![payload(bytes, 1)], LONG))
        };
        let (posted, sent) = send(message);
        std::thread::sleep(late);
        block_on(group[1].post_recv(Rank(0), tag(0, message), &[bytes], LONG)).unwrap();
        let under_way = block_on(sent).unwrap().under_way;
        let waited = posted.elapsed();
        assert!(under_way + late <= waited, "asked for late: {under_way:?} of {waited:?}");

        let early = tag(0, message + 1);
        let received = group[1].post_recv(Rank(0), early, &[bytes], LONG);
        let is_ask =
            |event: &Event| (event.kind, event.peer, event.tag) == (EventKind::Asked, Rank(1), early);
        while !group[0].recorder().look().events.iter().any(is_ask) {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(late);
        let (posted, sent) = send(message + 1);
        let under_way = block_on(sent).unwrap().under_way;
        let waited = posted.elapsed();
        // A time that began with the request would be longer by `late`.
        assert!(under_way <= waited, "asked before: {under_way:?} of {waited:?}");
        block_on(received).unwrap();
    }
    close(group);
}

pub(crate) fn parts_of_other_lengths_than_expected_are_a_broken_protocol(make: fn(u32) -> Ranks) {
    for (sends, expects) in
        [(vec![4, 6], vec![6, 4]), (vec![10], vec![11]), (vec![10], vec![5, 5]), (vec![200_000], vec![7])]
    {
        let group = make(2);
        let received = group[1].post_recv(Rank(0), tag(0, 0), &expects, LONG);
        let parts = sends.iter().map(|&bytes| payload(bytes, 0)).collect();
        let sent = group[0].post_send(Rank(1), tag(0, 0), parts, LONG);
        let error = block_on(received).unwrap_err();
        let TransportError::PeerMisbehaved { peer, text } = &error else { panic!("{error:?}") };
        assert_eq!(*peer, Rank(0));
        assert!(text.contains(&format!("{expects:?}")), "{text}");
        // The sender learns it from the receiver, or through the coordinator.
        match block_on(sent).unwrap_err() {
            TransportError::PeerMisbehaved { peer, .. } => assert_eq!(peer, Rank(1)),
            other => assert_eq!(abort_of(other).culprit, Rank(0)),
        }
        let later = block_on(group[0].post_recv(Rank(1), tag(1, 0), &[1], LONG)).unwrap_err();
        assert_eq!(abort_of(later).culprit, Rank(0));
    }
}

pub(crate) fn invalid_calls_are_refused_and_harmless(make: fn(u32) -> Ranks) {
    let group = make(2);
    let misuse = |error: TransportError, words: &str| {
        let TransportError::Misuse { text } = &error else { panic!("{error:?}") };
        assert!(text.contains(words), "{text}");
    };
    let one = || vec![payload(1, 0)];
    misuse(block_on(group[0].post_send(Rank(2), tag(0, 0), one(), LONG)).unwrap_err(), "group of 2");
    misuse(block_on(group[0].post_recv(Rank(7), tag(0, 0), &[1], LONG)).unwrap_err(), "group of 2");
    misuse(block_on(group[1].post_send(Rank(1), tag(0, 0), one(), LONG)).unwrap_err(), "itself");
    misuse(block_on(group[1].post_recv(Rank(1), tag(0, 0), &[1], LONG)).unwrap_err(), "itself");
    misuse(block_on(group[0].post_send(Rank(1), tag(0, 0), vec![], LONG)).unwrap_err(), "empty");
    misuse(block_on(group[0].post_recv(Rank(1), tag(0, 0), &[0, 0], LONG)).unwrap_err(), "empty");
    let first = group[0].post_send(Rank(1), tag(0, 0), one(), LONG);
    misuse(block_on(group[0].post_send(Rank(1), tag(0, 0), one(), LONG)).unwrap_err(), "outstanding");
    let first_receive = group[0].post_recv(Rank(1), tag(0, 0), &[1], LONG);
    misuse(block_on(group[0].post_recv(Rank(1), tag(0, 0), &[1], LONG)).unwrap_err(), "outstanding");
    block_on(group[1].post_recv(Rank(0), tag(0, 0), &[1], LONG)).unwrap();
    block_on(first).unwrap();
    block_on(group[1].post_send(Rank(0), tag(0, 0), one(), LONG)).unwrap();
    block_on(first_receive).unwrap();
    close(group);
}

pub(crate) fn a_tag_is_used_once(make: fn(u32) -> Ranks) {
    let group = make(2);
    let misuse = |error: TransportError| {
        let TransportError::Misuse { text } = &error else { panic!("{error:?}") };
        assert!(text.contains("op 3 message 4") && text.contains("a tag is used once"), "{text}");
    };
    let receive = |patience| group[1].post_recv(Rank(0), tag(3, 4), &[2], patience);
    let send = |patience| group[0].post_send(Rank(1), tag(3, 4), vec![payload(2, 1)], patience);
    let (sent, received) = (send(LONG), receive(LONG));
    assert!(block_on(received).unwrap() == [payload(2, 1)]);
    block_on(sent).unwrap();
    misuse(block_on(receive(LONG)).unwrap_err());
    misuse(block_on(send(LONG)).unwrap_err());
    // The same holds for a call that ended without its message. The other direction has its own tags.
    let short = Duration::from_millis(50);
    let receive = |patience| group[0].post_recv(Rank(1), tag(3, 4), &[2], patience);
    assert!(matches!(block_on(receive(short)).unwrap_err(), TransportError::Deadline { .. }));
    misuse(block_on(receive(LONG)).unwrap_err());
    // The group still works.
    let received = group[0].post_recv(Rank(1), tag(3, 5), &[2], LONG);
    block_on(group[1].post_send(Rank(0), tag(3, 5), vec![payload(2, 2)], LONG)).unwrap();
    assert!(block_on(received).unwrap() == [payload(2, 2)]);
    close(group);
}

/// Small messages leave before they are requested. Abandoned small messages must not use up the
/// buffers of requested ones.
pub(crate) fn abandoned_messages_do_not_block_later_ones(make: fn(u32) -> Ranks) {
    let group = make(2);
    for op in 0..6 {
        let short = Duration::from_millis(150);
        let given_up: Vec<_> = (0..64)
            .map(|message| group[0].post_send(Rank(1), tag(op, message), vec![payload(1000, 1)], short))
            .collect();
        for sent in given_up {
            let error = block_on(sent).unwrap_err();
            assert!(matches!(error, TransportError::Deadline { .. }), "{error:?}");
        }
    }
    for (message, bytes) in [(0, 1000), (1, 1 << 20)] {
        let received = group[1].post_recv(Rank(0), tag(6, message), &[bytes], LONG);
        block_on(group[0].post_send(Rank(1), tag(6, message), vec![payload(bytes, 2)], LONG)).unwrap();
        assert!(block_on(received).unwrap() == [payload(bytes, 2)]);
    }
    close(group);
}
