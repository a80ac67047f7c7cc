//! Throughput and latency of both transports in one process, as CSV:
//! `transport,bytes,ranks,repeats,seconds,mib_per_s_per_direction,us_per_exchange`.
//!
//! `cargo bench -p kyklos-transport --features quic --bench loopback [-- --short]`

use std::time::{Duration, Instant};

use bytes::Bytes;
use kyklos_transport::{Group, Rank, Tag, Transport, in_process_group, quic};
use pollster::block_on;

const LONG: Duration = Duration::from_secs(60);

fn main() {
    let short = std::env::args().any(|argument| argument == "--short");
    println!("transport,bytes,ranks,repeats,seconds,mib_per_s_per_direction,us_per_exchange");
    for size in [2, 4] {
        for (bytes, repeats) in [(64, 500), (4 << 10, 500), (64 << 10, 300), (1 << 20, 100), (16 << 20, 40)] {
            let repeats = if short { repeats / 10 } else { repeats };
            measure("in-process", &in_process_group(size), bytes, repeats);
            let group = quic::quic_loopback_group(size).expect("a group over loopback");
            measure("quic", &group, bytes, repeats);
        }
    }
}

/// Every rank has its own thread. It repeatedly sends to the next rank and receives from the
/// previous one.
fn measure(name: &str, group: &[Group], bytes: usize, repeats: u32) {
    let size = group.len() as u32;
    let slowest = std::thread::scope(|scope| {
        let ranks: Vec<_> = group.iter().map(|me| scope.spawn(move || ring(&**me, bytes, repeats))).collect();
        ranks.into_iter().filter_map(|rank| rank.join().ok()).max().unwrap_or_default()
    });
    let seconds = slowest.as_secs_f64();
    let mib_per_s = bytes as f64 * f64::from(repeats) / f64::from(1 << 20) / seconds;
    let us = seconds * 1e6 / f64::from(repeats);
    println!("{name},{bytes},{size},{repeats},{seconds:.4},{mib_per_s:.1},{us:.1}");
    let closing: Vec<_> = group.iter().map(|rank| rank.close(LONG)).collect();
    for closed in closing {
        block_on(closed).expect("close");
    }
}

fn ring(me: &dyn Transport, bytes: usize, repeats: u32) -> Duration {
    let (rank, size) = (me.rank().0, me.size());
    let payload = Bytes::from(vec![1; bytes]);
    let mut started = Instant::now();
    // The first exchanges warm up.
    let warm_up = repeats.div_ceil(10);
    for message in 0..warm_up + repeats {
        if message == warm_up {
            started = Instant::now();
        }
        let tag = Tag { op: u64::from(message), message };
        let received = me.post_recv(Rank((rank + size - 1) % size), tag, &[bytes], LONG);
        let sent = me.post_send(Rank((rank + 1) % size), tag, vec![payload.clone()], LONG);
        block_on(received).expect("receive");
        block_on(sent).expect("send");
    }
    started.elapsed()
}
