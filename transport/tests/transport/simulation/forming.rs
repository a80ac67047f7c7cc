//! Ranks are lost while the first group forms: the others, and the ranks that take their places,
//! form a group all the same.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use kyklos_transport::quic::{Awaited, QuicConfig, QuicTransport};
use kyklos_transport::{Group, Rank, TransportError};

use crate::amount::amount;
use crate::simulation::again::{End, Life, Played, Strike, World, judge, play};
use crate::simulation::identities::{JOB, identity};
use crate::simulation::network::{Conditions, Network, address};
use crate::simulation::rng::Rng;

/// A world of the seed's conditions in which `strikes` happen while the group forms.
fn world(seed: u64, ranks: u32, strikes: Vec<(Duration, Strike)>, starts: Vec<Duration>) -> World {
    let drawn = World::draw(seed);
    World { ranks, everyone: true, strikes, starts, lanes: 1, ..drawn }
}

fn millis(number: u64) -> Duration {
    Duration::from_millis(number)
}

fn crash(at: u64, rank: u32, restarts: Option<u64>) -> (Duration, Strike) {
    (millis(at), Strike::Crash { rank, restarts: restarts.map(millis) })
}

/// The last lives of all ranks that are not lost for good.
fn survivors(played: &Played) -> Vec<&Life> {
    let is_last = |life: &&Life| {
        let again = played.lives.iter().any(|other| other.rank == life.rank && other.life > life.life);
        !again && (life.life > 0 || !played.crashed.contains_key(&life.rank))
    };
    played.lives.iter().filter(is_last).collect()
}

/// All ranks that are not lost for good finish in one group of `members` ranks. Returns the epoch
/// of that group.
fn finish_together(world: &World, members: u32) -> u32 {
    let played = play(world);
    let case = format!("{world:#?}: {:#?}", played.lives);
    assert_eq!(judge(world, &played), Vec::<String>::new(), "{case}");
    let mut epochs = Vec::new();
    for life in survivors(&played) {
        assert!(matches!(life.end, End::Finished), "rank {}: {case}", life.rank);
        let last = life.stays.last().unwrap();
        assert_eq!(last.members.len() as u32, members, "{case}");
        epochs.push(last.epoch);
    }
    assert!(epochs.len() as u32 == members && epochs.iter().all(|&epoch| epoch == epochs[0]), "{case}");
    epochs[0]
}

/// Rank 3 starts 10 s after the others, so that the group cannot form before.
fn late() -> Vec<Duration> {
    vec![millis(0), millis(0), millis(0), millis(10_000)]
}

#[test]
fn a_rank_that_is_killed_before_all_have_come_may_come_again() {
    for restart in [100, 3000, 8000] {
        let world = world(1, 4, vec![crash(1500, 1, Some(restart))], late());
        // It is the first group: the others have noticed nothing.
        assert_eq!(finish_together(&world, 4), 0);
    }
}

#[test]
fn a_rank_that_was_lost_before_the_last_one_comes_is_waited_for_as_after_the_start() {
    let world = world(2, 4, vec![crash(1500, 2, Some(12_000))], late());
    assert_eq!(finish_together(&world, 4), 1);
}

#[test]
fn a_rank_that_does_not_come_again_is_left_out() {
    let rejoin = world(3, 4, vec![crash(1500, 2, None)], late());
    assert_eq!(finish_together(&rejoin, 3), 1);
    let shrink = World { everyone: false, ..rejoin };
    assert_eq!(finish_together(&shrink, 3), 1);
}

#[test]
fn rank_0_that_is_killed_while_the_group_forms_may_come_again() {
    for restart in [100, 3000] {
        let world = world(4, 3, vec![crash(1500, 0, Some(restart))], vec![millis(0), millis(0), millis(900)]);
        finish_together(&world, 3);
    }
}

#[test]
fn whenever_a_rank_is_killed_the_job_finishes() {
    // With seed 149 a rank is lost while another one waits for its connection, after rank 0 has its
    // own.
    for seed in (0..amount(40, 400)).chain([149]) {
        let mut rng = Rng::new(seed, 9);
        let ranks = rng.within(2..5) as u32;
        let rank = rng.within(0..u64::from(ranks)) as u32;
        let starts: Vec<Duration> = (0..ranks).map(|_| rng.millis(0..1500)).collect();
        let mut at = rng.within(0..3000);
        // A process that has not started cannot be killed.
        at = at.max(starts[rank as usize].as_millis() as u64 + 1);
        let world = world(seed, ranks, vec![crash(at, rank, Some(rng.within(50..9000)))], starts);
        finish_together(&world, ranks);
    }
}

/// By rank, what it has said that it waits for.
static SAID: [Mutex<Vec<String>>; 2] = [const { Mutex::new(Vec::new()) }; 2];

fn says<const RANK: usize>(awaited: Awaited<'_>) {
    let words = match awaited {
        Awaited::Ranks(ranks) => {
            ranks.iter().map(|rank| format!("rank {rank}")).collect::<Vec<_>>().join(" ")
        }
        Awaited::OthersOf(rank) => format!("others of {rank}"),
        Awaited::NextGroup => "the next group".to_owned(),
        Awaited::Nothing => "nothing".to_owned(),
    };
    SAID[RANK].lock().unwrap().push(words);
}

/// What `rank` has said since the last call, without repetitions.
fn said(rank: usize) -> Vec<String> {
    let mut said = std::mem::take(&mut *SAID[rank].lock().unwrap());
    said.dedup();
    said
}

async fn member(network: &Arc<Network>, rank: u32, waits: fn(Awaited<'_>)) -> Result<Group, TransportError> {
    let mut config = QuicConfig::new(Rank(rank), 2, JOB, address(0), identity(rank));
    (config.bind, config.port) = (address(rank).ip(), address(rank).port());
    config.waits = waits;
    QuicTransport::form_over(config, network.sockets(rank, 1), [rank as u8; 32]).await
}

#[test]
fn a_rank_says_what_it_waits_for_and_that_the_group_has_formed_only_if_it_has() {
    let conditions = Conditions {
        latency: millis(10),
        jitter: Duration::ZERO,
        loss_per_mille: 0,
        reorder_per_mille: 0,
        duplicate_per_mille: 0,
        bytes_per_second: 1 << 30,
    };
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    runtime.block_on(async {
        let network = Network::new(1, 2, conditions);
        let pump = tokio::spawn(Arc::clone(&network).run());
        let (zero, one) = tokio::join!(member(&network, 0, says::<0>), member(&network, 1, says::<1>));
        assert_eq!(said(0), ["rank 1", "others of 0", "nothing"]);
        assert_eq!(said(1), ["rank 0", "others of 0", "nothing"]);
        for closed in [zero, one].map(|rank| rank.unwrap().close(Duration::from_secs(60))) {
            closed.await.unwrap();
        }
        pump.abort();

        type Waits = fn(Awaited<'_>);
        let alone = [(0, says::<0> as Waits, "rank 1"), (1, says::<1> as Waits, "rank 0")];
        for (rank, waits, missing) in alone {
            let network = Network::new(1, 2, conditions);
            let pump = tokio::spawn(Arc::clone(&network).run());
            assert!(member(&network, rank, waits).await.is_err());
            assert_eq!(said(rank as usize), [missing], "the other one does not come");
            pump.abort();
        }
    });
}
