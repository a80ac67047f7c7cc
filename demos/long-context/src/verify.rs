//! The attention of the last token against f64.

use kyklos_oracle::inputs::TensorId;
use kyklos_oracle::oracle::{Dtype, Oracle, OracleMask, OracleProblem, Row, RowId, Values};
use kyklos_oracle::tolerance::{Context, Limit, compare_rows, naive_f32_rows};

use crate::Error;
use crate::model::{DIM, HEADS, KV_HEADS, LAYERS, values};

/// How a right result compares.
pub(crate) struct Verdict {
    pub(crate) max_abs_error: f64,
    pub(crate) tolerance: f64,
}

/// Compares the o and lse of the last of `tokens` tokens in the last layer with f64. The tolerance
/// is that of one device: twice the error of plain f32 arithmetic, and the rounding of the output.
///
/// # Errors
/// If the result is wrong.
pub(crate) fn verify(tokens: usize, (o, lse): &(Vec<f32>, Vec<f32>)) -> Result<Verdict, Error> {
    let problem = OracleProblem {
        batch: 1,
        q_len: 1,
        kv_len: tokens,
        q_heads: HEADS,
        kv_heads: KV_HEADS,
        head_dim: DIM,
        scale: 1.0 / (DIM as f64).sqrt(),
        softcap: None,
        mask: OracleMask::causal(),
        q_offset: tokens as u64 - 1,
        sinks: Vec::new(),
    };
    let layer = LAYERS - 1;
    let q = values(layer, TensorId::Q, HEADS, tokens - 1..tokens);
    let k = values(layer, TensorId::K, KV_HEADS, 0..tokens);
    let v = values(layer, TensorId::V, KV_HEADS, 0..tokens);
    let oracle = Oracle::new(&problem, Values::F32(&q), Values::F32(&k), Values::F32(&v))?;
    let expected = oracle.all_rows();
    let compare = |rows: &[Row], who: &str| {
        let context = Context { case: "the last token".into(), backend: who.into(), ..Context::default() };
        compare_rows(&problem, Dtype::F32, rows, &expected, &context)
    };
    let row = |head: usize| Row {
        id: RowId { batch: 0, row: 0, head },
        o: o[head * DIM..(head + 1) * DIM].iter().copied().map(f64::from).collect(),
        lse: f64::from(lse[head]),
    };
    let compared = compare(&(0..HEADS).map(row).collect::<Vec<_>>(), "the cache");
    let naive = compare(&naive_f32_rows(&oracle, &problem.row_ids()), "plain f32");
    let limit = Limit::dense(Dtype::F32, &naive);
    compared.within(&limit)?;
    Ok(Verdict { max_abs_error: compared.max_abs_error, tolerance: limit.o_abs() })
}
