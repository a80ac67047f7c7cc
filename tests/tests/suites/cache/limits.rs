//! Caches that are full, ranks with unlike caches, and calls that do not fit: one error on all
//! ranks, and the cache as it was.

use kyklos::backend::Device;
use kyklos::local::on_threads;
use kyklos::{Attention, CacheOptions, Dtype, Error, Execution, KvCache, Mask, Session, Tensor};
use kyklos_transport::{Rank, in_process_group};

use super::decoding;

fn tensor(tokens: usize, heads: usize, seed: f32) -> Tensor {
    let values = (0..tokens * heads * 8).map(|index| (index as f32 * 0.37 + seed).sin()).collect();
    Tensor::new([1, tokens, heads, 8], values).unwrap()
}

fn options() -> CacheOptions {
    CacheOptions::new([1, 2, 8], Dtype::F32).block(4)
}

/// Appends and attends to `tokens` tokens that both ranks pass.
fn decode(session: &mut Session, cache: &mut KvCache, tokens: usize) -> Result<Vec<f32>, Error> {
    let (q, kv) = (tensor(tokens, 4, 0.1), tensor(tokens, 2, 0.2));
    session.attend_cached(&decoding(), cache, &q, &kv, &kv)?.o.to_vec()
}

/// The texts of an error on both ranks, one of which may have it from the other.
fn same(errors: &[String], says: &str) {
    assert!(errors.iter().all(|error| error.contains(says)), "{errors:?} do not say {says:?}");
}

#[test]
fn a_full_cache_is_refused_and_stays_as_it_was() {
    let errors = on_threads(in_process_group(2), |transport| {
        let mut session = Session::new(transport, Device::cpu());
        // 128 bytes for each token: room for 8 and 5 of them.
        let room = if session.rank() == Rank(0) { 8 * 128 } else { 5 * 128 + 100 };
        let mut cache = session.kv_cache(options().max_bytes(room)).unwrap();
        decode(&mut session, &mut cache, 12).unwrap();
        let before = [0, 1].map(|rank| cache.tokens(Rank(rank)));
        let error = decode(&mut session, &mut cache, 2).unwrap_err();
        assert_eq!((cache.len(), [0, 1].map(|rank| cache.tokens(Rank(rank)))), (12, before));
        assert!(cache.bytes() <= room);
        // One rank alone has too many tokens of its own.
        let own = if session.rank() == Rank(1) { 2 } else { 0 };
        let (q, kv) = (tensor(own, 4, 0.1), tensor(own, 2, 0.2));
        let call = Attention::new().mask(Mask::causal());
        let second = session.attend_cached(&call, &mut cache, &q, &kv, &kv).unwrap_err();
        decode(&mut session, &mut cache, 1).unwrap();
        cache.truncate(0).unwrap();
        decode(&mut session, &mut cache, 13).unwrap();
        [error, second].map(|error| error.to_string())
    });
    same(&errors[0], "more tokens for a cache whose ranks have room for");
    same(&errors[1], "more tokens for a cache whose ranks have room for");
}

#[test]
fn ranks_with_unlike_caches_get_one_error() {
    let errors = on_threads(in_process_group(2), |transport| {
        let mut session = Session::new(transport, Device::cpu());
        let odd = session.rank() == Rank(1);
        let other = if odd { options().block(5) } else { options() };
        let making = session.kv_cache(other).unwrap_err();
        let mut cache = session.kv_cache(options()).unwrap();
        decode(&mut session, &mut cache, 6).unwrap();
        if odd {
            cache.truncate(5).unwrap();
        }
        let record = decode(&mut session, &mut cache, 1).unwrap_err();
        cache.truncate(5).unwrap();
        decode(&mut session, &mut cache, 1).unwrap();
        // One rank calls without the cache.
        let (q, kv) = (tensor(1, 4, 0.1), tensor(1, 2, 0.2));
        let without = match odd {
            true => session.attend(&decoding(), &q, &kv, &kv).unwrap_err(),
            false => decode(&mut session, &mut cache, 1).unwrap_err(),
        };
        let counts = decode(&mut session, &mut cache, if odd { 2 } else { 1 }).unwrap_err();
        assert_eq!(cache.len(), 6);
        decode(&mut session, &mut cache, 1).unwrap();
        [making, record, without, counts].map(|error| error.to_string())
    });
    for (index, says) in [
        "rank 1 makes a cache of [1, tokens, 2, 8] in f32, blocks of 5 tokens, no window",
        "another record of the tokens in its cache",
        "no cache",
        "2 queries, the same on all ranks",
    ]
    .into_iter()
    .enumerate()
    {
        same(&[errors[0][index].clone(), errors[1][index].clone()], says);
    }
}

