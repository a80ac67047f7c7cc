//! Many ranks in several data centres, 100 ms apart: they form a group, some die, and the survivors
//! form the next one.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kyklos_transport::quic::{LinkProfile, QuicConfig, QuicTransport};
use kyklos_transport::{Rank, Regroup, TransportError, Vote};
use tokio::sync::Barrier;
use tokio::time::{Instant, sleep, timeout};

use crate::amount::amount;
use crate::simulation::identities::{JOB, identity};
use crate::simulation::network::{Conditions, Network, address};

/// One way.
const LATENCY: Duration = Duration::from_millis(100);

const CONDITIONS: Conditions = Conditions {
    latency: LATENCY,
    jitter: Duration::from_millis(2),
    loss_per_mille: 0,
    reorder_per_mille: 0,
    duplicate_per_mille: 0,
    bytes_per_second: 1 << 30,
};

/// Deadline of every call.
const PATIENCE: Duration = Duration::from_secs(200);

/// From a death until every survivor knows of it: 15 s of silence, eight round trips, a heartbeat,
/// the news.
const KNOWN: Duration = Duration::from_secs(18);

/// From then on: survivors that may not have noticed are waited for during 30 s, then the group is
/// named and forms.
const FORMED_AGAIN: Duration = Duration::from_secs(40);

type Dials = BTreeMap<(u32, u32), usize>;

/// The life of a rank. Times since the start.
#[derive(Debug)]
struct Life {
    formed: Duration,
    /// When it knew that a rank is dead.
    known: Duration,
    again: Duration,
    members: Vec<Rank>,
}

struct Stage {
    ranks: u32,
    network: Arc<Network>,
    began: Instant,
    /// All ranks and the test: the group has formed.
    formed: Barrier,
}

async fn live(stage: Arc<Stage>, rank: u32) -> Result<Life, TransportError> {
    let mut config = QuicConfig::new(Rank(rank), stage.ranks, JOB, address(0), identity(rank));
    (config.bind, config.port) = (address(rank).ip(), address(rank).port());
    config.link.profile = LinkProfile::Wan;
    config.connect_deadline = Duration::from_secs(60);
    let formed = QuicTransport::form_over(config, stage.network.sockets(rank, 1), [rank as u8; 32]).await?;
    let at = stage.began.elapsed();
    formed.agree(Vote::ready([0; 32]), PATIENCE).await?;
    stage.formed.wait().await;
    // Ranks die now, so that this vote has no verdict.
    let error = formed.agree(Vote::ready([1; 32]), PATIENCE).await.unwrap_err();
    assert!(matches!(error, TransportError::Aborted { .. }), "rank {rank}: {error}");
    let known = stage.began.elapsed();
    let next = formed.reform(Regroup::Survivors, PATIENCE).await?;
    let again = stage.began.elapsed();
    next.transport.agree(Vote::ready([2; 32]), PATIENCE).await?;
    next.transport.close(PATIENCE).await?;
    Ok(Life { formed: at, known, again, members: next.members })
}

/// Returns the lives of the survivors, when the others died, and the dials before that and after
/// it.
async fn play(ranks: u32, dead: &[u32]) -> (Vec<Life>, Duration, [Dials; 2]) {
    let network = Network::new(1, ranks, CONDITIONS);
    let pump = tokio::spawn(Arc::clone(&network).run());
    let formed = Barrier::new(ranks as usize + 1);
    let stage = Arc::new(Stage { ranks, network, began: Instant::now(), formed });
    let lives: Vec<_> = (0..ranks).map(|rank| tokio::spawn(live(Arc::clone(&stage), rank))).collect();
    if timeout(PATIENCE, stage.formed.wait()).await.is_err() {
        for (rank, life) in lives.into_iter().enumerate() {
            if life.is_finished() {
                println!("rank {rank}: {:?}", life.await.unwrap());
            }
        }
        panic!("the group has not formed");
    }
    let before = stage.network.dials();
    let died = stage.began.elapsed();
    let mut surviving = Vec::new();
    for (rank, life) in (0..).zip(lives) {
        if dead.contains(&rank) {
            stage.network.crash(rank);
            life.abort();
        } else {
            surviving.push(life);
        }
    }
    let mut survivors = Vec::new();
    for life in surviving {
        survivors.push(life.await.unwrap().unwrap());
    }
    let mut after = stage.network.dials();
    for (pair, count) in &before {
        *after.get_mut(pair).unwrap() -= count;
    }
    sleep(Duration::from_secs(1)).await;
    pump.abort();
    (survivors, died, [before, after])
}

fn survivors_form_the_next_group(ranks: u32, dead: &[u32]) {
    let started = std::time::Instant::now();
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let (lives, died, [before, after]) = runtime.block_on(play(ranks, dead));
    let alive = |rank: &u32| !dead.contains(rank);
    let members: Vec<Rank> = (0..ranks).filter(alive).map(Rank).collect();
    let last = |of: fn(&Life) -> Duration| lives.iter().map(of).max().unwrap();
    let (formed, known, again) = (last(|life| life.formed), last(|life| life.known), last(|life| life.again));
    // Every rank dials rank 0 once for control, and every rank dials every lower one once for data.
    let count = |dials: &Dials, which: &dyn Fn(u32, u32) -> bool| -> usize {
        dials.iter().filter(|((from, to), _)| which(*from, *to)).map(|(_, count)| count).sum()
    };
    let all = ranks as usize;
    let (first, lived) =
        (count(&before, &|_, _| true), count(&after, &|from, to| alive(&from) && alive(&to)));
    let died_at = count(&after, &|_, to| !alive(&to));
    println!(
        "{ranks} ranks, {dead:?} die: formed after {formed:?} with {first} dials, the death known after {:?}, formed again \
         {:?} later with {lived} dials and {died_at} of the dead; in {:?}",
        known - died,
        again - known,
        started.elapsed()
    );
    for life in &lives {
        assert_eq!(life.members, members, "a healthy rank was lost");
    }
    assert_eq!(lives.len(), members.len());
    assert_eq!(first, all - 1 + all * (all - 1) / 2);
    assert!(known < died + KNOWN, "{:?}", known - died);
    assert!(again < known + FORMED_AGAIN, "{:?}", again - known);
    // Again in the same way, but every rank dials every lower one to find the lowest.
    let some = members.len();
    assert_eq!(lived, some * (some - 1));
    // Of dead ranks: higher survivors try each of them again after 10 s, until the group has formed.
    assert!(died_at <= 5 * dead.len() * some, "{died_at}");
}

#[test]
fn many_ranks_on_long_links_form_a_group_again_within_the_limits_and_dial_each_other_twice() {
    // 200 ranks take two minutes.
    let ranks = amount(40, 200) as u32;
    survivors_form_the_next_group(ranks, &[ranks / 4, ranks / 2, ranks - 1]);
    let ranks = ranks.min(72);
    survivors_form_the_next_group(ranks, &[0, ranks / 3, ranks / 2]);
}
