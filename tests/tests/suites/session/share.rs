//! Tokens that are shared by the speed of devices.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use kyklos::backend::cpu::CpuBackend;
use kyklos::backend::{Device, StateShape};
use kyklos::local::on_threads;
use kyklos::{
    AttentionProblem, BlockWork, Clock, Dtype, Error, Execution, Mesh, PlacementKind, Result, RowSpan,
    RunOptions, Session, SessionOptions, SharedTokens, Split, Strategy, TokenRuns, plan_placed,
};
use kyklos_backend_suite::{Observed, Observer, Prepared, RankOutput, Whole};
use kyklos_oracle::inputs::cases;
use kyklos_transport::{Group, Rank, in_process_group};

use super::{call_of, parts};
use crate::amount::amount;

/// A device in simulated time, and its clock: only attend steps take time, as long as their work
/// says. So the shares of a test do not depend on the load of the machine that runs it.
#[derive(Debug)]
struct Simulated {
    now_ns: AtomicU64,
    ns_per_pair: AtomicU64,
}

impl Simulated {
    fn new(ns_per_pair: u64) -> Arc<Self> {
        Arc::new(Self { now_ns: 0.into(), ns_per_pair: ns_per_pair.into() })
    }

    fn session(self: Arc<Self>, transport: Group, memory_bytes: Option<u64>) -> Session {
        let run = RunOptions { clock: self.clone(), ..RunOptions::default() };
        let options = SessionOptions { run, memory_bytes, ..SessionOptions::default() };
        let device = Device::new(Observed { backend: CpuBackend::new(), observer: self });
        Session::with_options(transport, device, options)
    }
}

impl Observer for Simulated {
    fn attended(&self, work: &BlockWork, shape: StateShape) {
        let rows = work.classes.iter().flat_map(|class| class.rows.iter());
        let seen = |row: &RowSpan| work.kv_positions.iter().filter(|position| row.sees(**position)).count();
        // One mask for all batch entries counts once for each.
        let pairs = rows.map(seen).sum::<usize>() * shape.heads * shape.batch / work.classes.len();
        self.now_ns.fetch_add(STEP_NS + pairs as u64 * self.ns_per_pair.load(Relaxed), Relaxed);
    }
}

impl Clock for Simulated {
    fn now_ns(&self) -> u64 {
        self.now_ns.load(Relaxed)
    }
}

/// A session whose device takes so long for each pair.
fn session(transport: Group, ns_per_pair: u64, memory_bytes: Option<u64>) -> Session {
    Simulated::new(ns_per_pair).session(transport, memory_bytes)
}

fn problem(tokens: u32, mask: &str) -> AttentionProblem {
    AttentionProblem::new([1, tokens, 4, 2, 16], Dtype::F32, mask.parse().unwrap()).unwrap()
}

fn counts(shared: &SharedTokens) -> Vec<usize> {
    shared.queries.ranks().iter().map(TokenRuns::len).collect()
}

/// What each of three ranks does whose devices take so long for each pair.
fn on_unlike<T: Send>(
    ns_per_pair: [u64; 3],
    run: impl Fn(&mut Session) -> Result<T> + Sync,
) -> Vec<Result<T>> {
    on_threads(in_process_group(3), |transport| {
        let rank = transport.rank().0 as usize;
        run(&mut session(transport, ns_per_pair[rank], None))
    })
}

#[test]
fn a_device_that_is_much_slower_gets_fewer_tokens_and_all_ranks_agree() {
    for (placement, mask) in [(PlacementKind::Contiguous, "full"), (PlacementKind::Zigzag, "causal")] {
        let problem = problem(3000, mask);
        let execution = Execution::new().placement(placement);
        let all = on_unlike([1, 40, 6], |session| {
            // Nothing was computed in between, so nothing changes.
            Ok([session.share(&problem, &execution)?, session.share(&problem, &execution)?])
        });
        let all: Vec<_> = all.into_iter().map(Result::unwrap).collect();
        let shared = &all[0][0];
        assert!(all.iter().flatten().all(|other| other == shared), "{all:?}");
        let counts = counts(shared);
        assert_eq!(counts.iter().sum::<usize>(), 3000);
        assert!(counts[1] < counts[2] && counts[2] < counts[0], "{counts:?}");
        if mask == "full" {
            // Tokens in proportion to 1, 1/40 and 1/6, but for the times of steps and of first calls.
            let off = |(count, ideal): (&usize, usize)| count.abs_diff(ideal) > ideal / 20;
            assert!(!counts.iter().zip([2517, 63, 420]).any(off), "{counts:?}");
        }
    }
}

