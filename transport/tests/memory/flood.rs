//! A flood of handshakes that never end, while an honest group forms and works: it does, within its budget of memory and
//! descriptors.

use std::time::{Duration, Instant};

use crate::common::flood::Flood;
use crate::common::*;
use kyklos_transport::quic::{Carrier, LinkSettings, QuicConfig};

const WORLD: u32 = 4;

/// What strangers may make an idle group hold: over UDP 128 places of 60 KiB, since these strangers do not answer to Retry; over
/// TCP 256 of 96 KiB. The rest is what the allocator keeps.
const STRANGERS_KIB: u64 = 64 << 10;

/// The most that this process took.
#[derive(Debug, Default)]
struct Peak {
    resident_kib: u64,
    descriptors: usize,
}

impl Peak {
    fn look(&mut self, flood: Option<&Flood>) {
        let own = descriptors().saturating_sub(flood.map_or(0, Flood::sockets));
        self.resident_kib = self.resident_kib.max(resident_kib());
        self.descriptors = self.descriptors.max(own);
    }
}

/// Forms a group, lets it be idle for a while, and lets it work. Returns what was taken while it was idle, and while it worked.
fn group_of(job: &Job, link: LinkSettings, flood: Option<&Flood>, idle: Duration) -> [Peak; 2] {
    let started = Instant::now();
    let ranks = (0..WORLD).map(|rank| connect(QuicConfig { link, ..job.config(rank, WORLD) })).collect();
    let group = formed(ranks);
    let took = started.elapsed();
    let mut peaks = [Peak::default(), Peak::default()];
    while started.elapsed() < took + idle {
        std::thread::sleep(Duration::from_millis(50));
        peaks[0].look(flood);
    }
    for op in 0..EXCHANGES {
        exchange(&group, op);
        peaks[1].look(flood);
    }
    close(&group);
    println!("{}: formed in {took:?}, then {peaks:?}", link.carrier);
    peaks
}

fn a_group_forms_and_works_in_a_flood(carrier: Carrier, line_mib: u64) {
    let _alone = alone();
    let link = LinkSettings { carrier, memory_bytes: Some(line_mib << 20), ..LinkSettings::default() };
    let job = Job::new();
    // The strangers need memory and descriptors of this process too.
    let flood = Flood::start(carrier, job.coordinator);
    while flood.sent() == 0 {
        std::thread::sleep(Duration::from_millis(10));
    }
    let before = resident_kib();
    let [_, quiet] = group_of(&Job::new(), link, None, Duration::from_secs(1));
    let sent = flood.sent();
    // Longer than a stranger keeps a place.
    let [idle, working] = group_of(&job, link, Some(&flood), Duration::from_secs(8));
    let sent = flood.sent() - sent;
    flood.stop();
    println!("{carrier}: {sent} datagrams or streams of strangers");
    assert!(sent > 500, "{sent}");
    assert!(idle.resident_kib < quiet.resident_kib + STRANGERS_KIB, "{quiet:?}, then {idle:?}");
    // Packets that the flood displaces are sent again, so that the ranks use more of what they print.
    let budget = u64::from(WORLD) * (line_mib << 10) + STRANGERS_KIB;
    assert!(working.resident_kib < before + budget, "{before} KiB, then {working:?}");
    for peak in [idle, working] {
        assert!(peak.descriptors < quiet.descriptors + MOST_DESCRIPTORS, "{quiet:?}, then {peak:?}");
    }
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

const EXCHANGES: u64 = 40;

/// Places of strangers, and streams that are about to be closed.
const MOST_DESCRIPTORS: usize = 256 + 128;

#[test]
fn a_group_forms_and_works_in_a_flood_of_datagrams() {
    a_group_forms_and_works_in_a_flood(Carrier::Udp, 40);
}

#[test]
fn a_group_forms_and_works_in_a_flood_of_streams() {
    a_group_forms_and_works_in_a_flood(Carrier::Tcp, 72);
}
