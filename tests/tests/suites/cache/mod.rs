//! Caches of keys and values: calls in any order of appending, decoding, truncating and dropping
//! give the rows that one call over all tokens gives.

mod layers;
mod limits;

use kyklos::backend::Device;
use kyklos::host::{layouts, scatter_lse};
use kyklos::local::on_threads;
use kyklos::{
    Attention, CacheOptions, Dtype, Execution, KvCache, Mask, Mesh, Output, PlacementKind, Result, Session,
    Split, Strategy, Tensor, TokenRuns, plan_forward,
};
use kyklos_oracle::inputs::Case;
use kyklos_oracle::oracle::{OracleMask, OracleProblem};
use kyklos_oracle::tolerance::{Comparison, discriminates};
use kyklos_transport::quic::quic_loopback_group;
use kyklos_transport::{Group, Rank, in_process_group};

use crate::amount::amount;
use crate::plan_properties::Random;
use kyklos_backend_suite::{Prepared, Whole, oracle_dtype};

/// One call of a script.
#[derive(Clone, Debug)]
enum Step {
    /// Each rank passes so many tokens of its own.
    Own(Vec<u32>),
    /// All ranks pass the same tokens.
    Same(u32),
    /// All ranks pass this many tokens that are wrong, and take them back.
    Rejected(u32),
}

impl Step {
    /// Tokens that stay.
    fn tokens(&self) -> u32 {
        match self {
            Self::Own(counts) => counts.iter().sum(),
            Self::Same(count) => *count,
            Self::Rejected(_) => 0,
        }
    }
}

/// A causal sequence, and the calls in which the ranks append it to a cache and attend to it.
struct Script {
    prepared: Prepared,
    ranks: u32,
    options: CacheOptions,
    steps: Vec<Step>,
}

/// A sequence of `tokens` tokens under `mask`.
fn sequence(
    tokens: usize,
    [batch, group, kv_heads, dim]: [usize; 4],
    dtype: Dtype,
    mask: OracleMask,
) -> Prepared {
    let problem = OracleProblem {
        batch,
        q_len: tokens,
        kv_len: tokens,
        q_heads: group * kv_heads,
        kv_heads,
        head_dim: dim,
        scale: 0.3,
        softcap: None,
        mask,
        q_offset: 0,
        sinks: vec![],
    };
    let case = Case { name: "a cached sequence", seed: 17, problem, poison: Vec::new(), bias: None };
    Prepared::new(case, dtype)
}

fn options_for(prepared: &Prepared) -> CacheOptions {
    let problem = &prepared.problem;
    CacheOptions::new([problem.batch, problem.kv_heads, problem.head_dim], problem.dtype)
}

impl Script {
    /// Query, key and value of these tokens.
    fn tensors(&self, tokens: &TokenRuns) -> [Tensor; 3] {
        let problem = &self.prepared.problem;
        let size = dense(&self.prepared);
        let (q, kv) = layouts(&size);
        let tensor = |bytes: bytes::Bytes, heads: u32| {
            let shape = [problem.batch as usize, tokens.len(), heads as usize, problem.head_dim as usize];
            Tensor::from_bytes(shape, problem.dtype, bytes).unwrap()
        };
        let tensors = &self.prepared.tensors;
        [
            tensor(q.gather(&tensors.q, tokens).unwrap(), problem.q_heads),
            tensor(kv.gather(&tensors.k, tokens).unwrap(), problem.kv_heads),
            tensor(kv.gather(&tensors.v, tokens).unwrap(), problem.kv_heads),
        ]
    }

    /// The call of a step.
    fn call(&self, step: &Step) -> Attention {
        let execution = match step {
            Step::Own(_) => Execution::new(),
            Step::Same(_) | Step::Rejected(_) => Execution::new().same_queries(),
        };
        Attention::new()
            .mask(self.prepared.problem.mask.clone())
            .scale(self.prepared.problem.scale)
            .execution(execution)
    }