#[test]
fn calls_with_shared_tokens_agree_with_the_oracle() {
    for (index, case) in cases().into_iter().enumerate().filter(|(index, _)| index % amount(8, 2) == 0) {
        let prepared = Prepared::new(case, Dtype::ALL[index % 3]);
        let problem = &prepared.problem;
        if problem.bias.is_some() || problem.fixed_order {
            continue;
        }
        let alone = crate::strategies::run_on_cpu(&crate::strategies::dense(problem), &prepared);
        let limit = prepared.parallel_limit(&prepared.judge(&alone, "cpu alone"));
        let execution = Execution::new().placement(PlacementKind::ALL[index % PlacementKind::ALL.len()]);
        let outputs = on_unlike([2, 30, 1], |session| {
            let shared = session.share(problem, &execution)?;
            let (q, kv) = (shared.queries.clone(), shared.keys.clone());
            let mesh = shared.candidate.mesh;
            let set = plan_placed(problem, mesh, q, kv, shared.candidate.strategy)?;
            let (q, k, v) = parts(&prepared, &set, session.rank());
            let call = call_of(problem, shared.execution(execution.clone()));
            let output = session.attend(&call, &q, &k, &v)?;
            Ok((set, pollster::block_on(RankOutput::of(output))?))
        });
        let outputs: Vec<_> = outputs.into_iter().map(Result::unwrap).collect();
        let mut whole = Whole::new(&outputs[0].0);
        outputs.iter().enumerate().for_each(|(rank, (set, output))| whole.add(set, rank, output));
        prepared.judge(&whole, "shared tokens").assert_within(&limit);
    }
}

#[test]
fn shares_follow_the_calls_of_a_session() {
    let problem = problem(3000, "full");
    let counts = on_threads(in_process_group(2), |transport| {
        let device = Simulated::new(1);
        let mut session = device.clone().session(transport, None);
        let mut seen = Vec::new();
        for round in 0..6 {
            let shared = session.share(&problem, &Execution::new())?;
            seen.push(counts(&shared));
            if round == 0 && session.rank() == Rank(1) {
                device.ns_per_pair.store(50, Relaxed);
            }
            let tokens = shared.queries.of_rank(session.rank()).len();
            let tensor = |heads: usize| {
                kyklos::Tensor::new([1, tokens, heads, 16], vec![0.5_f32; tokens * heads * 16])
            };
            let (q, kv) = (tensor(4)?, tensor(2)?);
            session.attend(&call_of(&problem, shared.execution(Execution::new())), &q, &kv, &kv)?;
        }
        Ok::<_, Error>(seen)
    });
    let [first, second] = counts.try_into().unwrap_or_else(|_| panic!("two ranks"));
    let (first, second) = (first.unwrap(), second.unwrap());
    assert_eq!(first, second);
    assert_eq!(first[0], [1500, 1500], "{first:?}");
    assert!(first.windows(2).all(|pair| pair[1][1] <= pair[0][1]), "{first:?}");
    assert!((50..120).contains(&first[5][1]), "a fiftieth, or some more after few calls: {first:?}");
}

#[test]
fn shares_keep_within_the_memory_of_a_rank() {
    let problem = problem(3000, "causal");
    let all = on_threads(in_process_group(2), |transport| {
        let memory = (transport.rank() == Rank(0)).then_some(1_450_000);
        session(transport, 1, memory).share(&problem, &Execution::new())
    });
    for shared in all {
        let shared = shared.unwrap();
        assert_eq!(shared.shares.limited, [Rank(0)]);
        assert!(counts(&shared)[0] < counts(&shared)[1]);
    }
}

#[test]
fn tokens_stay_even_where_work_cannot_be_shared_by_queries() {
    let even = |problem: &AttentionProblem, execution: Execution| {
        let all = on_unlike([1, 40, 6], |session| session.share(problem, &execution));
        let all: Vec<_> = all.into_iter().map(Result::unwrap).collect();
        assert!(all.iter().all(|shared| shared.shares.split == Split::Even), "{all:?}");
    };
    let full = problem(3072, "full");
    even(&full.clone().with_fixed_order(true).unwrap(), Execution::new());
    even(&full, Execution::new().strategy(Strategy::PassQ));
    let heads = AttentionProblem::new([1, 300, 6, 3, 16], Dtype::F32, "full".parse().unwrap()).unwrap();
    even(&heads, Execution::new().mesh(Mesh::new(3, 1).unwrap()));
}

#[test]
fn ranks_that_share_other_tokens_get_one_error_and_stay_usable() {
    let all = on_unlike([1, 40, 6], |session| {
        let tokens = if session.rank() == Rank(1) { 301 } else { 300 };
        let error = session.share(&problem(tokens, "full"), &Execution::new()).unwrap_err();
        session.share(&problem(300, "full"), &Execution::new())?;
        // A mesh of other ranks is refused by the rank that names it.
        let mesh = Mesh::new(1, if session.rank() == Rank(2) { 2 } else { 3 })?;
        let refused = session.share(&problem(300, "full"), &Execution::new().mesh(mesh)).unwrap_err();
        session.share(&problem(300, "full"), &Execution::new())?;
        Ok([error.to_string(), refused.to_string()])
    });
    for texts in all {
        let [error, refused] = texts.unwrap();
        assert!(error.contains("rank 1 shares the tokens of another problem than rank 0"), "{error}");
        assert!(refused.contains("mesh 1x2 for 3 ranks"), "{refused}");
    }
}

/// Of each attend step.
const STEP_NS: u64 = 1000;