#[test]
fn calls_that_do_not_fit_the_cache_are_refused() {
    on_threads(in_process_group(2), |transport| {
        let mut session = Session::new(transport, Device::cpu());
        let mut cache = session.kv_cache(options().window(4).rollback(2)).unwrap();
        let window = Mask::window(Some(3), Some(0));
        let same = || Execution::new().same_queries();
        let mut attend = |cache: &mut KvCache, call: Attention, [q, kv]: [&Tensor; 2]| {
            session.attend_cached(&call, cache, q, kv, kv).map(drop)
        };
        let [q, kv] = [tensor(6, 4, 0.1), tensor(6, 2, 0.2)];
        let good = Attention::new().mask(window.clone()).execution(same());
        for (call, tensors, says) in [
            (
                Attention::new().mask(Mask::causal()).execution(same()),
                [&q, &kv],
                "on a cache with a window of 4 keys",
            ),
            (
                Attention::new().mask(Mask::window(Some(4), Some(0))),
                [&q, &kv],
                "on a cache with a window of 4 keys",
            ),
            (good.clone().q_offset(3), [&q, &kv], "q_offset, owners or replicated keys"),
            (good.clone(), [&q, &tensor(6, 4, 0.1)], "for a cache of [1, tokens, 2, 8]"),
            (good.clone(), [&q, &tensor(2, 2, 0.1)], "6 queries over a cache of 2 tokens"),
        ] {
            let error = attend(&mut cache, call, tensors).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
            assert!(cache.is_empty());
        }
        for _ in 0..3 {
            attend(&mut cache, good.clone(), [&q, &kv]).unwrap();
        }
        // Of 18 tokens, 2 can be taken back.
        cache.truncate(20).unwrap();
        cache.truncate(16).unwrap();
        let error = cache.truncate(15).unwrap_err().to_string();
        assert!(error.contains("dropped before position 13"), "{error}");
        let again = [&tensor(2, 4, 0.1), &tensor(0, 2, 0.1)];
        let error = attend(&mut cache, good.clone(), again).unwrap_err().to_string();
        assert!(error.contains("queries that see keys from position 11 on"), "{error}");
        attend(&mut cache, good.clone(), [&q, &kv]).unwrap();
        // No earlier key is needed by the first token.
        cache.truncate(0).unwrap();
        attend(&mut cache, good, [&q, &kv]).unwrap();
        assert_eq!(cache.len(), 6);
    });
}

