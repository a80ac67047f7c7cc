//! Refusals of key/value caches.

use kyklos::backend::Device;
use kyklos::local::on_threads;
use kyklos::{
    Attention, BiasTensor, CacheOptions, Dtype, Error, Execution, KvCache, Mask, PlacementKind, Session,
    WireFormat,
};
use kyklos_transport::{Rank, in_process_group};

use super::{alone, of_calls, of_two, tensor};
use crate::support::transcript_holds;

#[test]
fn caches() {
    let calls = [of_options(), of_appending(), of_windows(), of_groups(), of_several(), of_losses()];
    transcript_holds("caches", &of_calls(calls.into_iter().flatten()));
}

fn options() -> CacheOptions {
    CacheOptions::new([1, 2, 8], Dtype::F32).block(4)
}

fn decoding() -> Attention {
    Attention::new().mask(Mask::causal()).execution(Execution::new().same_queries())
}

/// Appends `keys` tokens and attends from `queries` of them.
fn attend(
    session: &mut Session,
    cache: &mut KvCache,
    call: &Attention,
    [queries, keys]: [usize; 2],
) -> Result<(), Error> {
    let kv = tensor(keys, 2);
    session.attend_cached(call, cache, &tensor(queries, 2), &kv, &kv).map(drop)
}

/// A cache of one rank after `calls` calls of `tokens` tokens.
fn used(options: &CacheOptions, call: &Attention, [calls, tokens]: [usize; 2]) -> (Session, KvCache) {
    let mut session = alone();
    let mut cache = session.kv_cache(options.clone()).unwrap();
    (0..calls).for_each(|_| attend(&mut session, &mut cache, call, [tokens, tokens]).unwrap());
    (session, cache)
}

/// The error of the first call on a cache of one rank.
fn of_first(options: &CacheOptions, call: &Attention, tokens: [usize; 2]) -> Error {
    let (mut session, mut cache) = used(options, call, [0, 0]);
    attend(&mut session, &mut cache, call, tokens).unwrap_err()
}

fn of_options() -> Vec<(&'static str, Error)> {
    let made = |options: CacheOptions| alone().kv_cache(options).unwrap_err();
    vec![
        ("Session::kv_cache with blocks of 0 tokens", made(options().block(0))),
        ("Session::kv_cache with a share of -1", made(options().share(-1.0))),
        ("Session::kv_cache, with a share of 0 on all ranks", made(options().share(0.0))),
        (
            "Session::kv_cache, where rank 1 has other options",
            of_two(|session, odd| session.kv_cache(options().block(if odd { 5 } else { 4 })).unwrap_err()),
        ),
    ]
}

fn of_appending() -> Vec<(&'static str, Error)> {
    let (mut session, mut cache) = used(&options(), &decoding(), [0, 0]);
    let three_heads = tensor(1, 3);
    let heads = session.attend_cached(&decoding(), &mut cache, &three_heads, &three_heads, &three_heads);
    let (mut session, mut full) = used(&options().max_bytes(1024), &decoding(), [1, 8]);
    let zigzag = decoding().execution(Execution::new().placement(PlacementKind::Zigzag));
    vec![
        ("Session::attend_cached with keys of other heads", heads.unwrap_err()),
        (
            "Session::attend_cached with more tokens than the limit allows",
            attend(&mut session, &mut full, &decoding(), [1, 1]).unwrap_err(),
        ),
        ("Session::attend_cached with q_offset", of_first(&options(), &decoding().q_offset(1), [1, 1])),
        ("Session::attend_cached with placement zigzag and no mesh", of_first(&options(), &zigzag, [1, 1])),
        ("Session::attend_cached with 3 queries over 2 tokens", of_first(&options(), &decoding(), [3, 2])),
        (
            "Session::attend_cached, where rank 1 appends 2 tokens and rank 0 one, with same_queries",
            of_two(|session, odd| {
                let mut cache = session.kv_cache(options()).unwrap();
                attend(session, &mut cache, &decoding(), [0, if odd { 2 } else { 1 }]).unwrap_err()
            }),
        ),
    ]
}

