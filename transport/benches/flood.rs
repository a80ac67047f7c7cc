//! Time to form a group over loopback with and without strangers that flood rank 0 with handshakes
//! that never end, in turns, as CSV: `carrier,round,flood,ranks,seconds,strangers_per_second`.
//!
//! The flood fills a line of 100 Mbit/s with datagrams, or opens 1000 streams a second.
//!
//! `cargo bench -p kyklos-transport --features quic --bench flood [-- --short]`
#![cfg(unix)]
#![expect(clippy::unwrap_used, reason = "a measurement that cannot continue has failed")]

#[path = "../tests/transport/common/mod.rs"]
mod common;

use std::time::{Duration, Instant};

use common::flood::Flood;
use common::*;
use kyklos_transport::quic::Carrier;

const RANKS: u32 = 4;

fn main() {
    let rounds = if std::env::args().any(|argument| argument == "--short") { 2 } else { 15 };
    println!("carrier,round,flood,ranks,seconds,strangers_per_second");
    for carrier in [Carrier::Udp, Carrier::Tcp] {
        let (mut quiet, mut flooded) = (Vec::new(), Vec::new());
        for round in 0..rounds {
            quiet.push(measure(carrier, round, false));
            flooded.push(measure(carrier, round, true));
        }
        let ratio = median(&mut flooded) / median(&mut quiet);
        println!(
            "# {carrier}: quiet {}, flooded {}, ratio of medians {ratio:.2}",
            spread(&quiet),
            spread(&flooded)
        );
    }
}

/// Forms a group that sends one message of 1 MiB between every two ranks. Returns the seconds until
/// it is formed.
fn measure(carrier: Carrier, round: u32, is_flooded: bool) -> f64 {
    let job = Job::new();
    let configs: Vec<_> = (0..RANKS).map(|rank| job.over(carrier, rank, RANKS)).collect();
    let mut ranks = configs.into_iter();
    // Rank 0 listens before the strangers come, and its places are taken before the others do.
    let zero = connect(ranks.next().unwrap());
    std::thread::sleep(Duration::from_millis(200));
    let flood = is_flooded.then(|| Flood::start(carrier, job.coordinator));
    while flood.as_ref().is_some_and(|flood| flood.sent() < BEFORE) {
        std::thread::sleep(Duration::from_millis(10));
    }
    let (started, sent) = (Instant::now(), flood.as_ref().map_or(0, Flood::sent));
    let group = formed(std::iter::once(zero).chain(ranks.map(connect)).collect());
    let seconds = started.elapsed().as_secs_f64();
    exchange(&group, 0);
    let rate = (flood.as_ref().map_or(0, Flood::sent) - sent) as f64 / started.elapsed().as_secs_f64();
    println!("{carrier},{round},{is_flooded},{RANKS},{seconds:.4},{rate:.0}");
    close(&group);
    if let Some(flood) = flood {
        flood.stop();
    }
    seconds
}

/// Datagrams or streams of strangers before the other ranks start.
const BEFORE: usize = 400;

fn median(seconds: &mut [f64]) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

/// Of sorted seconds.
fn spread(seconds: &[f64]) -> String {
    let ms = |seconds: f64| seconds * 1e3;
    let (least, most) = (ms(seconds[0]), ms(seconds[seconds.len() - 1]));
    format!("{:.0} ms ({least:.0} to {most:.0})", ms(seconds[seconds.len() / 2]))
}
