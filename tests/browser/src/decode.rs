//! Few query rows against many keys, and tensors that no binding holds.

use kyklos::Dtype;
use kyklos::backend::Backend;
use kyklos::backend::wgpu::{WgpuBackend, WgpuOptions};
use kyklos_backend_suite::{Prepared, dense_set, run_alone};
use kyklos_oracle::inputs::{Case, cases};
use kyklos_oracle::oracle::OracleProblem;

use crate::{Claim, open};

pub(crate) const CLAIMS: &[Claim] = &[
    ("splits the keys of few query rows", |backend| Box::pin(few_rows(backend))),
    ("works through bindings of 64 KiB", |_| Box::pin(small_bindings())),
];

/// `case` with another number of queries, at the end of another number of keys.
fn stretched(case: &str, q_len: usize, kv_len: usize) -> Case {
    let case = cases().into_iter().find(|known| known.name == case).unwrap();
    let problem = OracleProblem { q_len, kv_len, q_offset: (kv_len - q_len) as u64, ..case.problem.clone() };
    Case { problem, ..case }
}

async fn agrees(backend: &WgpuBackend, case: Case, dtype: Dtype) {
    let prepared = Prepared::new(case, dtype);
    let whole = run_alone(backend, &dense_set(&prepared.problem), &prepared).await;
    prepared.judge(&whole, &backend.info().name).assert_within(&prepared.dense_limit());
}

async fn few_rows(backend: &WgpuBackend) -> String {
    for (case, q_len, kv_len) in [
        ("one query over many keys", 1, 5000),
        ("one row beyond two tiles", 2, 700),
        ("bias for each head", 3, 600),
    ] {
        for dtype in Dtype::ALL {
            agrees(backend, stretched(case, q_len, kv_len), dtype).await;
        }
    }
    String::new()
}

async fn small_bindings() -> String {
    let options = WgpuOptions { max_binding_bytes: Some(65536), ..WgpuOptions::default() };
    let backend = open(options).await.unwrap();
    for (case, q_len, kv_len) in
        [("one row beyond two tiles", 170, 300), ("one query over many keys", 1, 900)]
    {
        agrees(&backend, stretched(case, q_len, kv_len), Dtype::F32).await;
    }
    String::new()
}
