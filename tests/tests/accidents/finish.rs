//! Rings of processes. One process is killed, and the survivors finish over all keys.

use std::sync::Mutex;

use bytes::Bytes;
use kyklos::{Dtype, RankOutput, RankReport};
use kyklos_backend_suite::{Prepared, Whole};
use kyklos_transport::Rank;

use crate::amount::amount;
use crate::at_every_step;
use crate::processes::{End, Group};
use crate::rank::Link;
use crate::work::Work;

const RINGS: [Work; 2] = [Work { ulysses: 1, ring: 3, seed: 4 }, Work { ulysses: 1, ring: 4, seed: 5 }];

#[test]
fn a_ring_whose_rank_is_killed_at_any_step_is_finished_or_names_the_lost_keys() {
    let ends = Mutex::new([0, 0]);
    at_every_step(&RINGS, |group, work, victim, step| {
        group.order_to(work, Some((victim, step)), true, Link::Lan);
        group.ranks[victim as usize].is_here().expect("the rank pauses at the step");
        group.ranks[victim as usize].kill();
        let survivors: Vec<u32> = (0..work.ranks()).filter(|rank| *rank != victim).collect();
        let ended: Vec<End> = survivors.iter().map(|rank| group.ranks[*rank as usize].end()).collect();
        let who = format!("{work:?} without rank {victim} from step {step}");
        if ended.iter().all(|end| *end == End::Done) {
            rows_are_right(group, work, &survivors, &who);
        } else {
            for end in &ended {
                let End::Failed { text, .. } = end else { panic!("{who}: {ended:?}") };
                assert!(text.contains(&format!("of rank {victim} are lost")), "{who}: {text}");
            }
        }
        let finished = ended.contains(&End::Done);
        ends.lock().unwrap()[usize::from(finished)] += 1;
        // When the victim has done its second exchange, its neighbour has done the first one and holds the
        // victim's keys.
        assert!(finished || step <= 5, "{who}: {ended:?}");
        group.restart(victim);
    });
    let [refused, finished] = ends.into_inner().unwrap();
    println!("{finished} finished, {refused} refused");
    assert!(finished >= amount(3, 12) && refused >= 1, "{finished} finished, {refused} refused");
}

/// The rows of the survivors, against the oracle.
fn rows_are_right(group: &Group, work: Work, survivors: &[u32], who: &str) {
    let (world, mut prepared) = (work.world(), Prepared::new(work.case(), Dtype::F32));
    let mut whole = Whole::new(&world);
    let row_bytes = (world.problem.q_heads * world.problem.head_dim * 4) as usize;
    let mut rows = Vec::new();
    for &rank in survivors {
        let tokens = world.q_placement.of_rank(Rank(rank));
        let mut o = Bytes::from(group.result(rank));
        let lse = o.split_off(tokens.len() * row_bytes);
        let output = RankOutput { o, lse, report: RankReport::default(), spans: Vec::new() };
        whole.add(&world, rank as usize, &output);
        rows.extend(tokens.iter().map(|token| token as usize));
    }
    prepared.expected.retain(|row| rows.contains(&row.id.row));
    prepared.judge(&whole, who).assert_within(&prepared.dense_limit());
}
