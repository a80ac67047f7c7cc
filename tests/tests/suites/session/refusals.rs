//! Calls of ranks that disagree, tensors that do not fit, and groups that have ended.

use std::sync::{Arc, Barrier};
use std::time::Duration;

use bytes::Bytes;
use kyklos::backend::Device;
use kyklos::host::Tensors;
use kyklos::local::on_threads;
use kyklos::plan::ProvedPlans;
use kyklos::{
    Attention, AttentionProblem, CacheOptions, CallShapes, Dtype, Error, Execution, Mask, Mesh, Placement,
    PlacementKind, Session, Split, Strategy, Tensor, TokenRuns, plan_forward,
};
use kyklos_backend_suite::attend_planned;
use kyklos_transport::quic::quic_loopback_group;
use kyklos_transport::{Abort, AbortCause, Progress, Rank, in_process_group};

use super::{both, made_up};

/// Both ranks make calls that do not fit, then one that does. Every error is the same on both
/// ranks.
#[test]
fn ranks_that_disagree_get_one_error_and_can_go_on() {
    type Change = fn(Attention, Tensor) -> (Attention, Tensor);
    let changes: [(&str, Change); 9] = [
        ("label `step 1`", |call, x| (call.label("step 1"), x)),
        ("another mask", |call, x| (call.mask(Mask::causal()), x)),
        ("another mask", |call, x| {
            // Rank 0 has no such list, so it finds the difference before the length of the list is wrong.
            (call.mask("causal//full".parse().unwrap()), x)
        }),
        ("another scale", |call, x| (call.scale(0.5), x)),
        ("another attention bias tensor", |call, x| {
            let bias = kyklos::BiasTensor {
                kind: kyklos::BiasKind::Additive,
                batch: 1,
                heads: 1,
                shared_rows: false,
            };
            (call.bias(bias, Bytes::from(vec![0; 4 * 8 * 4])), x)
        }),
        ("another mesh or strategy", |call, x| {
            (call.execution(Execution::new().strategy(Strategy::Ring)), x)
        }),
        ("another placement", |call, x| (call.execution(Execution::new().fixed_order(true)), x)),
        ("query heads 4", |call, _| (call, made_up(4, 4, 0.2))),
        ("type `f16`", |call, x| {
            let zeros = vec![half::f16::ZERO; x.shape().iter().product()];
            (call, Tensor::new(x.shape(), zeros).unwrap())
        }),
    ];
    for group in [in_process_group(2), quic_loopback_group(2).unwrap()] {
        let errors = on_threads(both(group), |transport| {
            let odd = transport.rank().0 == 1;
            let mut session = Session::new(transport, Device::cpu());
            let x = || made_up(4, 2, 0.1);
            let mut errors = Vec::new();
            for (_, change) in changes {
                let (call, x) = if odd { change(Attention::new(), x()) } else { (Attention::new(), x()) };
                let q = made_up(4, x.shape()[2], 0.1);
                let q = if x.dtype() == Dtype::F16 { x.clone() } else { q };
                let error = session.attend(&call, &q, &x, &x).unwrap_err();
                assert!(error.is_request(), "{error}");
                errors.push(error.to_string());
            }
            session.attend(&Attention::new(), &x(), &x(), &x()).unwrap();
            errors
        });
        assert_eq!(errors[0], errors[1]);
        for ((words, _), error) in changes.iter().zip(&errors[0]) {
            assert!(error.contains("rank 1 calls with") && error.contains(words), "{words}: {error}");
        }
    }
}

