//! Aborts, deaths, deadlines and closing.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kyklos_transport::{Abort, AbortCause, Progress, Rank, TransportError};
use pollster::block_on;

use super::{LONG, Ranks, SOON, abort_of, payload, ready, tag};

pub(crate) fn an_abort_ends_everything_everywhere_and_names_one_culprit(make: fn(u32) -> Ranks) {
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
    // These aborts are too late: the first one counts. An abort is also idempotent.
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
    assert!(started.elapsed() < SOON, "{:?}", started.elapsed());
    for one in seen {
        assert_eq!(one, abort(2, "out of memory"));
    }
    assert!(flags.iter().all(|flag| flag.load(Ordering::Acquire)));
}

/// Messages from rank 0 to rank 1. Some are in flight when `end` ends the group, and one is never
/// sent. Returns the errors of the unfinished calls; all are the same abort.
fn ends_in_flight(mut group: Ranks, end: impl FnOnce(&mut Ranks)) -> Abort {
    const BYTES: usize = 8 << 20;
    let receive = |message| group[1].post_recv(Rank(0), tag(1, message), &[BYTES], LONG);
    let mut receives: Vec<_> = (0..9).map(receive).collect();
    let send = |message| group[0].post_send(Rank(1), tag(1, message), vec![payload(BYTES, 1)], LONG);
    let sends: Vec<_> = (0..8).map(send).collect();
    let never = receives.pop().unwrap();
    let mut receives = receives.into_iter();
    assert!(block_on(receives.next().unwrap()).unwrap() == [payload(BYTES, 1)]);
    end(&mut group);
    let abort = abort_of(block_on(never).unwrap_err());
    for received in receives {
        match block_on(received) {
            Ok(parts) => assert!(parts == [payload(BYTES, 1)]),
            Err(error) => assert_eq!(abort_of(error), abort),
        }
    }
    for sent in sends {
        if let Err(error) = block_on(sent) {
            assert_eq!(abort_of(error).culprit, abort.culprit);
        }
    }
    abort
}

pub(crate) fn an_abort_of_a_third_rank_ends_messages_in_flight(make: fn(u32) -> Ranks) {
    let third = Abort {
        culprit: Rank(2),
        cause: AbortCause::Failed("out of memory".into()),
        progress: Progress { op: 1, step: 9 },
    };
    assert_eq!(ends_in_flight(make(3), |group| group[2].abort(third.clone())), third);
}

pub(crate) fn a_sender_that_is_dropped_ends_messages_in_flight(make: fn(u32) -> Ranks) {
    let abort = ends_in_flight(make(3), |group| drop(group.remove(0)));
    assert_eq!(abort.culprit, Rank(0));
    assert!(matches!(abort.cause, AbortCause::Died(_)), "{abort}");
}

pub(crate) fn a_dropped_rank_has_died(make: fn(u32) -> Ranks) {
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
        assert!(started.elapsed() < SOON, "{:?}", started.elapsed());
    }
}

pub(crate) fn a_deadline_ends_a_call_and_says_how_far_it_got(make: fn(u32) -> Ranks) {
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
    assert!(started.elapsed() >= short && started.elapsed() < SOON, "{:?}", started.elapsed());
    // The group still works.
    let received = group[1].post_recv(Rank(0), tag(2, 0), &[3], LONG);
    block_on(group[0].post_send(Rank(1), tag(2, 0), vec![payload(3, 3)], LONG)).unwrap();
    assert!(block_on(received).unwrap() == [payload(3, 3)]);
}

