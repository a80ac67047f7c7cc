//! Cost of an event of the flight recorder, as CSV: `threads,events,ns_per_event`.
//!
//! `cargo bench -p kyklos-transport --bench recorder`

use std::time::Instant;

use kyklos_transport::{EventKind, Rank, Recorder, Tag};

fn main() {
    println!("threads,events,ns_per_event");
    for threads in [1, 2, 2, 1] {
        let recorder = Recorder::new(Rank(0), 2, "bench".to_owned());
        let events = 2_000_000_u32;
        let start = Instant::now();
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    for message in 0..events {
                        let tag = Tag { op: 1, message };
                        recorder.note(EventKind::Sent, Rank(1), std::hint::black_box(tag), 4096);
                    }
                });
            }
        });
        let ns = start.elapsed().as_secs_f64() * 1e9 / f64::from(events);
        println!("{threads},{events},{ns:.1}");
    }
}
