//! How long a sender waited for a late receiver, and how long for the network.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kyklos_transport::quic::{QuicConfig, QuicTransport};
use kyklos_transport::{Group, Rank, Tag};
use tokio::time::{Instant, sleep};

use crate::simulation::identities::{JOB, identity};
use crate::simulation::network::{Conditions, Network, address};

const LATENCY: Duration = Duration::from_millis(10);

/// A megabyte takes a second.
const SLOW: Conditions = Conditions {
    latency: LATENCY,
    jitter: Duration::ZERO,
    loss_per_mille: 0,
    reorder_per_mille: 0,
    duplicate_per_mille: 0,
    bytes_per_second: 1_000_000,
};

const LARGE: usize = 1_000_000;
/// A message of this size leaves before the receiver requests it.
const SMALL: usize = 10_000;

const LONG: Duration = Duration::from_secs(60);

async fn rank(network: Arc<Network>, rank: u32, lanes: u8) -> Group {
    let mut config = QuicConfig::new(Rank(rank), 2, JOB, address(0), identity(rank));
    (config.bind, config.port) = (address(rank).ip(), address(rank).port());
    config.link.lanes = lanes;
    QuicTransport::form_over(config, network.sockets(rank, lanes), [rank as u8; 32]).await.unwrap()
}

/// Rank 0 sends a message. Rank 1 requests it this long after rank 0 has posted it, or before.
/// Returns how long rank 0 waited, and how much of that time the message was in flight.
async fn sent([zero, one]: &[Group; 2], message: u32, bytes: usize, late: Late) -> [Duration; 2] {
    let tag = Tag { op: 0, message };
    let ask = || one.post_recv(Rank(0), tag, &[bytes], LONG);
    let send = || (Instant::now(), zero.post_send(Rank(1), tag, vec![Bytes::from(vec![7; bytes])], LONG));
    let (posted, sent, received) = match late {
        Late::Receiver(by) => {
            let (posted, sent) = send();
            sleep(by).await;
            (posted, sent, ask())
        }
        Late::Sender(by) => {
            let received = ask();
            sleep(by).await;
            let (posted, sent) = send();
            (posted, sent, received)
        }
    };
    let under_way = sent.await.unwrap().under_way;
    let waited = posted.elapsed();
    received.await.unwrap();
    [waited, under_way]
}

#[derive(Clone, Copy, Debug)]
enum Late {
    Receiver(Duration),
    Sender(Duration),
}

#[test]
fn a_sender_knows_whether_its_receiver_was_late_or_the_network_slow() {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    for lanes in [1, 2] {
        runtime.block_on(async {
            let network = Network::new(1, 2, SLOW);
            let pump = tokio::spawn(Arc::clone(&network).run());
            let (zero, one) =
                tokio::join!(rank(Arc::clone(&network), 0, lanes), rank(Arc::clone(&network), 1, lanes));
            let group = [zero, one];
            let by = Duration::from_secs(3);

            let [waited, under_way] = sent(&group, 0, LARGE, Late::Sender(by)).await;
            assert_eq!(waited, under_way, "asked for long before");
            assert!(waited >= Duration::from_secs(1), "{waited:?}");

            for (message, bytes) in [(1, LARGE), (2, SMALL)] {
                let [waited, under_way] = sent(&group, message, bytes, Late::Receiver(by)).await;
                let unasked = waited - under_way;
                // The request itself needs some time to travel.
                assert!(unasked >= by + LATENCY && unasked < by + 3 * LATENCY, "{unasked:?} of {waited:?}");
                let network = Duration::from_secs(if bytes == LARGE { 1 } else { 0 });
                assert!(under_way >= network, "{under_way:?}");
            }
            let closing = group.map(|rank| rank.close(LONG));
            for closed in closing {
                closed.await.unwrap();
            }
            pump.abort();
        });
    }
}