#[test]
fn a_rank_whose_tensors_do_not_fit_refuses_for_all_and_the_session_goes_on() {
    let errors = on_threads(in_process_group(2), |transport| {
        let odd = transport.rank().0 == 1;
        let mut session = Session::new(transport, Device::cpu());
        let x = made_up(4, 2, 0.1);
        let elsewhere = x.to_device(&Device::cpu()).unwrap();
        let long = "x".repeat(kyklos::MAX_LABEL_BYTES + 1);
        let rows = Tensor::new([1, 4, 1, 8], vec![half::bf16::ZERO; 32]).unwrap();
        let wrong: [(Attention, Tensor, Tensor); 5] = [
            (Attention::new(), x.clone(), made_up(5, 2, 0.1)),
            (Attention::new(), made_up(4, 3, 0.1), x.clone()),
            (Attention::new(), elsewhere, x.clone()),
            (Attention::new().label(long), x.clone(), x.clone()),
            (Attention::new().bias_tensor(&rows).unwrap(), x.clone(), x.clone()),
        ];
        let errors: Vec<Error> = wrong
            .into_iter()
            .map(|(call, first, v)| {
                let (call, first, v) =
                    if odd { (call, first, v) } else { (Attention::new(), x.clone(), x.clone()) };
                session.attend(&call, &first, &first, &v).unwrap_err()
            })
            .collect();
        session.attend(&Attention::new(), &x, &x, &x).unwrap();
        errors
    });
    for (theirs, own) in errors[0].iter().zip(&errors[1]) {
        assert!(own.is_request(), "{own}");
        assert!(theirs.to_string().contains(&format!("rank 1: {own}")), "{theirs} does not tell {own}");
    }
}

#[test]
fn a_mesh_or_placement_that_does_not_fit_the_group_is_refused_on_all_ranks_alike() {
    let errors = on_threads(in_process_group(2), |transport| {
        let mut session = Session::new(transport, Device::cpu());
        let x = made_up(4, 2, 0.1);
        let executions = [
            Execution::new().mesh(Mesh::new(1, 3).unwrap()),
            Execution::new().placement(PlacementKind::Zigzag),
            Execution::new().strategy(Strategy::Relay),
        ];
        executions.map(|execution| {
            let call = Attention::new().execution(execution);
            session.attend(&call, &x, &x, &x).unwrap_err().to_string()
        })
    });
    assert_eq!(errors[0], errors[1]);
    assert!(errors[0][0].contains("mesh 1x3 for 2 ranks"), "{:?}", errors[0]);
}

#[test]
fn a_session_after_an_abort_says_who_ended_the_group() {
    for group in [in_process_group(2), quic_loopback_group(2).unwrap()] {
        let first_call = Barrier::new(2);
        on_threads(both(group), |transport| {
            let culprit = transport.rank().0 == 1;
            let mut session = Session::new(transport, Device::cpu());
            let x = made_up(4, 2, 0.1);
            session.attend(&Attention::new(), &x, &x, &x).unwrap();
            first_call.wait();
            if culprit {
                let cause = AbortCause::Failed("out of coffee".to_owned());
                session.group().abort(Abort { culprit: Rank(1), cause, progress: Progress::default() });
            }
            for _ in 0..2 {
                let error = session.attend(&Attention::new(), &x, &x, &x).unwrap_err().to_string();
                assert!(error.contains("rank 1") && error.contains("out of coffee"), "{error}");
            }
            let _ = session.close(Duration::from_secs(5));
        });
    }
}

/// Token lists of two ranks that differ only beyond the runs that a message shows.
#[test]
fn stale_owners_are_found_however_long_the_lists_are() {
    let lists = |swapped: bool| {
        let even = |part: u32| part.is_multiple_of(2) != (swapped && part >= 14);
        let of = |rank: u32| (0..20).filter(move |part| even(*part) == (rank == 0));
        let tokens = |rank| TokenRuns::from_positions(of(rank).flat_map(|part| part * 3..part * 3 + 3));
        Placement::explicit(Mesh::new(1, 2).unwrap(), 60, 0..0, vec![tokens(0), tokens(1)]).unwrap()
    };
    let errors = on_threads(in_process_group(2), |transport| {
        let stale = transport.rank().0 == 1;
        let mut session = Session::new(transport, Device::cpu());
        let x = made_up(30, 2, 0.1);
        let mut attend = |swapped| {
            let execution = Execution::new().owners(lists(swapped), lists(swapped));
            session.attend(&Attention::new().execution(execution), &x, &x, &x)
        };
        attend(false).unwrap();
        attend(stale).unwrap_err().to_string()
    });
    assert_eq!(errors[0], errors[1]);
    assert!(errors[0].contains("another placement"), "{}", errors[0]);
}