/// Two caches with the same record but other settings, in one session: each gets its own plans.
/// Ranks that pass different ones, or those of different layers, get an error.
#[test]
fn caches_with_equal_records_are_told_apart() {
    let results = on_threads(in_process_group(2), |transport| {
        let odd = transport.rank() == Rank(1);
        let mut session = Session::new(transport, Device::cpu());
        let mut caches: Vec<KvCache> =
            [1, 2, 2].into_iter().map(|block| session.kv_cache(options().block(block)).unwrap()).collect();
        let own = if odd { 4 } else { 8 };
        let prompt = Attention::new().mask(Mask::causal());
        for cache in &mut caches {
            let (q, k, v) = (tensor(own, 4, 0.1), tensor(own, 2, 0.2), tensor(own, 2, 0.9));
            session.attend_cached(&prompt, cache, &q, &k, &v).unwrap();
        }
        let (q, k, v) = (tensor(3, 4, 0.7), tensor(3, 2, 0.4), tensor(3, 2, 0.5));
        let mut outputs = Vec::new();
        for cache in &mut caches {
            let output = session.attend_cached(&decoding(), cache, &q, &k, &v).unwrap();
            outputs.push(output.lse.to_vec::<f32>().unwrap());
        }
        let mut errors = Vec::new();
        for [even_rank, odd_rank] in [[0, 1], [1, 2]] {
            let cache = &mut caches[if odd { odd_rank } else { even_rank }];
            errors.push(session.attend_cached(&decoding(), cache, &q, &k, &v).unwrap_err().to_string());
        }
        session.attend_cached(&decoding(), &mut caches[2], &q, &k, &v).unwrap();
        (outputs, errors)
    });
    for (outputs, errors) in &results {
        // The same keys on other ranks: other roundings only.
        for (a, b) in outputs[0].iter().zip(&outputs[1]) {
            assert!((a - b).abs() < 1e-5, "{a} {b}");
        }
        assert!(errors.iter().all(|error| error.contains("another cache")), "{errors:?}");
    }
}

/// A call with a window that fails after it wrote its keys over dropped ones: the tokens that are
/// left are those of before it.
#[test]
fn what_a_failed_call_overwrote_does_not_count_as_held() {
    let caches = on_threads(in_process_group(2), |transport| {
        let odd = transport.rank() == Rank(1);
        let mut session = Session::new(transport, Device::cpu());
        let mut cache = session.kv_cache(options().block(1).window(4)).unwrap();
        let call = decoding().mask(Mask::window(Some(3), Some(0)));
        let (q, kv) = (tensor(10, 4, 0.1), tensor(10, 2, 0.2));
        session.attend_cached(&call, &mut cache, &q, &kv, &kv).unwrap();
        // Rank 1 drops its call after the vote; rank 0 has written its keys by then, or is told before.
        let (q, kv) = (tensor(7, 4, 0.1), tensor(7, 2, 0.2));
        if odd {
            let mut future = Box::pin(session.attend_cached_async(&call, &mut cache, &q, &kv, &kv));
            let mut context = std::task::Context::from_waker(std::task::Waker::noop());
            for _ in 0..3 {
                if Future::poll(future.as_mut(), &mut context).is_ready() {
                    break;
                }
            }
            drop(future);
        } else {
            drop(session.attend_cached(&call, &mut cache, &q, &kv, &kv));
        }
        (session.device().clone(), cache)
    });
    let (_, cache) = caches.into_iter().next().unwrap();
    let mut left = cache.after_loss(&[Rank(0)]).unwrap();
    // The call would have dropped the tokens before 7, so nothing before them can come back.
    assert!(left.missing().iter().all(|token| token >= 7));
    assert!(left.tokens(Rank(0)).iter().all(|token| token >= 7));
    assert!(left.truncate(left.len() - 3).unwrap_err().is_request());
}

/// A cache belongs to a rank of a group and to a device.
#[test]
fn a_cache_of_another_group_or_device_is_refused() {
    let session = || Session::new(in_process_group(1).remove(0), Device::cpu());
    let (mut one, mut other) = (session(), session());
    let mut cache = one.kv_cache(options()).unwrap();
    let (q, kv) = (tensor(2, 4, 0.1), tensor(2, 2, 0.2));
    let error = other.attend_cached(&decoding(), &mut cache, &q, &kv, &kv).unwrap_err().to_string();
    assert!(error.contains("use the cache with a session on the same Device"), "{error}");
    let error = cache.after_loss(&[Rank(1)]).unwrap_err().to_string();
    assert!(error.contains("survivors"), "{error}");
    for wrong in [
        options().block(0),
        CacheOptions::new([0, 2, 8], Dtype::F32),
        options().share(f64::NAN),
        options().share(-1.0),
    ] {
        assert!(one.kv_cache(wrong).unwrap_err().is_request());
    }
    assert!(one.kv_cache(options().share(0.0)).unwrap_err().is_request());
}
