//! What a vote takes, by the number of ranks: one round trip, and packets for the notes alone.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kyklos_transport::quic::{QuicConfig, QuicTransport};
use kyklos_transport::{Rank, TransportError, Vote};
use tokio::sync::Barrier;
use tokio::time::Instant;

use crate::amount::amount;
use crate::simulation::identities::{JOB, identity};
use crate::simulation::network::{Conditions, Network, address};

/// One way.
const LATENCY: Duration = Duration::from_millis(5);

const CONDITIONS: Conditions = Conditions {
    latency: LATENCY,
    jitter: Duration::ZERO,
    loss_per_mille: 0,
    reorder_per_mille: 0,
    duplicate_per_mille: 0,
    bytes_per_second: 1 << 30,
};

/// Of every call.
const PATIENCE: Duration = Duration::from_secs(60);
/// As the facts of an attention call.
const NOTE_BYTES: usize = 128;
const ROUNDS: u32 = 8;

/// A vote of a group.
struct Cost {
    ranks: u32,
    /// From the first ballot to the last notes, in simulated time.
    took: Duration,
    packets: u64,
}

struct Stage {
    ranks: u32,
    network: Arc<Network>,
    /// All ranks and the test: the group has formed; the votes are over.
    formed: Barrier,
    over: Barrier,
}

async fn live(stage: Arc<Stage>, rank: u32) -> Result<Duration, TransportError> {
    let mut config = QuicConfig::new(Rank(rank), stage.ranks, JOB, address(0), identity(rank));
    (config.bind, config.port) = (address(rank).ip(), address(rank).port());
    config.connect_deadline = PATIENCE;
    let group = QuicTransport::form_over(config, stage.network.sockets(rank, 1), [rank as u8; 32]).await?;
    let vote = || Vote::Ready { plan_hash: [1; 32], note: Bytes::from(vec![rank as u8; NOTE_BYTES]) };
    group.agree(vote(), PATIENCE).await?;
    stage.formed.wait().await;
    let began = Instant::now();
    for _ in 0..ROUNDS {
        let notes = group.agree(vote(), PATIENCE).await?;
        assert!(notes.iter().zip(0_u32..).all(|(note, of)| note[..] == [of as u8; NOTE_BYTES]));
        assert_eq!(notes.len(), stage.ranks as usize);
    }
    let took = began.elapsed();
    stage.over.wait().await;
    group.close(PATIENCE).await?;
    Ok(took)
}

async fn play(ranks: u32) -> Cost {
    let network = Network::new(1, ranks, CONDITIONS);
    let pump = tokio::spawn(Arc::clone(&network).run());
    let all = ranks as usize + 1;
    let stage = Arc::new(Stage { ranks, network, formed: Barrier::new(all), over: Barrier::new(all) });
    let lives: Vec<_> = (0..ranks).map(|rank| tokio::spawn(live(Arc::clone(&stage), rank))).collect();
    stage.formed.wait().await;
    let before = stage.network.trace().packets;
    stage.over.wait().await;
    let packets = stage.network.trace().packets - before;
    let mut took = Duration::ZERO;
    for life in lives {
        took = took.max(life.await.unwrap().unwrap());
    }
    pump.abort();
    Cost { ranks, took: took / ROUNDS, packets: packets / u64::from(ROUNDS) }
}

#[test]
fn a_vote_takes_one_round_trip_whatever_the_number_of_ranks() {
    let most = amount(64, 192) as u32;
    let sizes = [8, 16, 32, 64, 128, 192];
    for ranks in sizes.into_iter().filter(|ranks| *ranks <= most) {
        let started = std::time::Instant::now();
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        let Cost { ranks, took, packets } = runtime.block_on(play(ranks));
        println!("{ranks} ranks: {took:?} and {packets} packets a vote; played in {:?}", started.elapsed());
        // The last ballot reaches rank 0, which sends all notes to all ranks.
        let notes = u64::from(ranks) * NOTE_BYTES as u64;
        assert!(took < 2 * LATENCY + LATENCY, "{ranks} ranks: {took:?}");
        // For each rank a ballot, the notes of all ranks, and acknowledgements; heartbeats are rare. The
        // notes alone grow with the number of ranks: a packet has 1200 bytes of them, and is not
        // always full.
        let each = 6 + 4 * notes / 1000;
        assert!(packets <= u64::from(ranks) * each, "{ranks} ranks: {packets} packets, {each} for each rank");
    }
}
