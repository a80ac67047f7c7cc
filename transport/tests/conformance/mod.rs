//! What every transport must do, whatever carries the bytes. Each claim is a function of a factory of groups.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kyklos_transport::{Abort, AbortCause, Posted, Progress, Rank, Tag, Transport, TransportError, Vote};
use pollster::block_on;

pub(crate) type Group = Vec<Arc<dyn Transport>>;

/// No test waits longer than this for anything that should happen.
pub(crate) const LONG: Duration = Duration::from_secs(20);

pub(crate) fn tag(op: u64, message: u32) -> Tag {
    Tag { op, message }
}

/// Bytes that differ by seed and position.
pub(crate) fn payload(bytes: usize, seed: u64) -> Bytes {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut out = Vec::with_capacity(bytes + 8);
    while out.len() < bytes {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        out.extend_from_slice(&state.to_le_bytes());
    }
    out.truncate(bytes);
    Bytes::from(out)
}

pub(crate) fn ready(byte: u8) -> Vote {
    Vote::Ready { plan_hash: [byte; 32] }
}

/// Closes all ranks at once, as their programs would.
pub(crate) fn close(group: Group) {
    let closing: Vec<Posted<()>> = group.iter().map(|rank| rank.close(LONG)).collect();
    for (rank, closed) in closing.into_iter().enumerate() {
        block_on(closed).unwrap_or_else(|error| panic!("close of rank {rank}: {error}"));
    }
}

fn abort_of(error: TransportError) -> Abort {
    match error {
        TransportError::Aborted { abort, .. } => abort,
        other => panic!("not an abort: {other}"),
    }
}

