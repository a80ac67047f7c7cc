//! Worlds from earlier random runs in which the transport broke its contract.

use std::time::Duration;

use kyklos_transport::quic::LinkProfile;

use crate::simulation::judge::judge;
use crate::simulation::network::Conditions;
use crate::simulation::stage::{Played, Secret, play};
use crate::simulation::world::{Boundary, Fault, FaultKind, Operation, Phase, When, World};

fn plays_well(world: &World) -> Played {
    let played = play(world, &Secret::default());
    assert_eq!(judge(world, &played), (Vec::new(), false), "{world:#?}");
    played
}

/// A rank was aborted while a message that it had requested was in flight. It treated the message
/// as unrequested, and accused the sender of breaking the protocol.
#[test]
fn a_message_that_an_abort_overtakes_is_not_a_broken_protocol() {
    let world = World {
        seed: 984,
        ranks: 4,
        conditions: Conditions {
            latency: Duration::from_micros(738),
            jitter: Duration::from_micros(11),
            loss_per_mille: 0,
            reorder_per_mille: 0,
            duplicate_per_mille: 49,
            bytes_per_second: 1 << 30,
        },
        starts: [474, 57, 771, 1114].map(Duration::from_millis).to_vec(),
        operations: vec![Operation::Ring { bytes: 127_796 }, Operation::AllToAll { bytes: 166_871 }],
        fault: Some(Fault {
            kind: FaultKind::Abort { rank: 1 },
            when: When::Boundary(Boundary { op: 1, phase: Phase::Agreed }),
        }),
        mtu: None,
        lanes: 1,
        profile: LinkProfile::Lan,
    };
    assert!(plays_well(&world).struck.is_some());
}

/// The packets of a handshake were lost, so rank 0 ended the handshake. The rank treated that as a
/// refusal.
#[test]
fn a_handshake_that_rank_0_gave_up_is_tried_again() {
    let world = World {
        seed: 14,
        ranks: 3,
        conditions: Conditions {
            latency: Duration::from_micros(54_085),
            jitter: Duration::from_micros(37_943),
            loss_per_mille: 164,
            reorder_per_mille: 0,
            duplicate_per_mille: 4,
            bytes_per_second: 1 << 30,
        },
        starts: [1251, 254, 488].map(Duration::from_millis).to_vec(),
        operations: vec![Operation::Ring { bytes: 39_133 }, Operation::Ring { bytes: 132_622 }],
        fault: None,
        mtu: None,
        lanes: 1,
        profile: LinkProfile::Lan,
    };
    plays_well(&world);
}

/// A rank closed in order, but its last acknowledgement of a message was lost.
#[test]
fn the_last_messages_of_a_leaving_rank_arrive() {
    let world = World {
        seed: 1640,
        ranks: 3,
        conditions: Conditions {
            latency: Duration::from_micros(44_687),
            jitter: Duration::from_micros(39_010),
            loss_per_mille: 153,
            reorder_per_mille: 0,
            duplicate_per_mille: 4,
            bytes_per_second: 2 << 20,
        },
        starts: [1120, 580, 1479].map(Duration::from_millis).to_vec(),
        operations: vec![
            Operation::AllToAll { bytes: 192_482 },
            Operation::AllToAll { bytes: 199_645 },
            Operation::Ring { bytes: 156_456 },
        ],
        fault: Some(Fault {
            kind: FaultKind::Slow { rank: 2, by: Duration::from_millis(2663) },
            when: When::Boundary(Boundary { op: 2, phase: Phase::BeforeVote }),
        }),
        mtu: None,
        lanes: 1,
        profile: LinkProfile::Lan,
    };
    plays_well(&world);
}

/// Links with an MTU of 1500 do not carry packets of 8952 bytes. The ranks must switch to smaller
/// packets before any deadline ends.
#[test]
fn a_stated_mtu_that_is_wrong_costs_time_and_no_bytes() {
    let world = World {
        seed: 1,
        ranks: 3,
        conditions: Conditions {
            latency: Duration::from_millis(2),
            jitter: Duration::ZERO,
            loss_per_mille: 0,
            reorder_per_mille: 0,
            duplicate_per_mille: 0,
            bytes_per_second: 1 << 30,
        },
        starts: vec![Duration::ZERO; 3],
        operations: vec![Operation::Ring { bytes: 190_000 }, Operation::AllToAll { bytes: 90_000 }],
        fault: None,
        mtu: Some(9000),
        lanes: 1,
        profile: LinkProfile::Lan,
    };
    let right = plays_well(&World { mtu: Some(1500), ..world.clone() });
    let wrong = plays_well(&world);
    assert!(wrong.ended > right.ended, "{:?} and {:?}: the packets got through", wrong.ended, right.ended);
}
