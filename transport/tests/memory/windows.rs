//! How much memory a member can make the other ranks hold: no more than each rank states in the
//! line that describes its network.

use std::time::Duration;

use crate::common::member::Member;
use crate::common::*;
use kyklos_transport::quic::{LinkSettings, QuicConfig};
use kyklos_transport::wire::{MessageHeader, part_digest};
use kyklos_transport::{Rank, Tag};
use quinn::{Connection, SendStream};
use tokio::sync::oneshot;
use tokio::time::timeout;

/// Ranks 0 and 1 are honest; rank 2 is hostile.
const WORLD: u32 = 3;

/// The memory limit for the connections of each honest rank.
const MEMORY_BYTES: usize = 96 << 20;

/// Opens every stream that the peer allows, each with its own first bytes. Writes to all of them
/// until the peer accepts no more bytes, or until it has accepted `wrong` bytes. Returns the open
/// streams and the number of accepted bytes.
async fn fill(
    connection: &Connection,
    begin: impl Fn(u32) -> Vec<u8>,
    wrong: usize,
) -> (Vec<SendStream>, usize) {
    const SOON: Duration = Duration::from_millis(200);
    let (mut streams, mut went) = (Vec::new(), 0);
    while let Ok(Ok(mut stream)) = timeout(SOON, connection.open_uni()).await {
        let bytes = begin(streams.len() as u32);
        if !matches!(timeout(SOON, stream.write_all(&bytes)).await, Ok(Ok(()))) {
            break;
        }
        streams.push(stream);
    }
    let junk = vec![7; 64 << 10];
    let (mut full, mut at) = (0, 0);
    while full < streams.len() && went < wrong {
        match timeout(SOON / 10, streams[at].write(&junk)).await {
            Ok(Ok(bytes)) => (went, full) = (went + bytes, 0),
            _ => full += 1,
        }
        at = (at + 1) % streams.len();
    }
    (streams, went)
}

/// The memory limit that a rank states for its connections.
fn promised(network: &str) -> usize {
    let (before, _) = network.split_once(" MiB in all").unwrap_or_else(|| panic!("{network}"));
    let number = before.rsplit(' ').next().unwrap();
    (number.parse::<f64>().unwrap_or_else(|_| panic!("{network}")) * f64::from(1 << 20)) as usize
}

#[test]
fn a_member_that_fills_all_streams_stays_within_the_stated_memory() {
    let _alone = alone();
    let job = Job::new();
    let link = LinkSettings { memory_bytes: Some(MEMORY_BYTES as u64), ..over_quic() };
    let honest = [0, 1].map(|rank| connect(QuicConfig { link, ..job.config(rank, WORLD) }));
    let (over, is_over) = oneshot::channel::<()>();
    let (begin, is_begun) = oneshot::channel::<()>();
    let (done, is_done) = std::sync::mpsc::channel();
    let hostile = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let member = Member::join(&job, WORLD).await;
            is_begun.await.unwrap();
            let [_, _, _, _, _, _, _, _, low @ ..] = job.id.0;
            let mut kept = Vec::new();
            let mut went = 0;
            for (to, line) in (0..).zip(&member.data) {
                // Messages small enough to leave unrequested. No rank ever requests them.
                let header = |message| MessageHeader {
                    job_low: u64::from_le_bytes(low),
                    epoch: 0,
                    from: Rank(2),
                    to: Rank(to),
                    tag: Tag { op: 1, message },
                    part_count: 1,
                    part_digest: part_digest([9].into_iter()),
                    total_bytes: 9,
                    chunk: 0,
                };
                let (streams, bytes) =
                    fill(&line.connection, |message| header(message).encode().to_vec(), 2 * MEMORY_BYTES)
                        .await;
                kept.push(streams);
                went += bytes;
            }
            done.send(went).unwrap();
            let _ = is_over.await;
            drop(kept);
        });
    });
    let group = formed(honest.into());
    let promised: Vec<usize> = group.iter().map(|rank| promised(&rank.network().unwrap())).collect();
    // By now the honest ranks have allocated all memory that they need for each other.
    exchange(&group, 2);
    let before = resident_kib();
    begin.send(()).unwrap();
    let went = is_done.recv().unwrap();
    let took = resident_kib().saturating_sub(before) as usize * 1024;
    println!("{went} bytes went, {took} are held, {promised:?} were promised");
    // The hostile rank is one of two peers of each honest rank, so it can take half of both limits.
    let most = promised.iter().sum::<usize>() / 2;
    assert!(went > most / 4, "{went} bytes: it was not let do its worst");
    assert!(went < most && took < most + (24 << 20), "{went} bytes went, {took} are held, of {most}");
    exchange(&group, 3);
    assert!(group.iter().all(|one| !one.recorder().is_aborted()));
    drop(over);
    drop(group);
    hostile.join().unwrap();
}