    /// One rank's calls: for each output the positions of its rows.
    fn run(&self, session: &mut Session, cache: &mut KvCache) -> Result<Vec<(TokenRuns, Output)>> {
        let mut outputs = Vec::new();
        for step in &self.steps {
            let at = cache.len();
            let tokens = match step {
                Step::Own(counts) => {
                    let rank = session.rank().0 as usize;
                    let first = at + counts[..rank].iter().sum::<u32>();
                    TokenRuns::contiguous(first..first + counts[rank])
                }
                Step::Same(count) => TokenRuns::contiguous(at..at + count),
                // The first tokens again: not the ones that belong here.
                Step::Rejected(count) => TokenRuns::contiguous(0..*count),
            };
            let [q, k, v] = self.tensors(&tokens);
            let output = session.attend_cached(&self.call(step), cache, &q, &k, &v)?;
            match step {
                Step::Rejected(_) => cache.truncate(at)?,
                _ => outputs.push((tokens, output)),
            }
        }
        Ok(outputs)
    }

    /// All rows, from the calls of all ranks, which must have the same bytes where they have the
    /// same rows.
    fn collect(&self, ranks: &[Vec<(TokenRuns, Output)>]) -> Whole {
        let (problem, set) = (&self.prepared.problem, dense(&self.prepared));
        let mut whole = Whole::new(&set);
        for (index, step) in self.steps.iter().filter(|step| !matches!(step, Step::Rejected(_))).enumerate() {
            let outputs: Vec<_> = ranks.iter().map(|outputs| &outputs[index]).collect();
            let bytes = |tensor: &Tensor| pollster::block_on(tensor.bytes()).unwrap();
            if let Step::Same(_) = step {
                for (_, output) in &outputs {
                    assert_eq!(bytes(&output.o), bytes(&outputs[0].1.o), "{step:?}");
                    assert_eq!(bytes(&output.lse), bytes(&outputs[0].1.lse), "{step:?}");
                }
            }
            for (tokens, output) in outputs {
                layouts(&set).0.scatter(&bytes(&output.o), tokens, &mut whole.o).unwrap();
                let lse: Vec<f32> = bytemuck::pod_collect_to_vec(&bytes(&output.lse));
                let (batch, heads) = (problem.batch as usize, problem.q_heads as usize);
                scatter_lse(&lse, batch, heads, tokens, &mut whole.lse);
            }
        }
        whole
    }

    fn compare(&self, group: Vec<Group>, device: impl Fn() -> Device + Sync) -> Comparison {
        assert_eq!(group.len(), self.ranks as usize);
        let outputs = on_threads(group, |transport| {
            let mut session = Session::new(transport, device());
            let mut cache = session.kv_cache(self.options.clone()).unwrap();
            self.run(&mut session, &mut cache).unwrap_or_else(|error| panic!("{:?}: {error}", self.steps))
        });
        self.prepared.judge(&self.collect(&outputs), "a cache")
    }

    fn judge(&self) {
        let alone = crate::strategies::run_on_cpu(&dense(&self.prepared), &self.prepared);
        let limit = self.prepared.parallel_limit(&self.prepared.judge(&alone, "cpu alone"));
        self.compare(in_process_group(self.ranks), Device::cpu).assert_within(&limit);
    }
}

fn dense(prepared: &Prepared) -> kyklos::plan::PlanSet {
    let one = Mesh::new(1, 1).unwrap();
    plan_forward(&prepared.problem, one, PlacementKind::Contiguous, &Split::Even, Strategy::Dense).unwrap()
}

/// Calls that append `tokens` tokens; `rollback` of them may be wrong at a time.
fn any_steps(tokens: u32, ranks: u32, rollback: u32, chance: &mut Random) -> Vec<Step> {
    let mut steps = vec![];
    let mut left = tokens;
    while left > 0 {
        let count = (1 + chance.below(12)).min(left);
        let step = match chance.below(4) {
            0 => Step::Own((0..ranks).map(|rank| if rank == count % ranks { count } else { 0 }).collect()),
            1 => Step::Own((0..ranks).map(|rank| count / ranks + u32::from(rank < count % ranks)).collect()),
            2 if rollback > 0 && left < tokens => {
                Step::Rejected(1 + chance.below(rollback.min(tokens - left)))
            }
            _ => Step::Same(count),
        };
        left -= step.tokens();
        steps.push(step);
    }
    steps
}

