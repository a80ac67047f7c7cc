//! The shared result against attention in f64, on a sample of rows.
//!
//! The tolerance is measured: the shared result may be at most twice as far from f64 as one device
//! alone, plus a rounding allowance.

use std::collections::HashMap;
use std::iter::once;

use kyklos::TokenRuns;
use kyklos_oracle::inputs::sample_rows;
use kyklos_oracle::oracle::{Dtype, Oracle, OracleMask, OracleProblem, Row, RowId, Values};
use kyklos_oracle::tolerance::{Comparison, Context, Limit, compare_rows};

use crate::call::{Call, Output};
use crate::error::Result;

/// How the shared result compares.
pub(crate) struct Verdict {
    pub(crate) rows: usize,
    pub(crate) max_abs_error: f64,
    pub(crate) tolerance: f64,
    /// Set when the result is wrong.
    pub(crate) failure: Option<String>,
}

/// Compares `together` with f64, within what `alone` allows.
pub(crate) fn verify(call: &Call, together: &Output, alone: &Output) -> Result<Verdict> {
    let problem = &call.set.problem;
    let oracle_problem = OracleProblem {
        batch: 1,
        q_len: problem.q_len as usize,
        kv_len: problem.kv_len as usize,
        q_heads: problem.q_heads as usize,
        kv_heads: problem.kv_heads as usize,
        head_dim: problem.head_dim as usize,
        scale: f64::from(problem.scale),
        softcap: None,
        mask: OracleMask::causal(),
        q_offset: 0,
        sinks: Vec::new(),
    };
    let ids = sample_rows(&oracle_problem, ROWS, SEED);
    let [q, k, v] = [&call.tensors.q, &call.tensors.k, &call.tensors.v];
    let floats = |bytes| Values::F32(bytemuck::cast_slice(bytes));
    let oracle = Oracle::new(&oracle_problem, floats(q), floats(k), floats(v))?;
    let expected = oracle.rows(&ids);
    let compare = |rows: &[Row], who: &str| -> Comparison {
        let context = Context { case: "the demonstration".into(), backend: who.into(), ..Context::default() };
        compare_rows(&oracle_problem, Dtype::F32, rows, &expected, &context)
    };

    let set = &call.set;
    let placements: Vec<TokenRuns> = (0..set.mesh.size())
        .map(|rank| set.q_placement.of_rank(kyklos_transport::Rank(rank)).clone())
        .collect();
    let shared = compare(&rows(&ids, &oracle_problem, placements.iter(), together), "all devices");
    let whole = TokenRuns::contiguous(0..problem.q_len);
    let dense = compare(&rows(&ids, &oracle_problem, once(&whole), alone), "the fastest device");
    let limit = Limit::parallel(Dtype::F32, &[&dense]);
    Ok(Verdict {
        rows: ids.len(),
        max_abs_error: shared.max_abs_error,
        tolerance: limit.o_abs(),
        failure: shared.within(&limit).err().map(|failure| failure.to_string()),
    })
}

/// The rows `ids` out of the ranks' outputs; `tokens` are those of each rank, in its order.
fn rows<'a>(
    ids: &[RowId],
    problem: &OracleProblem,
    tokens: impl Iterator<Item = &'a TokenRuns>,
    output: &Output,
) -> Vec<Row> {
    let mut home = HashMap::new();
    for (rank, tokens) in tokens.enumerate() {
        home.extend(tokens.iter().enumerate().map(|(index, token)| (token as usize, (rank, index))));
    }
    ids.iter()
        .map(|id| {
            let (rank, index) = home[&id.row];
            let (o, lse): (&[f32], &[f32]) =
                (bytemuck::cast_slice(&output.o[rank]), bytemuck::cast_slice(&output.lse[rank]));
            let row = index * problem.q_heads + id.head;
            let values = &o[row * problem.head_dim..(row + 1) * problem.head_dim];
            Row { id: *id, o: values.iter().copied().map(f64::from).collect(), lse: f64::from(lse[row]) }
        })
        .collect()
}

const ROWS: usize = 256;
const SEED: u64 = 0;