pub(crate) fn a_deadline_that_a_rank_reports_as_an_abort_ends_the_group(make: fn(u32) -> Ranks) {
    let group = make(3);
    let flags: Vec<_> = group.iter().map(|rank| rank.stop_flag()).collect();
    let receive = group[0].post_recv(Rank(1), tag(0, 0), &[10], LONG);
    let send = group[1].post_send(Rank(0), tag(0, 1), vec![payload(1 << 20, 0)], LONG);
    let vote = group[2].agree(ready(0), LONG);
    let late = group[1].post_recv(Rank(2), tag(0, 2), &[10], Duration::from_millis(200));
    let error = block_on(late).unwrap_err();
    let TransportError::Deadline { pending, .. } = &error else { panic!("{error:?}") };
    assert!(
        flags.iter().all(|flag| !flag.load(Ordering::Acquire)),
        "a deadline alone ends its own call only"
    );
    // As an executor does: the abort names the rank for which this rank waited.
    let cause = AbortCause::Failed(error.to_string());
    let abort = Abort { culprit: pending.peer, cause, progress: Progress { op: 0, step: 4 } };
    group[1].abort(abort.clone());
    // The others learn who says so: rank 2 may be well.
    let abort = Abort { cause: AbortCause::Failed(format!("rank 1 says: {error}")), ..abort };
    assert_eq!(abort_of(block_on(receive).unwrap_err()), abort);
    assert_eq!(abort_of(block_on(send).unwrap_err()), abort);
    assert_eq!(abort_of(block_on(vote).unwrap_err()), abort);
    assert_eq!(abort.culprit, Rank(2));
    assert!(flags.iter().all(|flag| flag.load(Ordering::Acquire)));
    for rank in &group {
        assert_eq!(abort_of(block_on(rank.agree(ready(1), LONG)).unwrap_err()), abort);
    }
}

pub(crate) fn ranks_that_finish_early_may_leave(make: fn(u32) -> Ranks) {
    let mut group = make(3);
    // Rank 1 leaves first, permanently. Rank 0 leaves next. Rank 2 needs nothing more from either.
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

pub(crate) fn close_waits_until_the_receiver_has_what_was_sent(make: fn(u32) -> Ranks) {
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

pub(crate) fn a_rank_that_leaves_while_it_is_needed_is_an_error(make: fn(u32) -> Ranks) {
    for (leaver, other) in [(1, 0), (0, 1)] {
        let group = make(3);
        let progress = Progress { op: 6, step: 3 };
        group[leaver as usize].report_progress(progress);
        let needed = group[2].post_recv(Rank(leaver), tag(0, 7), &[10], LONG);
        // Long enough for a heartbeat to carry the progress.
        std::thread::sleep(Duration::from_millis(700));
        let _leaving = group[leaver as usize].close(LONG);
        let abort = abort_of(block_on(needed).unwrap_err());
        assert_eq!((abort.culprit, abort.progress), (Rank(leaver), progress), "{abort}");
        let AbortCause::Failed(text) = &abort.cause else { panic!("{abort}") };
        assert!(text.contains("left") && text.contains("rank 2") && text.contains("message 7"), "{text}");
        let later = group[other].post_recv(Rank(2), tag(0, 8), &[10], LONG);
        assert_eq!(abort_of(block_on(later).unwrap_err()).culprit, Rank(leaver));
    }
}

pub(crate) fn a_rank_whose_close_timed_out_has_left(make: fn(u32) -> Ranks) {
    let group = make(3);
    let needed = group[2].post_recv(Rank(1), tag(0, 7), &[10], LONG);
    // No rank receives this message, so rank 1 cannot close in order.
    let untaken = group[1].post_send(Rank(0), tag(0, 8), vec![payload(1 << 20, 0)], LONG);
    let error = block_on(group[1].close(Duration::from_millis(200))).unwrap_err();
    let TransportError::Deadline { pending, .. } = &error else { panic!("{error:?}") };
    assert_eq!((pending.operation, pending.peer, pending.tag), ("close", Rank(0), tag(0, 8)));
    let abort = abort_of(block_on(needed).unwrap_err());
    assert_eq!(abort.culprit, Rank(1));
    assert!(abort.to_string().contains("left"), "{abort}");
    block_on(untaken).unwrap_err();
}