#[test]
fn any_order_of_calls_gives_the_rows_of_one_call() {
    let mut chance = Random(23);
    for round in 0..amount(24, 300) {
        let ranks = 1 + chance.below(4);
        let dtype = Dtype::ALL[round % 3];
        let shape = [
            1 + round % 2,
            1 + chance.below(3) as usize,
            1 + chance.below(2) as usize,
            [8, 24, 64][round % 3],
        ];
        let windows = chance.below(2) == 0;
        let (left, rollback) = (chance.below(30), chance.below(6));
        let mask = match windows {
            true => format!("window:{left},0"),
            false => "causal".to_owned(),
        };
        let prepared = sequence(60 + chance.below(60) as usize, shape, dtype, mask.parse().unwrap());
        let mut options = options_for(&prepared).block(1 + chance.below(20)).rollback(rollback);
        if windows {
            options = options.window(left + 1 + chance.below(4));
        }
        let rollback = if windows { rollback } else { 9 };
        let steps = any_steps(prepared.problem.q_len, ranks, rollback, &mut chance);
        Script { prepared, ranks, options, steps }.judge();
    }
}

/// The planted bugs: a key of another token, and a cache that forgets a truncation.
#[test]
fn wrong_keys_are_caught() {
    let prepared = sequence(60, [1, 2, 2, 24], Dtype::F32, OracleMask::causal());
    let options = options_for(&prepared).block(4);
    let right = Script { prepared, ranks: 3, options, steps: vec![Step::Own(vec![10; 3]), Step::Same(30)] };
    let good = right.compare(in_process_group(3), Device::cpu);
    let limit = right.prepared.parallel_limit(&good);
    good.assert_within(&limit);
    let mut wrong = sequence(60, [1, 2, 2, 24], Dtype::F32, OracleMask::causal());
    let row = 2 * 24 * 4;
    let mut keys = wrong.tensors.k.to_vec();
    (0..row).for_each(|at| keys.swap(20 * row + at, 40 * row + at));
    wrong.tensors.k = keys.into();
    let wrong = Script { prepared: wrong, ..right };
    let bad = wrong.compare(in_process_group(3), Device::cpu);
    assert!(bad.within(&limit).is_err(), "two swapped keys pass: {bad}");
    discriminates(good.max_abs_error, bad.max_abs_error, oracle_dtype(Dtype::F32)).unwrap();
}

/// A prompt that is split, then 1,000 tokens one by one, over 2 to 4 ranks in one process, and over
/// QUIC.
#[test]
fn a_thousand_decoded_tokens_agree_with_the_oracle() {
    let (prompt, decoded) = (96, amount(100, 1000) as u32);
    for ranks in 2..=4 {
        let shape = [1, 2, 2, 32];
        let prepared = sequence((prompt + decoded) as usize, shape, Dtype::F32, OracleMask::causal());
        let mut steps = vec![Step::Own(
            (0..ranks).map(|rank| if rank == 0 { 96 % ranks + 96 / ranks } else { 96 / ranks }).collect(),
        )];
        steps.extend((0..decoded).map(|_| Step::Same(1)));
        let options = options_for(&prepared).block(32);
        let script = Script { prepared, ranks, options, steps };
        script.judge();
        let alone = crate::strategies::run_on_cpu(&dense(&script.prepared), &script.prepared);
        let limit = script.prepared.parallel_limit(&script.prepared.judge(&alone, "cpu alone"));
        script.compare(quic_loopback_group(ranks).unwrap(), Device::cpu).assert_within(&limit);
    }
}

