//! Refusals of key/value caches and of the ranks that get results. The tests cause each of them.

use kyklos::backend::Device;
use kyklos::local::on_threads;
use kyklos::{
    Attention, AttentionProblem, BiasTensor, CacheOptions, Dtype, Error, Execution, KvCache, Mask, Mesh,
    Placement, PlacementKind, Results, Session, Split, Strategy, Tensor, WireFormat, plan_forward,
};
use kyklos_transport::{Rank, in_process_group};

use super::Entry;
use super::library::entry;

fn tensor(tokens: usize, heads: usize) -> Tensor {
    Tensor::new([1, tokens, heads, 8], vec![0.0_f32; tokens * heads * 8]).unwrap()
}

fn options() -> CacheOptions {
    CacheOptions::new([1, 2, 8], Dtype::F32).block(4)
}

fn decoding() -> Attention {
    Attention::new().mask(Mask::causal()).execution(Execution::new().same_queries())
}

fn session() -> Session {
    Session::new(in_process_group(1).remove(0), Device::cpu())
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

/// The error of a call on a cache of one rank, with `options`, after `before` tokens.
fn of_one(options: CacheOptions, before: usize, call: &Attention, tokens: [usize; 2]) -> Error {
    let mut session = session();
    let mut cache = session.kv_cache(options).unwrap();
    if before > 0 {
        attend(&mut session, &mut cache, call, [before, before]).unwrap();
    }
    attend(&mut session, &mut cache, call, tokens).unwrap_err()
}

/// The error of rank 0 of two; `odd` is rank 1.
fn of_two(run: impl Fn(&mut Session, bool) -> Error + Sync) -> Error {
    let errors = on_threads(in_process_group(2), |transport| {
        let odd = transport.rank() == Rank(1);
        run(&mut Session::new(transport, Device::cpu()), odd)
    });
    errors.into_iter().next().unwrap()
}

/// The caches of two ranks, with 4 tokens each, and their devices.
fn of_two_ranks() -> Vec<(Device, KvCache)> {
    on_threads(in_process_group(2), |transport| {
        let mut session = Session::new(transport, Device::cpu());
        let mut cache = session.kv_cache(options()).unwrap();
        attend(&mut session, &mut cache, &decoding(), [8, 8]).unwrap();
        (session.device().clone(), cache)
    })
}

/// The cache of rank 0 after the loss of rank 1, and a session of rank 0.
fn lost() -> (Session, KvCache) {
    let (device, cache) = of_two_ranks().remove(0);
    (Session::new(in_process_group(1).remove(0), device), cache.after_loss(&[Rank(0)]).unwrap())
}

fn with_window() -> (CacheOptions, Attention) {
    (options().window(4), decoding().mask(Mask::window(Some(3), Some(0))))
}

pub(super) fn refusals() -> Vec<Entry> {
    let (windowed, in_window) = with_window();
    let key_mask = |keys: usize| BiasTensor::key_mask(1, &vec![true; keys]).unwrap();
    let truncated = {
        let mut session = session();
        let mut cache = session.kv_cache(windowed.clone()).unwrap();
        (0..3).for_each(|_| attend(&mut session, &mut cache, &in_window, [4, 4]).unwrap());
        cache.truncate(7).unwrap_err()
    };
    let bias_after_window = {
        let mut session = session();
        let mut cache = session.kv_cache(windowed.clone()).unwrap();
        (0..2).for_each(|_| attend(&mut session, &mut cache, &in_window, [8, 8]).unwrap());
        let (bias, rows) = key_mask(5);
        attend(&mut session, &mut cache, &in_window.clone().bias(bias, rows), [1, 1]).unwrap_err()
    };
    let int8_after_window = {
        let mut session = session();
        let mut cache = session.kv_cache(windowed.clone()).unwrap();
        (0..2).for_each(|_| attend(&mut session, &mut cache, &in_window, [8, 8]).unwrap());
        let own = Attention::new().mask(Mask::window(Some(3), Some(0)));
        let own = own.execution(Execution::new().wire(WireFormat::Int8));
        attend(&mut session, &mut cache, &own, [1, 1]).unwrap_err()
    };
    let (mut survivor, mut cache) = lost();
    let missing = attend(&mut survivor, &mut cache, &decoding(), [1, 1]).unwrap_err();
    let few = survivor.restore(&mut cache, &tensor(1, 2), &tensor(1, 2)).unwrap_err();
    let problem = || AttentionProblem::new([1, 8, 2, 2, 8], Dtype::F32, Mask::causal()).unwrap();
    let mesh = Mesh::new(1, 2).unwrap();
    let plan = |problem: &AttentionProblem, strategy| {
        plan_forward(problem, mesh, PlacementKind::Contiguous, &Split::Even, strategy).unwrap_err()
    };
    let same = problem().with_same_queries(true).unwrap();
    let third = problem().with_results(Results::One(Rank(2))).unwrap();
    let place = Placement::new(PlacementKind::Contiguous, mesh, 8, &Split::Even).unwrap();
    let other = |options: CacheOptions| session().kv_cache(options).unwrap_err();
    vec![
        entry(
            "Session::kv_cache with blocks of 0 tokens",
            other(options().block(0)),
            "Or leave the default.",
        ),
        entry("Session::kv_cache with a share of -1", other(options().share(-1.0)), "Shares are relative."),
        entry(
            "Session::kv_cache, with a share of 0 on all ranks",
            other(options().share(0.0)),
            "Some rank keeps each token.",
        ),
        entry(
            "Session::kv_cache, where rank 1 has other options",
            of_two(|session, odd| session.kv_cache(options().block(if odd { 5 } else { 4 })).unwrap_err()),
            "Limits in bytes and shares may differ.",
        ),
        entry(
            "Session::attend_cached with keys of other heads",
            {
                let (mut session, kv) = (session(), tensor(1, 3));
                let mut cache = session.kv_cache(options()).unwrap();
                session.attend_cached(&decoding(), &mut cache, &kv, &kv, &kv).unwrap_err()
            },
            "A cache has one shape.",
        ),
        entry(
            "Session::attend_cached with more tokens than the limit allows",
            of_one(options().max_bytes(1024), 8, &decoding(), [1, 1]),
            "The cache stays as it was, on all ranks.",
        ),
        entry(
            "Session::attend_cached with q_offset",
            of_one(options(), 0, &decoding().q_offset(1), [1, 1]),
            "Positions count the appended tokens.",
        ),
        entry(
            "Session::attend_cached with placement zigzag and no mesh",
            of_one(
                options(),
                0,
                &decoding().execution(Execution::new().placement(PlacementKind::Zigzag)),
                [1, 1],
            ),
            "A mesh decides which tokens a rank gets.",
        ),
        entry(
            "Session::attend_cached with a causal mask on a cache with a window",
            of_one(windowed.clone(), 0, &decoding(), [1, 1]),
            "Keys before the window are dropped.",
        ),
        entry(
            "Session::attend_cached with 3 queries over 2 tokens",
            of_one(options(), 0, &decoding(), [3, 2]),
            "The queries are the last tokens.",
        ),
        entry(
            "Session::attend_cached with queries that are older than the new tokens, on a cache with a window",
            {
                let mut session = session();
                let mut cache = session.kv_cache(windowed.clone()).unwrap();
                (0..3).for_each(|_| attend(&mut session, &mut cache, &in_window, [4, 4]).unwrap());
                attend(&mut session, &mut cache, &in_window, [3, 1]).unwrap_err()
            },
            "Or use CacheOptions::rollback, which keeps more keys.",
        ),
        entry(
            "Session::attend_cached with a bias tensor after keys were dropped",
            bias_after_window,
            "Its columns are positions.",
        ),
        entry(
            "Session::attend_cached with a full mask after tokens in the middle of a rank's memory were truncated",
            {
                // The survivor has tokens 4 to 7 in its first rows, and the restored ones behind them.
                let (device, cache) = of_two_ranks().remove(1);
                let mut survivor = Session::new(in_process_group(1).remove(0), device);
                let mut cache = cache.after_loss(&[Rank(1)]).unwrap();
                survivor.restore(&mut cache, &tensor(4, 2), &tensor(4, 2)).unwrap();
                cache.truncate(6).unwrap();
                let full = Attention::new().execution(Execution::new().same_queries());
                attend(&mut survivor, &mut cache, &full, [1, 0]).unwrap_err()
            },
            "Rows that hold nothing look like keys behind all queries.",
        ),
        entry(
            "Session::attend_cached, where rank 1 appends 2 tokens and rank 0 one, with same_queries",
            of_two(|session, odd| {
                let mut cache = session.kv_cache(options()).unwrap();
                attend(session, &mut cache, &decoding(), [0, if odd { 2 } else { 1 }]).unwrap_err()
            }),
            "The error is the same on all ranks.",
        ),
        entry(
            "Session::attend_cached with a cache of another group",
            {
                let (device, mut cache) = of_two_ranks().remove(0);
                let mut alone = Session::new(in_process_group(1).remove(0), device);
                attend(&mut alone, &mut cache, &decoding(), [1, 1]).unwrap_err()
            },
            "A cache belongs to a rank of a group.",
        ),
        entry(
            "Session::attend_cached with a cache of another device",
            {
                let mut cache = session().kv_cache(options()).unwrap();
                attend(&mut session(), &mut cache, &decoding(), [1, 1]).unwrap_err()
            },
            "Two devices that were opened are not the same device.",
        ),
        entry(
            "Session::attend_cached with int8 on the wire after keys were dropped",
            int8_after_window,
            "Keys that are gone would share scales with those that are left.",
        ),
        entry(
            "Session::cached_calls on caches of 8 and of 0 tokens",
            {
                let mut session = session();
                let mut caches = [0, 1].map(|_| session.kv_cache(options()).unwrap());
                attend(&mut session, &mut caches[0], &decoding(), [8, 8]).unwrap();
                let one = tensor(1, 2);
                session.cached_calls(&decoding(), &mut caches, &one, &one, &one).unwrap_err()
            },
            "The layers of a model have the same tokens.",
        ),
        entry(
            "Session::cached_calls on no cache",
            session()
                .cached_calls(&decoding(), &mut [], &tensor(1, 2), &tensor(1, 2), &tensor(1, 2))
                .unwrap_err(),
            "Or make no calls.",
        ),
        entry(
            "CachedCalls::attend for the second time, after Session::cached_calls on one cache",
            {
                let (mut session, one) = (session(), tensor(1, 2));
                let mut caches = [session.kv_cache(options()).unwrap()];
                let mut calls = session.cached_calls(&decoding(), &mut caches, &one, &one, &one).unwrap();
                calls.attend(&one, &one, &one).unwrap();
                calls.attend(&one, &one, &one).unwrap_err()
            },
            "Vote again for the next step.",
        ),
        entry(
            "Session::attend_cached after the loss of a rank",
            missing,
            "KvCache::missing names the tokens.",
        ),
        entry("Session::restore with too few keys", few, "In the order of KvCache::missing."),
        entry(
            "Session::restore, where rank 1 truncated its cache",
            of_two(|session, odd| {
                let mut cache = session.kv_cache(options()).unwrap();
                attend(session, &mut cache, &decoding(), [4, 4]).unwrap();
                if odd {
                    cache.truncate(3).unwrap();
                }
                session.restore(&mut cache, &tensor(0, 2), &tensor(0, 2)).unwrap_err()
            }),
            "All ranks have the same record of the cache.",
        ),
        entry(
            "KvCache::truncate of more tokens than the window keeps",
            truncated,
            "Keys behind the window are gone.",
        ),
        entry(
            "KvCache::after_loss with ranks that do not exist",
            session().kv_cache(options()).unwrap().after_loss(&[Rank(3)]).unwrap_err(),
            "Ranks are those of the group that made the cache.",
        ),
        entry(
            "Placement::with_spare with one number for two ranks",
            place.with_spare(vec![1]).unwrap_err(),
            "0 for none.",
        ),
        entry(
            "plans for queries on every rank, with strategy ring",
            plan(&same, Strategy::Ring),
            "Keys need not travel.",
        ),
        entry(
            "an attention problem with queries on every rank and results for one",
            same.clone().with_results(Results::One(Rank(0))).unwrap_err(),
            "Take the rows on that rank.",
        ),
        entry("plans with results for rank 2 of 2", plan(&third, Strategy::Ring), "Ranks count from 0."),
    ]
}
