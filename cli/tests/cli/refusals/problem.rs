//! Refusals of problems: shapes, numbers and dtypes that do not define attention, or are larger
//! than any kernel supports; and of options that a command does not have.

use bytes::Bytes;
use kyklos::host::{Tensors, shard};
use kyklos::{
    AttentionProblem, BiasKind, BiasTensor, Mesh, PlacementKind, Results, Split, Strategy, TokenRuns,
    plan_forward, plan_rows,
};
use kyklos_transport::Rank;

use super::{of_calls, of_program, problem};
use crate::support::transcript_holds;

const COMMANDS: &[&str] = &[
    "attend",
    "attend --shape 1,64,8,2",
    "attend --shape 1,64,8,2,64,1",
    "attend --shape 1,-64,8,2,64",
    "attend --shape 1,99999999999,8,2,64",
    "bench --device cpu --shape 1,16,3,2,8",
    "attend --shape 1,64,8,2,sixty",
    "attend --shape 0,64,8,2,64",
    "attend --shape 1,64,8,3,64",
    "attend --shape 1,64,8,2,60",
    "attend --shape 1,4294967295,8,2,64",
    "attend --shape 4294967295,1073741824,1048576,1,512",
    "attend --shape 4294967295,0,1,1,8",
    "attend --input DIR/empty-batch",
    "ATTEND --q-offset 4294967290",
    "ATTEND --dtype f64",
    "ATTEND --scale inf",
    "ATTEND --softcap -1",
    "ATTEND --softcap 1e31",
    "attend --shape 1,2000000000,64,64,512",
    "plan --shape 1,134217728,8,2,64",
    "bench --device cpu --repeat 0",
    "ATTEND --repeat 0",
    "ATTEND --repeat often",
    "ATTEND --port 65536",
    "ATTEND --scale big",
    "ATTEND --bind node1",
    "ATTEND --metrics 9000",
    "ATTEND --transport",
    "ATTEND --progress loud",
    "ATTEND --input x",
    "attend --input x --seed 1",
    "attend --input x --sinks",
    "ATTEND --sinks=x",
    "ATTEND --bias x",
    "ATTEND more",
    "plan",
    "plan --shape 1,64,8,2,64 --verify",
    "fly",
    "--nonsense",
];

#[test]
fn problems() {
    let zeros = |bytes: usize| Bytes::from(vec![0; bytes]);
    let whole = Tensors { q: zeros(8 * 2 * 8 * 4), k: zeros(8 * 8 * 4), v: zeros(8 * 8 * 4), bias: None };
    let short = Tensors { q: zeros(8), ..whole.clone() };
    let bias = |batch| BiasTensor { kind: BiasKind::Additive, batch, heads: 1, shared_rows: false };
    let no_keys = problem().with_keys(0).unwrap();
    let dense = |problem: &AttentionProblem| {
        let one = Mesh::new(1, 1).unwrap();
        plan_forward(problem, one, PlacementKind::Contiguous, &Split::Even, Strategy::Dense).unwrap()
    };
    let with_bias = dense(&problem().with_bias(Some(bias(1))).unwrap());
    let same = problem().with_same_queries(true).unwrap();
    let calls = of_calls([
        (
            "AttentionProblem::with_sinks with 3 of them for 2 heads",
            problem().with_sinks(vec![0.0; 3]).unwrap_err(),
        ),
        (
            "AttentionProblem::with_bias, a tensor of 3 batch entries",
            problem().with_bias(Some(bias(3))).unwrap_err(),
        ),
        ("AttentionProblem::with_bias without keys", no_keys.with_bias(Some(bias(1))).unwrap_err()),
        (
            "AttentionProblem::with_bias_gradient without a bias",
            problem().with_bias_gradient(true).unwrap_err(),
        ),
        (
            "AttentionProblem::with_results for one, with queries on every rank",
            same.with_results(Results::One(Rank(0))).unwrap_err(),
        ),
        ("plan_rows with row 8", plan_rows(&problem(), TokenRuns::contiguous(8..9)).unwrap_err()),
    ]);
    let shards = of_calls([
        ("host::shard with a short q", shard(&dense(&problem()), Rank(0), &short).unwrap_err()),
        (
            "host::shard without the attention bias tensor that the problem has",
            shard(&with_bias, Rank(0), &whole).unwrap_err(),
        ),
    ]);
    transcript_holds("problem", &(of_program(COMMANDS) + &calls + &shards));
}
