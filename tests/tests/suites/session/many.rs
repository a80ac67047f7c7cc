//! Many calls of one shape after one vote.

use std::time::{Duration, Instant};

use bytes::Bytes;
use kyklos::backend::Device;
use kyklos::local::on_threads;
use kyklos::{Attention, BiasKind, BiasTensor, CallShapes, Gradients, Mask, Saved, Session, Tensor};
use kyklos_transport::quic::quic_loopback_group;
use kyklos_transport::{Vote, in_process_group};

use super::{both, made_up};

const LAYERS: u32 = 12;
/// Far below the deadline of a session, which is 60 s.
const SOON: Duration = Duration::from_secs(20);

/// A causal call whose queries of both ranks share one row of a bias tensor over 11 keys.
fn biased() -> Attention {
    let bias = BiasTensor { kind: BiasKind::Additive, batch: 1, heads: 1, shared_rows: true };
    let row: Vec<u8> = (0..11).flat_map(|key| (key as f32 * 0.1).to_ne_bytes()).collect();
    Attention::new().mask(Mask::causal()).bias(bias, Bytes::from(row))
}

#[test]
fn many_calls_after_one_vote_give_the_bytes_of_single_calls() {
    for group in [in_process_group(2), quic_loopback_group(2).unwrap()] {
        on_threads(both(group), |transport| {
            let tokens = 5 + transport.rank().0 as usize;
            let mut session = Session::new(transport, Device::cpu());
            let layer = |layer: u32, heads: usize| made_up(tokens, heads, layer as f32 * 0.7);
            let call = biased();
            let single: Vec<Vec<f32>> = (0..LAYERS)
                .map(|index| {
                    let (q, kv) = (layer(index, 4), layer(index, 2));
                    session.attend(&call, &q, &kv, &kv).unwrap().o.to_vec().unwrap()
                })
                .collect();
            let (q, kv) = (layer(0, 4), layer(0, 2));
            let mut calls = session.prepare(&call, &CallShapes::of(&q, &kv), LAYERS).unwrap();
            for (index, single) in (0..LAYERS).zip(single) {
                assert_eq!(calls.remaining(), LAYERS - index);
                let (q, kv) = (layer(index, 4), layer(index, 2));
                assert_eq!(calls.run(&q, &kv, &kv).unwrap().o.to_vec::<f32>().unwrap(), single);
            }
            let more = calls.run(&q, &kv, &kv).unwrap_err();
            assert!(more.is_request() && more.to_string().contains("call 13 of 12"), "{more}");
            drop(calls);
            session.attend(&call, &q, &kv, &kv).unwrap();
            assert_eq!(session.plans_made(), 1);
        });
    }
}

#[test]
fn many_backward_passes_after_one_vote_give_the_bytes_of_single_ones() {
    on_threads(in_process_group(2), |group| {
        let tokens = 5 + group.rank().0 as usize;
        let mut session = Session::new(group, Device::cpu());
        let call = biased().sinks(vec![0.5, -1.0, 0.0, 2.0]).bias_gradient();
        let saved: Vec<Saved> = (0..LAYERS)
            .map(|layer| {
                let (q, kv) =
                    (made_up(tokens, 4, layer as f32 * 0.7), made_up(tokens, 2, layer as f32 * 0.3));
                let output = session.attend(&call, &q, &kv, &kv).unwrap();
                Saved { q, k: kv.clone(), v: kv, o: output.o, lse: output.lse_pair }
            })
            .collect();
        let numbers = |gradients: Gradients| {
            let Gradients { dq, dk, dv, d_sinks_part, d_bias, .. } = gradients;
            let tensors = [dq, dk, dv, d_bias.unwrap()].map(|tensor| tensor.to_vec::<f32>().unwrap());
            (tensors, d_sinks_part)
        };
        let d_o = made_up(tokens, 4, 0.9);
        let single: Vec<_> =
            saved.iter().map(|saved| numbers(session.backward(&call, saved, &d_o, None).unwrap())).collect();
        let shapes = CallShapes::of(&saved[0].q, &saved[0].k);
        let mut calls = session.prepare_backward(&call, &shapes, LAYERS).unwrap();
        let Saved { q, k, .. } = &saved[0];
        let forward = calls.run(q, k, k).unwrap_err();
        assert!(forward.is_request() && forward.to_string().contains("direction"), "{forward}");
        assert!(calls.backward(&saved[0], q, Some(q)).unwrap_err().is_request());
        for (saved, single) in saved.iter().zip(single).rev() {
            assert!(numbers(calls.backward(saved, &d_o, None).unwrap()) == single);
        }
        let more = calls.backward(&saved[0], &d_o, None).unwrap_err();
        assert!(more.to_string().contains("call 13 of 12"), "{more}");
        drop(calls);
        // Ranks that announce different directions get one error, and can go on.
        let announced = match session.rank().0 {
            0 => session.prepare(&call, &shapes, 2).map(drop),
            _ => session.prepare_backward(&call, &shapes, 2).map(drop),
        };
        assert!(announced.is_err());
        session.attend(&call, q, k, k).unwrap();
    });
}