fn of_windows() -> Vec<(&'static str, Error)> {
    let (windowed, window) = (options().window(4), Mask::window(Some(3), Some(0)));
    let in_window = decoding().mask(window.clone());
    let after = |calls, call: &Attention, tokens| {
        let (mut session, mut cache) = used(&windowed, &in_window, calls);
        attend(&mut session, &mut cache, call, tokens).unwrap_err()
    };
    let (bias, rows) = BiasTensor::key_mask(1, &[true; 5]).unwrap();
    let int8 = Attention::new().mask(window).execution(Execution::new().wire(WireFormat::Int8));
    vec![
        (
            "Session::attend_cached with a causal mask on a cache with a window",
            of_first(&windowed, &decoding(), [1, 1]),
        ),
        (
            "Session::attend_cached with queries that are older than the new tokens, on a cache with a window",
            after([3, 4], &in_window, [3, 1]),
        ),
        (
            "Session::attend_cached with a bias tensor after keys were dropped",
            after([2, 8], &in_window.clone().bias(bias, rows), [1, 1]),
        ),
        (
            "Session::attend_cached with int8 on the wire after keys were dropped",
            after([2, 8], &int8, [1, 1]),
        ),
        (
            "KvCache::truncate of more tokens than the window keeps",
            used(&windowed, &in_window, [3, 4]).1.truncate(7).unwrap_err(),
        ),
    ]
}

/// The cache of a rank of two, with 4 tokens on each, and a session of that rank alone on its
/// device.
fn of_one_of_two(rank: usize) -> (Session, KvCache) {
    let (device, cache) = on_threads(in_process_group(2), |transport| {
        let mut session = Session::new(transport, Device::cpu());
        let mut cache = session.kv_cache(options()).unwrap();
        attend(&mut session, &mut cache, &decoding(), [8, 8]).unwrap();
        (session.device().clone(), cache)
    })
    .remove(rank);
    (Session::new(in_process_group(1).remove(0), device), cache)
}

fn of_groups() -> Vec<(&'static str, Error)> {
    let (mut session, mut cache) = of_one_of_two(0);
    let mut elsewhere = alone().kv_cache(options()).unwrap();
    vec![
        (
            "Session::attend_cached with a cache of another group",
            attend(&mut session, &mut cache, &decoding(), [1, 1]).unwrap_err(),
        ),
        (
            "Session::attend_cached with a cache of another device",
            attend(&mut alone(), &mut elsewhere, &decoding(), [1, 1]).unwrap_err(),
        ),
    ]
}

fn of_several() -> Vec<(&'static str, Error)> {
    let one = tensor(1, 2);
    let (mut session, cache) = used(&options(), &decoding(), [1, 8]);
    let mut unlike = [cache, session.kv_cache(options()).unwrap()];
    let unlike = session.cached_calls(&decoding(), &mut unlike, &one, &one, &one).unwrap_err();
    let none = session.cached_calls(&decoding(), &mut [], &one, &one, &one).unwrap_err();
    let mut caches = [session.kv_cache(options()).unwrap()];
    let mut calls = session.cached_calls(&decoding(), &mut caches, &one, &one, &one).unwrap();
    calls.attend(&one, &one, &one).unwrap();
    let beyond = calls.attend(&one, &one, &one).unwrap_err();
    vec![
        ("Session::cached_calls on caches of 8 and of 0 tokens", unlike),
        ("Session::cached_calls on no cache", none),
        ("CachedCalls::attend for the second time, after Session::cached_calls on one cache", beyond),
    ]
}

fn of_losses() -> Vec<(&'static str, Error)> {
    let (mut session, cache) = of_one_of_two(0);
    let mut cache = cache.after_loss(&[Rank(0)]).unwrap();
    let missing = attend(&mut session, &mut cache, &decoding(), [1, 1]).unwrap_err();
    let few = session.restore(&mut cache, &tensor(1, 2), &tensor(1, 2)).unwrap_err();

    // This survivor has tokens 4 to 7 in its first rows, and the restored ones behind them.
    let (mut session, cache) = of_one_of_two(1);
    let mut cache = cache.after_loss(&[Rank(1)]).unwrap();
    session.restore(&mut cache, &tensor(4, 2), &tensor(4, 2)).unwrap();
    cache.truncate(6).unwrap();
    let full = Attention::new().execution(Execution::new().same_queries());
    vec![
        ("Session::attend_cached after the loss of a rank", missing),
        ("Session::restore with too few keys", few),
        (
            "Session::attend_cached with a full mask after tokens in the middle of a rank's memory were truncated",
            attend(&mut session, &mut cache, &full, [1, 0]).unwrap_err(),
        ),
        (
            "Session::restore, where rank 1 truncated its cache",
            of_two(|session, odd| {
                let mut cache = session.kv_cache(options()).unwrap();
                attend(session, &mut cache, &decoding(), [4, 4]).unwrap();
                if odd {
                    cache.truncate(3).unwrap();
                }
                session.restore(&mut cache, &tensor(0, 2), &tensor(0, 2)).unwrap_err()
            }),
        ),
        (
            "KvCache::after_loss with ranks that do not exist",
            alone().kv_cache(options()).unwrap().after_loss(&[Rank(3)]).unwrap_err(),
        ),
    ]
}
