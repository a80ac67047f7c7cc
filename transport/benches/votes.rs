//! Cost of an agreement in one process, by the size of the notes, as CSV:
//! `transport,ranks,note_bytes,repeats,seconds,us_per_vote`.
//!
//! `cargo bench -p kyklos-transport --features quic --bench votes [-- --short]`

use std::time::{Duration, Instant};

use bytes::Bytes;
use kyklos_transport::{Group, MAX_NOTE_BYTES, Transport, Vote, in_process_group, quic};
use pollster::block_on;

const LONG: Duration = Duration::from_secs(60);

fn main() {
    let short = std::env::args().any(|argument| argument == "--short");
    let (rounds, repeats) = if short { (1, 200) } else { (5, 2000) };
    println!("transport,ranks,note_bytes,repeats,seconds,us_per_vote");
    for size in [2, 8] {
        let groups = [
            ("in-process", in_process_group(size)),
            ("quic", quic::quic_loopback_group(size).expect("a group over loopback")),
        ];
        // In turns, so that a busy moment of the machine does not meet one size only.
        for _ in 0..rounds {
            for (name, group) in &groups {
                for note_bytes in [0, 128, MAX_NOTE_BYTES] {
                    measure(name, group, note_bytes, repeats);
                }
            }
        }
        for (_, group) in &groups {
            let closing: Vec<_> = group.iter().map(|rank| rank.close(LONG)).collect();
            closing.into_iter().for_each(|closed| block_on(closed).expect("close"));
        }
    }
}

/// Every rank has its own thread, and votes again when it has the notes of all ranks.
fn measure(name: &str, group: &[Group], note_bytes: usize, repeats: u32) {
    let slowest = std::thread::scope(|scope| {
        let ranks: Vec<_> =
            group.iter().map(|me| scope.spawn(move || votes(&**me, note_bytes, repeats))).collect();
        ranks.into_iter().filter_map(|rank| rank.join().ok()).max().unwrap_or_default()
    });
    let (seconds, size) = (slowest.as_secs_f64(), group.len());
    let us = seconds * 1e6 / f64::from(repeats);
    println!("{name},{size},{note_bytes},{repeats},{seconds:.4},{us:.1}");
}

fn votes(me: &dyn Transport, note_bytes: usize, repeats: u32) -> Duration {
    let note = Bytes::from(vec![7; note_bytes]);
    let mut started = Instant::now();
    // The first votes warm up.
    let warm_up = repeats.div_ceil(10);
    for round in 0..warm_up + repeats {
        if round == warm_up {
            started = Instant::now();
        }
        let vote = Vote::Ready { plan_hash: [1; 32], note: note.clone() };
        let notes = block_on(me.agree(vote, LONG)).expect("an agreement");
        assert!(notes.iter().all(|note| note.len() == note_bytes));
    }
    started.elapsed()
}
