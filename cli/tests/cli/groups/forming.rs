//! Processes that are killed while the group forms, and their replacements.
#![cfg(target_os = "linux")]

use std::time::Duration;

use crate::groups::clusters::{ATTEND, BY_FLAGS, Cluster};
use crate::groups::launch::signal;
use crate::support::*;

/// Rank `victim` is killed while rank 2 has not started, and is started again.
fn the_group_forms_without(victim: u32) {
    let cluster = Cluster::new();
    cluster.certs("issue -n 3");
    let attend = format!("{ATTEND} {BY_FLAGS} --on-loss rejoin --join-deadline 60");
    let mut children: Vec<_> = (0..2).map(|rank| cluster.start(rank, &attend, "")).collect();
    // Long enough for rank 1 to connect; if it has not, the test passes too.
    std::thread::sleep(Duration::from_secs(2));
    signal("-KILL", children[victim as usize].id());
    children[victim as usize].wait().unwrap();
    children[victim as usize] = cluster.start(victim, &format!("{attend} --rejoin"), "");
    std::thread::sleep(Duration::from_secs(1));
    children.push(cluster.start(2, &attend, ""));
    let outputs: Vec<_> = children.into_iter().map(|child| finish(child, Duration::from_secs(180))).collect();
    outputs.iter().for_each(succeeds);
    let json = json(&outputs[0]);
    assert_eq!(json["ranks"], 3);
    assert!(json["max_abs_error"].as_f64().unwrap() <= json["tolerance"].as_f64().unwrap());
}

#[test]
fn a_killed_rank_comes_again_while_the_group_forms() {
    the_group_forms_without(1);
}

#[test]
fn rank_0_comes_again_while_the_group_forms() {
    the_group_forms_without(0);
}
