//! A result against attention in f64, on a sample of rows, within the tolerance of the reference.

use kyklos::AttentionProblem;
use kyklos_oracle::inputs::sample_rows;
use kyklos_oracle::oracle::{Dtype, Oracle, OracleError, OracleMask, OracleProblem, OracleTerm, Row, Values};
use kyklos_oracle::tolerance::{Context, Limit, compare_rows, naive_f32_rows};
use wasm_bindgen::prelude::wasm_bindgen;

/// How a result compares.
#[wasm_bindgen(getter_with_clone)]
pub struct Verdict {
    /// Rows compared; a row is one query token of one head.
    pub rows: usize,
    /// The largest error of an element of the output.
    pub error: f64,
    /// The largest error that the reference allows.
    pub tolerance: f64,
    /// Set when the result is wrong.
    pub failure: Option<String>,
}

/// The call in the words of the reference.
pub(crate) fn problem_of(problem: &AttentionProblem, mask: &str, window: u32) -> OracleProblem {
    OracleProblem {
        batch: 1,
        q_len: problem.q_len as usize,
        kv_len: problem.kv_len as usize,
        q_heads: problem.q_heads as usize,
        kv_heads: problem.kv_heads as usize,
        head_dim: problem.head_dim as usize,
        scale: f64::from(problem.scale),
        softcap: None,
        mask: match mask {
            "causal" => OracleMask::causal(),
            "window" => OracleMask::full().and(OracleTerm::Window { left: i64::from(window), right: 0 }),
            _ => OracleMask::full(),
        },
        q_offset: 0,
        sinks: Vec::new(),
    }
}

/// Compares `o` `[tokens, heads, dim]` and `lse` `[tokens, heads]`, of inputs of this type, with the reference.
pub(crate) fn verify(
    problem: &OracleProblem,
    dtype: Dtype,
    [q, k, v]: [&[f32]; 3],
    o: &[f32],
    lse: &[f32],
) -> Result<Verdict, OracleError> {
    let oracle = Oracle::new(problem, Values::F32(q), Values::F32(k), Values::F32(v))?;
    let ids = sample_rows(problem, ROWS, SEED);
    let expected = oracle.rows(&ids);
    let actual: Vec<Row> = ids
        .iter()
        .map(|&id| {
            let start = problem.o_index(id);
            let values = &o[start..start + problem.head_dim];
            let lse = f64::from(lse[id.row * problem.q_heads + id.head]);
            Row { id, o: values.iter().copied().map(f64::from).collect(), lse }
        })
        .collect();
    let compare = |rows: &[Row]| compare_rows(problem, dtype, rows, &expected, &Context::default());
    let limit = Limit::dense(dtype, &compare(&naive_f32_rows(&oracle, &ids)));
    let comparison = compare(&actual);
    Ok(Verdict {
        rows: ids.len(),
        error: comparison.max_abs_error,
        tolerance: limit.o_abs(),
        failure: comparison.within(&limit).err().map(|failure| failure.to_string()),
    })
}

const ROWS: usize = 64;
const SEED: u64 = 0;
