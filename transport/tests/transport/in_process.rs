//! The in-process transport keeps the contract.

use std::time::{Duration, Instant};

use kyklos_transport::{Posted, Vote, in_process_group};

conformance_tests!(in_process_group);

/// With work that grows with the fourth power of the ranks, as it once did, this takes minutes.
#[test]
fn a_vote_of_many_ranks_takes_little() {
    let patience = Duration::from_secs(60);
    let group = in_process_group(600);
    let started = Instant::now();
    for round in 0..3 {
        let votes: Vec<Posted<_>> =
            group.iter().map(|rank| rank.agree(Vote::ready([round; 32]), patience)).collect();
        for notes in votes {
            assert_eq!(pollster::block_on(notes).unwrap().len(), 600);
        }
    }
    let took = started.elapsed();
    assert!(took < Duration::from_secs(10), "{took:?}");
}