#[test]
fn ranks_that_announce_other_numbers_of_calls_get_one_error_and_can_go_on() {
    let errors = on_threads(in_process_group(2), |transport| {
        let count = 3 + transport.rank().0;
        let mut session = Session::new(transport, Device::cpu());
        let x = made_up(4, 2, 0.1);
        let announced =
            session.prepare(&Attention::new(), &CallShapes::of(&x, &x), count).unwrap_err().to_string();
        let single = match count {
            3 => session.prepare(&Attention::new(), &CallShapes::of(&x, &x), 3).unwrap_err(),
            _ => session.attend(&Attention::new(), &x, &x, &x).unwrap_err(),
        };
        session.attend(&Attention::new(), &x, &x, &x).unwrap();
        [announced, single.to_string()]
    });
    assert_eq!(errors[0], errors[1]);
    assert!(errors[0][0].contains("rank 1 calls with a number of calls of 4, rank 0 with 3"), "{errors:?}");
    assert!(errors[0][1].contains("a number of calls of 1, rank 0 with 3"), "{errors:?}");
}

#[test]
fn tensors_that_were_not_announced_are_refused_and_the_calls_go_on() {
    on_threads(in_process_group(2), |transport| {
        let mut session = Session::new(transport, Device::cpu());
        let (x, longer) = (made_up(4, 2, 0.1), made_up(5, 2, 0.1));
        let halves = Tensor::new(x.shape(), vec![half::f16::ZERO; 4 * 2 * 16]).unwrap();
        let elsewhere = x.to_device(&Device::cpu()).unwrap();
        let mut calls = session.prepare(&Attention::new(), &CallShapes::of(&x, &x), 2).unwrap();
        for (wrong, words) in [(longer, "[1, 5, 2, 16]"), (halves, "f16"), (elsewhere, "q is on")] {
            let error = calls.run(&wrong, &x, &x).unwrap_err();
            assert!(error.is_request() && error.to_string().contains(words), "{error}");
            calls.run(&x, &x, &longer_kv(&x)).unwrap_err();
        }
        calls.run(&x, &x, &x).unwrap();
        calls.run(&x, &x, &x).unwrap();
    });
}

fn longer_kv(x: &Tensor) -> Tensor {
    made_up(x.shape()[1] + 1, 2, 0.2)
}

/// Rank 1 of three ends early. Rank 2 has no tokens, so its plan has no messages.
#[test]
fn a_rank_that_makes_fewer_calls_than_announced_ends_the_group_with_a_clear_error() {
    for group in [in_process_group(3), quic_loopback_group(3).unwrap()] {
        on_threads(group, |transport| {
            let rank = transport.rank().0;
            let mut session = Session::new(transport.clone(), Device::cpu());
            let x = made_up(if rank == 2 { 0 } else { 4 }, 2, 0.1);
            let mut calls = session.prepare(&Attention::new(), &CallShapes::of(&x, &x), 5).unwrap();
            let started = Instant::now();
            if rank == 1 {
                (0..3).for_each(|_| drop(calls.run(&x, &x, &x).unwrap()));
            } else {
                if rank == 2 {
                    // The news of the abort takes its time.
                    while pollster::block_on(transport.agree(Vote::ready([1; 32]), SOON)).is_ok() {}
                }
                let error = std::iter::repeat_with(|| calls.run(&x, &x, &x)).find_map(Result::err);
                let error = error.unwrap().to_string();
                assert!(
                    error.contains("rank 1 failed: it made 3 of the 5 calls that it announced"),
                    "{error}"
                );
            }
            assert!(started.elapsed() < SOON);
            drop(calls);
            let error = session.attend(&Attention::new(), &x, &x, &x).unwrap_err().to_string();
            assert!(error.contains("rank 1 failed: it made 3 of the 5 calls"), "{error}");
        });
    }
}
