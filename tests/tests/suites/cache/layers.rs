//! Steps of several layers, each with a cache of its own, after one vote.

use kyklos::backend::Device;
use kyklos::local::on_threads;
use kyklos::{CacheOptions, Dtype, KvCache, Session, Tensor};
use kyklos_transport::quic::quic_loopback_group;
use kyklos_transport::{Rank, in_process_group};

use super::decoding;

const LAYERS: usize = 5;

fn tensor(tokens: usize, heads: usize, seed: usize) -> Tensor {
    let values = (0..tokens * heads * 8).map(|index| ((index + 31 * seed) as f32 * 0.37).sin()).collect();
    Tensor::new([1, tokens, heads, 8], values).unwrap()
}

fn caches(session: &mut Session) -> Vec<KvCache> {
    let options = CacheOptions::new([1, 2, 8], Dtype::F32).block(2);
    (0..LAYERS).map(|_| session.kv_cache(options.clone()).unwrap()).collect()
}

/// The same bytes as with a vote for each layer, in one process and over QUIC.
#[test]
fn layers_after_one_vote_are_those_after_a_vote_for_each() {
    for group in [in_process_group(3), quic_loopback_group(3).unwrap()] {
        on_threads(group, |transport| {
            let mut session = Session::new(transport, Device::cpu());
            let (mut together, mut apart) = (caches(&mut session), caches(&mut session));
            for step in 0..20 {
                let tokens = [7, 1, 3][step % 3];
                let of_layer = |layer: usize| {
                    let seed = 100 * step + 10 * layer;
                    [(4, 0), (2, 1), (2, 2)].map(|(heads, which)| tensor(tokens, heads, seed + which))
                };
                let [q, k, v] = of_layer(0);
                let mut outputs = Vec::new();
                let mut calls = session.cached_calls(&decoding(), &mut together, &q, &k, &v).unwrap();
                while calls.remaining() > 0 {
                    let [q, k, v] = of_layer(LAYERS - calls.remaining());
                    outputs.push(calls.attend(&q, &k, &v).unwrap().o.to_vec::<f32>().unwrap());
                }
                drop(calls);
                for (layer, (cache, output)) in apart.iter_mut().zip(outputs).enumerate() {
                    let [q, k, v] = of_layer(layer);
                    let alone = session.attend_cached(&decoding(), cache, &q, &k, &v).unwrap();
                    assert_eq!(alone.o.to_vec::<f32>().unwrap(), output, "step {step}, layer {layer}");
                }
            }
            assert_eq!(together[0].tokens(Rank(1)), apart[LAYERS - 1].tokens(Rank(1)));
        });
    }
}

/// A rank that drops the step before its end takes the others out of it at once.
#[test]
fn a_step_that_a_rank_does_not_finish_ends_on_all_ranks() {
    let errors = on_threads(in_process_group(2), |transport| {
        let first = transport.rank() == Rank(0);
        let mut session = Session::new(transport, Device::cpu());
        let mut caches = caches(&mut session);
        let [q, k, v] = [tensor(1, 4, 0), tensor(1, 2, 1), tensor(1, 2, 2)];
        let mut calls = session.cached_calls(&decoding(), &mut caches, &q, &k, &v).unwrap();
        calls.attend(&q, &k, &v).unwrap();
        // Refused here alone, before anything moves.
        assert!(calls.attend(&tensor(2, 4, 0), &k, &v).unwrap_err().is_request());
        let error = match first {
            true => {
                drop(calls);
                session.attend_cached(&decoding(), &mut caches[0], &q, &k, &v).unwrap_err()
            }
            false => {
                let error = calls.attend(&q, &k, &v).unwrap_err();
                drop(calls);
                error
            }
        };
        (caches.iter().map(KvCache::len).collect::<Vec<_>>(), error.to_string())
    });
    for (lens, error) in errors {
        assert!(error.contains("1 of the 5 calls that it announced"), "{error}");
        assert_eq!(lens, [1, 0, 0, 0, 0]);
    }
}