pub(crate) fn payloads_of_all_sizes_and_part_counts_arrive_unchanged(make: fn(u32) -> Group) {
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

pub(crate) fn both_sides_may_send_first(make: fn(u32) -> Group) {
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

pub(crate) fn bursts_from_everyone_to_everyone_arrive(make: fn(u32) -> Group) {
    for world in 1..=5_u32 {
        let group = make(world);
        let mut sent = Vec::new();
        let mut received = Vec::new();
        let bytes = |from: u32, to: u32, message: u32| {
            1 + (from * 7919 + to * 104_729 + message * 31_337) as usize % 200_000
        };
        for from in 0..world {
            for to in (0..world).filter(|&to| to != from) {
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

/// 300 messages are sent in order and received in reverse, half of them large: whatever the transport holds back,
/// what is wanted must get through.
pub(crate) fn tags_are_matched_in_any_order(make: fn(u32) -> Group) {
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

pub(crate) fn a_send_waits_for_its_receive(make: fn(u32) -> Group) {
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

pub(crate) fn ranks_agree_when_all_are_ready_with_one_plan(make: fn(u32) -> Group) {
    for world in [1, 3] {
        let group = make(world);
        for round in 0..3 {
            let votes: Vec<_> = group.iter().map(|rank| rank.agree(ready(round), LONG)).collect();
            for vote in votes {
                assert_eq!(block_on(vote), Ok(()));
            }
        }
        close(group);
    }
}

pub(crate) fn the_lowest_refusal_is_everyones_error_and_the_group_goes_on(make: fn(u32) -> Group) {
    let group = make(4);
    let refuse = |exit, text: &str| Vote::Refuse { exit, text: text.into() };
    let ballots = [ready(1), refuse(2, "3 heads are too few"), ready(9), refuse(1, "out of memory")];
    let votes: Vec<_> = group.iter().zip(ballots).map(|(rank, vote)| rank.agree(vote, LONG)).collect();
    for vote in votes {
        let expected = TransportError::Refused { rank: Rank(1), exit: 2, text: "3 heads are too few".into() };
        assert_eq!(block_on(vote), Err(expected));
    }
    let votes: Vec<_> = group.iter().map(|rank| rank.agree(ready(7), LONG)).collect();
    assert!(votes.into_iter().all(|vote| block_on(vote).is_ok()));
    close(group);
}

pub(crate) fn different_plans_are_noticed_by_everyone(make: fn(u32) -> Group) {
    let group = make(3);
    let votes: Vec<_> =
        group.iter().map(|rank| rank.agree(ready(u8::from(rank.rank() == Rank(2))), LONG)).collect();
    let errors: Vec<_> = votes.into_iter().map(|vote| block_on(vote).unwrap_err()).collect();
    assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
    let TransportError::Refused { rank, exit, text } = &errors[0] else { panic!("{errors:?}") };
    assert_eq!((*rank, *exit), (Rank(2), 2));
    assert!(text.contains("000000") && text.contains("010101"), "{text}");
    close(group);
}

pub(crate) fn an_abort_ends_everything_everywhere_and_names_one_culprit(make: fn(u32) -> Group) {
    let group = make(4);
    let flags: Vec<_> = group.iter().map(|rank| rank.stop_flag()).collect();
    let receives: Vec<_> = (0..4_u32)
        .map(|me| group[me as usize].post_recv(Rank((me + 1) % 4), tag(5, 1), &[100], LONG))
        .collect();
    let send = group[3].post_send(Rank(1), tag(5, 2), vec![payload(1 << 20, 0)], LONG);
    let vote = group[1].agree(ready(0), LONG);
    assert!(flags.iter().all(|flag| !flag.load(Ordering::Acquire)));
    let abort = |culprit, text: &str| Abort {
        culprit: Rank(culprit),
        cause: AbortCause::Failed(text.into()),
        progress: Progress { op: 5, step: 17 },
    };
    let started = Instant::now();
    group[2].abort(abort(2, "out of memory"));
    let mut seen = Vec::new();
    for (me, receive) in receives.into_iter().enumerate() {
        let error = block_on(receive).unwrap_err();
        let TransportError::Aborted { pending: Some(pending), .. } = &error else { panic!("{error:?}") };
        assert_eq!(pending.operation, "receive");
        assert_eq!((pending.peer, pending.tag), (Rank((me as u32 + 1) % 4), tag(5, 1)));
        assert_eq!((pending.bytes_done, pending.bytes_expected), (0, 100));
        seen.push(abort_of(error));
    }
    seen.push(abort_of(block_on(send).unwrap_err()));
    seen.push(abort_of(block_on(vote).unwrap_err()));
    // Too late: the first one counts. Idempotent, too.
    group[1].abort(abort(1, "something else"));
    group[2].abort(abort(2, "out of memory"));
    for rank in &group {
        let peer = Rank((rank.rank().0 + 1) % 4);
        seen.push(abort_of(block_on(rank.post_recv(peer, tag(6, 0), &[1], LONG)).unwrap_err()));
        seen.push(abort_of(
            block_on(rank.post_send(peer, tag(6, 0), vec![payload(1, 0)], LONG)).unwrap_err(),
        ));
        seen.push(abort_of(block_on(rank.agree(ready(0), LONG)).unwrap_err()));
    }
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    for one in seen {
        assert_eq!(one, abort(2, "out of memory"));
    }
    assert!(flags.iter().all(|flag| flag.load(Ordering::Acquire)));
}

pub(crate) fn a_dropped_rank_has_died(make: fn(u32) -> Group) {
    for victim in [2, 0] {
        let mut group = make(3);
        group[victim as usize].report_progress(Progress { op: 4, step: 2 });
        let survivors: Vec<u32> = (0..3).filter(|&rank| rank != victim).collect();
        let receives: Vec<_> = survivors
            .iter()
            .map(|&me| group[me as usize].post_recv(Rank(victim), tag(4, 0), &[1 << 20], LONG))
            .collect();
        std::thread::sleep(Duration::from_millis(700));
        let started = Instant::now();
        drop(group.remove(victim as usize));
        for receive in receives {
            let error = block_on(receive).unwrap_err();
            let text = error.to_string();
            let abort = abort_of(error);
            assert_eq!(abort.culprit, Rank(victim), "{text}");
            assert!(matches!(abort.cause, AbortCause::Died(_)), "{text}");
            assert_eq!(abort.progress, Progress { op: 4, step: 2 }, "{text}");
            assert!(text.contains("0 of 1048576 bytes"), "{text}");
        }
        assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    }
}

pub(crate) fn a_deadline_ends_a_call_and_says_how_far_it_got(make: fn(u32) -> Group) {
    let group = make(2);
    let short = Duration::from_millis(200);
    let started = Instant::now();
    let receive = group[0].post_recv(Rank(1), tag(1, 2), &[5, 6], short);
    let send = group[0].post_send(Rank(1), tag(1, 3), vec![payload(1 << 20, 0)], short);
    let vote = group[0].agree(ready(0), short);
    let text = block_on(receive).unwrap_err().to_string();
    assert!(text.contains("receive from rank 1 (op 1 message 2) had 0 of 11 bytes after 200ms"), "{text}");
    let error = block_on(send).unwrap_err();
    let TransportError::Deadline { pending, waited } = error else { panic!("{error:?}") };
    assert_eq!((pending.operation, pending.peer, pending.tag), ("send", Rank(1), tag(1, 3)));
    assert_eq!((pending.bytes_expected, waited), (1 << 20, short));
    let error = block_on(vote).unwrap_err();
    assert!(matches!(error, TransportError::Deadline { .. }), "{error:?}");
    assert!(
        started.elapsed() >= short && started.elapsed() < Duration::from_secs(5),
        "{:?}",
        started.elapsed()
    );
    // The group lives on.
    let received = group[1].post_recv(Rank(0), tag(2, 0), &[3], LONG);
    block_on(group[0].post_send(Rank(1), tag(2, 0), vec![payload(3, 3)], LONG)).unwrap();
    assert!(block_on(received).unwrap() == [payload(3, 3)]);
}

pub(crate) fn ranks_that_finish_early_may_leave(make: fn(u32) -> Group) {
    let mut group = make(3);
    // Rank 1 goes first and is gone for good; rank 0 goes next; 2 has nothing left to do with either.
    let sent = group[2].post_send(Rank(0), tag(0, 0), vec![payload(1 << 20, 5)], LONG);
    let leaving = group[1].close(LONG);
    block_on(leaving).unwrap();
    drop(group.remove(1));
    std::thread::sleep(Duration::from_millis(300));
    assert!(
        block_on(group[0].post_recv(Rank(2), tag(0, 0), &[1 << 20], LONG)).unwrap() == [payload(1 << 20, 5)]
    );
    block_on(sent).unwrap();
    let first = group[0].close(LONG);
    std::thread::sleep(Duration::from_millis(300));
    assert!(!group[1].stop_flag().load(Ordering::Acquire), "a rank that left in order is not dead");
    block_on(group[1].close(LONG)).unwrap();
    block_on(first).unwrap();
}

pub(crate) fn close_waits_until_the_receiver_has_what_was_sent(make: fn(u32) -> Group) {
    let group = make(2);
    let sent = group[0].post_send(Rank(1), tag(0, 0), vec![payload(3 << 20, 1)], LONG);
    let closed = group[0].close(LONG);
    std::thread::sleep(Duration::from_millis(200));
    let received = group[1].post_recv(Rank(0), tag(0, 0), &[3 << 20], LONG);
    assert!(block_on(received).unwrap() == [payload(3 << 20, 1)]);
    block_on(sent).unwrap();
    block_on(group[1].close(LONG)).unwrap();
    block_on(closed).unwrap();
    let error = block_on(group[0].post_send(Rank(1), tag(0, 1), vec![payload(1, 1)], LONG)).unwrap_err();
    assert_eq!(error, TransportError::Closed);
}

pub(crate) fn a_rank_that_leaves_while_it_is_needed_is_an_error(make: fn(u32) -> Group) {
    let group = make(3);
    let needed = group[2].post_recv(Rank(1), tag(0, 7), &[10], LONG);
    std::thread::sleep(Duration::from_millis(100));
    let _leaving = group[1].close(LONG);
    let abort = abort_of(block_on(needed).unwrap_err());
    assert_eq!(abort.culprit, Rank(1));
    let AbortCause::Failed(text) = &abort.cause else { panic!("{abort}") };
    assert!(text.contains("left") && text.contains("rank 2") && text.contains("message 7"), "{text}");
    let later = group[0].post_recv(Rank(2), tag(0, 8), &[10], LONG);
    assert_eq!(abort_of(block_on(later).unwrap_err()).culprit, Rank(1));
}

pub(crate) fn parts_of_other_lengths_than_expected_are_a_broken_protocol(make: fn(u32) -> Group) {
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
        // The sender hears it from the receiver, or through the coordinator.
        match block_on(sent).unwrap_err() {
            TransportError::PeerMisbehaved { peer, .. } => assert_eq!(peer, Rank(1)),
            other => assert_eq!(abort_of(other).culprit, Rank(0)),
        }
        let later = block_on(group[0].post_recv(Rank(1), tag(1, 0), &[1], LONG)).unwrap_err();
        assert_eq!(abort_of(later).culprit, Rank(0));
    }
}

pub(crate) fn calls_that_cannot_be_right_are_refused_and_harm_nothing(make: fn(u32) -> Group) {
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

/// Instantiates every claim for one factory.
#[macro_export]
macro_rules! conformance_tests {
    ($make:path: $($claim:ident)*) => {
        $(
            #[test]
            fn $claim() {
                conformance::$claim($make);
            }
        )*
    };
    ($make:path) => {
        $crate::conformance_tests! { $make:
            payloads_of_all_sizes_and_part_counts_arrive_unchanged
            both_sides_may_send_first
            bursts_from_everyone_to_everyone_arrive
            tags_are_matched_in_any_order
            a_send_waits_for_its_receive
            ranks_agree_when_all_are_ready_with_one_plan
            the_lowest_refusal_is_everyones_error_and_the_group_goes_on
            different_plans_are_noticed_by_everyone
            an_abort_ends_everything_everywhere_and_names_one_culprit
            a_dropped_rank_has_died
            a_deadline_ends_a_call_and_says_how_far_it_got
            ranks_that_finish_early_may_leave
            close_waits_until_the_receiver_has_what_was_sent
            a_rank_that_leaves_while_it_is_needed_is_an_error
            parts_of_other_lengths_than_expected_are_a_broken_protocol
            calls_that_cannot_be_right_are_refused_and_harm_nothing
        }
    };
}
