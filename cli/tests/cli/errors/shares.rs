//! Refusals of shares by speed, for callers of the library.

use kyklos::backend::Device;
use kyklos::local::on_threads;
use kyklos::simulate::{Candidate, Capacity, Shares};
use kyklos::{
    Attention, AttentionProblem, Dtype, Error, Execution, Mask, Mesh, PlacementKind, Session, Strategy,
    Tensor,
};
use kyklos_transport::in_process_group;

use super::Entry;
use super::library::entry;

fn problem(tokens: u32) -> AttentionProblem {
    AttentionProblem::new([1, tokens, 2, 2, 8], Dtype::F32, Mask::full()).unwrap()
}

/// The error of rank 0 of two, where rank 1 shares `tokens` tokens, maybe with a new session, and rank 0 shares 8.
fn of_two(tokens: u32, new_session: bool) -> Error {
    let errors = on_threads(in_process_group(2), |transport| {
        let is_other = transport.rank().0 == 1;
        let mut session = Session::new(transport.clone(), Device::cpu());
        let x = Tensor::new([1, 4, 2, 8], vec![0.0_f32; 64]).unwrap();
        session.attend(&Attention::new(), &x, &x, &x).unwrap();
        if is_other && new_session {
            session = Session::new(transport, Device::cpu());
        }
        session.share(&problem(if is_other { tokens } else { 8 }), &Execution::new()).unwrap_err()
    });
    errors.into_iter().next().unwrap()
}

pub(super) fn refusals() -> Vec<Entry> {
    let ring = Candidate {
        strategy: Strategy::Ring,
        mesh: Mesh::new(1, 2).unwrap(),
        placement: PlacementKind::Contiguous,
    };
    let capacity = |pairs_per_s, memory_bytes| Capacity { pairs_per_s, step_ns: 0, memory_bytes };
    let level = |capacities: &[Capacity]| Shares::level(&problem(8), ring, capacities, None);
    let shares = level(&[capacity(1, None), capacity(2, None)]).unwrap();
    vec![
        entry(
            "Shares::level with three capacities for two ranks",
            level(&[capacity(1, None); 3]).unwrap_err(),
            "One capacity for each rank of the mesh.",
        ),
        entry(
            "Shares::level where no rank has a speed",
            level(&[capacity(0, None); 2]).unwrap_err(),
            "A rank without speed gets no tokens, so one of them needs some.",
        ),
        entry(
            "Shares::level with 64 bytes of memory on each rank",
            level(&[capacity(1, Some(64)); 2]).unwrap_err(),
            "No shares fit the memory of all ranks.",
        ),
        entry(
            "Shares::compute_ns with the capacities of three ranks for shares of two",
            shares.compute_ns(&problem(8), ring.mesh, &[capacity(1, None); 3]).unwrap_err(),
            "The shares, the capacities and the mesh are of the same ranks.",
        ),
        entry(
            "Session::share, rank 1 with 9 tokens and rank 0 with 8",
            of_two(9, false),
            "All ranks share the tokens of one problem.",
        ),
        entry(
            "Session::share on a new session of rank 1, after a call on an earlier one",
            of_two(8, true),
            "Ranks make the same calls on one session each.",
        ),
    ]
}