/// Tokens that all ranks pass are spread over them, by their shares.
#[test]
fn new_tokens_are_spread_by_the_shares_of_the_ranks() {
    let prepared = sequence(120, [1, 1, 1, 8], Dtype::F32, OracleMask::causal());
    let script = Script {
        ranks: 3,
        options: options_for(&prepared).block(5),
        steps: vec![Step::Same(20); 6],
        prepared,
    };
    let held = on_threads(in_process_group(3), |transport| {
        let share = [1.0, 0.0, 2.0][transport.rank().0 as usize];
        let mut session = Session::new(transport, Device::cpu());
        let mut cache = session.kv_cache(script.options.clone().share(share)).unwrap();
        script.run(&mut session, &mut cache).unwrap();
        assert!(cache.bytes() >= 64 * cache.tokens(session.rank()).len() as u64);
        [0, 1, 2].map(|rank| cache.tokens(Rank(rank)).len())
    });
    assert_eq!(held, [[40, 0, 80]; 3]);
}

/// The keys of a lost rank are computed again, and the survivors go on.
#[test]
fn survivors_restore_the_keys_of_a_lost_rank() {
    let prepared = sequence(70, [2, 2, 1, 16], Dtype::F32, OracleMask::causal());
    let before = vec![Step::Own(vec![10, 12, 8]), Step::Same(20)];
    let options = options_for(&prepared).block(4);
    let script = Script { prepared, ranks: 3, options, steps: before };
    let caches = on_threads(in_process_group(3), |transport| {
        let mut session = Session::new(transport, Device::cpu());
        let mut cache = session.kv_cache(script.options.clone()).unwrap();
        script.run(&mut session, &mut cache).unwrap();
        (session.device().clone(), cache)
    });
    let mut caches: Vec<_> = caches.into_iter().map(Some).collect();
    caches.remove(1);
    let after = Script { steps: vec![Step::Same(5), Step::Same(15)], ranks: 2, ..script };
    let caches = std::sync::Mutex::new(caches);
    let outputs = on_threads(in_process_group(2), |transport| {
        let (device, cache) = caches.lock().unwrap()[transport.rank().0 as usize].take().unwrap();
        let mut session = Session::new(transport, device);
        let mut cache = cache.after_loss(&[Rank(0), Rank(2)]).unwrap();
        let missing = cache.missing().clone();
        assert!(missing.len() >= 12 + 4 && missing.iter().all(|token| token < 50));
        let [q, k, v] = after.tensors(&TokenRuns::contiguous(50..55));
        let call = after.call(&Step::Same(5));
        let error = session.attend_cached(&call, &mut cache, &q, &k, &v).unwrap_err();
        assert!(error.to_string().contains("lost the keys of the tokens"), "{error}");
        let [_, k, v] = after.tensors(&missing);
        session.restore(&mut cache, &k, &v).unwrap();
        assert!(cache.missing().is_empty());
        after.run(&mut session, &mut cache).unwrap()
    });
    let (set, problem) = (dense(&after.prepared), &after.prepared.problem);
    let alone = crate::strategies::run_on_cpu(&set, &after.prepared);
    let limit = after.prepared.parallel_limit(&after.prepared.judge(&alone, "cpu alone"));
    // The rows of before the loss are those of the run alone.
    let got = after.collect(&outputs);
    let mut whole = alone;
    let first = 50 * problem.q_heads as usize * problem.head_dim as usize * 4;
    let entry = 70 * problem.q_heads as usize * problem.head_dim as usize * 4;
    for batch in 0..2 {
        whole.o[batch * entry + first..(batch + 1) * entry]
            .copy_from_slice(&got.o[batch * entry + first..(batch + 1) * entry]);
    }
    for row in 0..4 {
        whole.lse[row * 70 + 50..(row + 1) * 70].copy_from_slice(&got.lse[row * 70 + 50..(row + 1) * 70]);
    }
    after.prepared.judge(&whole, "after a loss").assert_within(&limit);
}

/// The call of decoding.
pub(super) fn decoding() -> Attention {
    Attention::new().mask(Mask::causal()).execution(Execution::new().same_queries())
}