#[test]
fn a_session_that_one_rank_makes_anew_is_named_on_all_ranks() {
    let errors = on_threads(in_process_group(2), |transport| {
        let x = made_up(4, 2, 0.1);
        let mut session = Session::new(transport.clone(), Device::cpu());
        session.attend(&Attention::new(), &x, &x, &x).unwrap();
        if transport.rank().0 == 1 {
            session = Session::new(transport, Device::cpu());
        }
        session.attend(&Attention::new(), &x, &x, &x).unwrap_err().to_string()
    });
    assert_eq!(errors[0], errors[1]);
    assert!(errors[0].contains("rank 1 is at call 0 of its session, rank 0 at call 1"), "{}", errors[0]);
}

/// Rank 1 leaves out its second call, as a caller does whose own code fails. Every later call fails
/// on both ranks: none meets a call of another place.
#[test]
fn a_call_that_a_rank_left_out_is_never_taken_for_the_next_one() {
    for group in [in_process_group(2), quic_loopback_group(2).unwrap()] {
        let errors = on_threads(both(group), |transport| {
            let odd = transport.rank().0 == 1;
            let mut session = Session::new(transport, Device::cpu());
            let x = made_up(4, 2, 0.1);
            session.attend(&Attention::new(), &x, &x, &x).unwrap();
            if odd {
                assert_eq!(session.take_operation(), 1);
            }
            let mut errors = Vec::new();
            errors.push(session.attend(&Attention::new(), &x, &x, &x).map(drop));
            errors.push(session.prepare(&Attention::new(), &CallShapes::of(&x, &x), 2).map(drop));
            errors.push(session.kv_cache(CacheOptions::new([1, 2, 16], Dtype::F32)).map(drop));
            let problem = AttentionProblem::new([1, 8, 2, 2, 16], Dtype::F32, Mask::full()).unwrap();
            errors.push(session.share(&problem, &Execution::new()).map(drop));
            errors.push(given_plans(&mut session, &problem));
            errors.push(session.attend(&Attention::new(), &x, &x, &x).map(drop));
            errors.into_iter().map(|ended| ended.unwrap_err().to_string()).collect::<Vec<_>>()
        });
        assert_eq!(errors[0], errors[1]);
        for (n, error) in errors[0].iter().enumerate() {
            let (theirs, first) = (n + 2, n + 1);
            let words = [format!("call {theirs} of its session"), format!("call {first}")];
            assert!(words.iter().all(|words| error.contains(words)), "{n}: {error}");
        }
    }
}

/// Calls that the ranks refuse have a place, too: after any of them, the ranks are still in step.
#[test]
fn refused_calls_count_on_all_ranks_alike() {
    let places = on_threads(in_process_group(2), |transport| {
        let odd = transport.rank().0 == 1;
        let mut session = Session::new(transport, Device::cpu());
        let (x, short) = (made_up(4, 2, 0.1), made_up(3, 2, 0.1));
        let problem = AttentionProblem::new([1, 8, 2, 2, 16], Dtype::F32, Mask::full()).unwrap();
        // Found by one rank before its vote; by all after it; and refused by the caller.
        session.attend(&Attention::new(), &x, &x, if odd { &short } else { &x }).unwrap_err();
        session.attend(&Attention::new().scale(if odd { 0.5 } else { 1.0 }), &x, &x, &x).unwrap_err();
        let heads = if odd { 0 } else { 2 };
        session.kv_cache(CacheOptions::new([1, heads, 16], Dtype::F32)).unwrap_err();
        if odd {
            pollster::block_on(session.refuse(&Error::request("a reason", "a remedy"))).unwrap();
        } else {
            given_plans(&mut session, &problem).unwrap_err();
        }
        given_plans(&mut session, &problem).unwrap();
        session.attend(&Attention::new(), &x, &x, &x).unwrap();
        session.take_operation()
    });
    assert_eq!(places, [6, 6]);
}

/// A run of given plans with tensors of 4 tokens on each of two ranks.
fn given_plans(session: &mut Session, problem: &AttentionProblem) -> kyklos::Result<()> {
    let mesh = Mesh::new(1, 2)?;
    let set = plan_forward(problem, mesh, PlacementKind::Contiguous, &Split::Even, Strategy::Ring)?;
    let plans = Arc::new(ProvedPlans::new(set)?);
    let x = Bytes::from(vec![0; 4 * 2 * 16 * 4]);
    let tensors = Tensors { q: x.clone(), k: x.clone(), v: x, bias: None };
    pollster::block_on(attend_planned(session, &plans, &tensors)).map(drop)
}
