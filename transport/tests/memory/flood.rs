//! A flood of handshakes that never end, while an honest group forms and works: it does, within its
//! budget of memory and descriptors.

use std::time::{Duration, Instant};

use crate::common::flood::Flood;
use crate::common::*;
use kyklos_transport::quic::{Carrier, LinkSettings, QuicConfig};

const WORLD: u32 = 4;

/// What strangers may make an idle group allocate.
///
/// Over UDP these strangers do not answer to Retry, so they get the 128 places for which no address
/// is proven, all of them at the first rank. Each is a connection of quinn: on loopback 64 KiB into
/// which its packets are written, and 34 KiB of state, most of it the table of its 256 streams (13
/// KiB), the connection itself (7 KiB) and TLS (7 KiB). Measured: 12.3 MiB.
///
/// Over TCP 256 streams hold 21 KiB each: 16 for what is read, and a task with its queue and its
/// timer. A stranger that sends and does not read has 80 KiB more, which these do not. Measured:
/// 5.3 MiB.
const PLACES_KIB: u64 = 128 * 98;
const STREAMS_KIB: u64 = 256 * 21;

/// Packets that are on their way, and tasks.
const BESIDE_KIB: u64 = 2 << 10;

/// The most that this process took, or had allocated.
#[derive(Clone, Copy, Debug, Default)]
struct Peak {
    allocated_kib: u64,
    resident_kib: u64,
    descriptors: usize,
}

impl Peak {
    fn look(&mut self, flood: Option<&Flood>) {
        let own = flood.map_or_else(descriptors, |flood| flood.descriptors_beside(descriptors));
        self.allocated_kib = self.allocated_kib.max(crate::ALLOCATOR.allocated() as u64 >> 10);
        self.resident_kib = self.resident_kib.max(resident_kib());
        self.descriptors = self.descriptors.max(own);
    }
}

/// Forms a group, lets it be idle for a while, and lets it work. Returns what was taken while it
/// was idle, and while it worked.
fn group_of(job: &Job, link: LinkSettings, flood: Option<&Flood>, idle: Duration) -> [Peak; 2] {
    let started = Instant::now();
    let ranks = (0..WORLD).map(|rank| connect(QuicConfig { link, ..job.config(rank, WORLD) })).collect();
    let group = formed(ranks);
    let took = started.elapsed();
    let mut peaks = [Peak::default(), Peak::default()];
    // After the buffers of its forming are free again.
    std::thread::sleep(SETTLED);
    while started.elapsed() < took + SETTLED + idle {
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

fn a_group_forms_and_works_in_a_flood(carrier: Carrier, line_mib: u64, strangers_kib: u64) {
    let _alone = alone();
    let link = LinkSettings { carrier, memory_bytes: Some(line_mib << 20), ..over_quic() };
    let job = Job::new();
    // The strangers need memory and descriptors of this process too.
    let flood = Flood::start(carrier, job.coordinator);
    while flood.sent() == 0 {
        std::thread::sleep(Duration::from_millis(10));
    }
    settle();
    let before = resident_kib();
    let [quiet, quiet_working] = group_of(&Job::new(), link, None, Duration::from_secs(1));
    let sent = flood.sent();
    // Longer than a stranger keeps a place.
    let [idle, working] = group_of(&job, link, Some(&flood), Duration::from_secs(8));
    let sent = flood.sent() - sent;
    flood.stop();
    let more = idle.allocated_kib.saturating_sub(quiet.allocated_kib);
    println!("{carrier}: {sent} datagrams or streams of strangers, which hold {more} KiB");
    assert!(sent > 500, "{sent}");
    assert!(more < strangers_kib + BESIDE_KIB, "{quiet:?}, then {idle:?}");
    // They do hold something: otherwise this measures nothing.
    assert!(more > strangers_kib / 2, "{quiet:?}, then {idle:?}");
    // Packets that the flood displaces are sent again, so that the ranks use more of what they print.
    let budget = u64::from(WORLD) * (line_mib << 10) + strangers_kib + BESIDE_KIB;
    assert!(working.resident_kib < before + budget, "{before} KiB, then {working:?}");
    for peak in [idle, working] {
        assert!(peak.descriptors < quiet_working.descriptors + MOST_DESCRIPTORS, "{quiet:?}, then {peak:?}");
    }
}

/// Waits until what the test before has left is freed: by tasks that end after it.
fn settle() {
    let end = Instant::now() + Duration::from_secs(20);
    let (mut least, mut since) = (crate::ALLOCATOR.allocated(), Instant::now());
    while since.elapsed() < Duration::from_secs(2) && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(50));
        let now = crate::ALLOCATOR.allocated();
        if now + (64 << 10) < least {
            (least, since) = (now, Instant::now());
        }
    }
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

const EXCHANGES: u64 = 40;

const SETTLED: Duration = Duration::from_secs(1);

/// Places of strangers, streams that are about to be closed, and for a moment those that are
/// accepted in their place.
const MOST_DESCRIPTORS: usize = 256 + 160;

#[test]
fn a_group_forms_and_works_in_a_flood_of_datagrams() {
    a_group_forms_and_works_in_a_flood(Carrier::Udp, 40, PLACES_KIB);
}

#[test]
fn a_group_forms_and_works_in_a_flood_of_streams() {
    a_group_forms_and_works_in_a_flood(Carrier::Tcp, 72, STREAMS_KIB);
}
