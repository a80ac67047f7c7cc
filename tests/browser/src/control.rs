//! Controls: a fault must show, by far more than the tolerance.

use kyklos::backend::Backend;
use kyklos::backend::wgpu::WgpuBackend;
use kyklos::plan::PlanSet;
use kyklos::{Dtype, Mask};
use kyklos_backend_suite::{Prepared, dense_set, run_alone};
use kyklos_oracle::inputs::cases;
use kyklos_oracle::tolerance::discriminates;

use crate::Claim;

pub(crate) const CLAIMS: &[Claim] = &[
    ("shows a causal mask that is shifted by one key", |backend| Box::pin(shifted_mask(backend))),
    ("shows another plan's answer", |backend| Box::pin(wrong_mask(backend))),
];

async fn shifted_mask(backend: &WgpuBackend) -> String {
    let case = cases().into_iter().find(|case| case.name == "one row beyond two tiles").unwrap();
    let prepared = Prepared::new(case, Dtype::F32);
    let right = dense_set(&prepared.problem);
    // Every row one position further down: it sees one key more.
    let shifted = prepared.problem.clone().with_queries(prepared.problem.q_len, 1).unwrap();
    told(backend, &prepared, &right, &dense_set(&shifted)).await
}

async fn wrong_mask(backend: &WgpuBackend) -> String {
    let case = cases().into_iter().find(|case| case.name == "window on both sides").unwrap();
    let prepared = Prepared::new(case, Dtype::F32);
    let mut full = prepared.problem.clone();
    full.mask = Mask::full();
    told(backend, &prepared, &dense_set(&prepared.problem), &dense_set(&full)).await
}

/// How many tolerances `wrong` is off where `right` is within one.
async fn told(backend: &WgpuBackend, prepared: &Prepared, right: &PlanSet, wrong: &PlanSet) -> String {
    let who = &backend.info().name;
    let with = prepared.judge(&run_alone(backend, right, prepared).await, who);
    with.assert_within(&prepared.dense_limit());
    let without = prepared.judge(&run_alone(backend, wrong, prepared).await, who);
    assert!(without.within(&prepared.dense_limit()).is_err(), "the fault passes");
    let times = discriminates(with.max_abs_error, without.max_abs_error, kyklos_oracle::oracle::Dtype::F32);
    format!("{:.0} tolerances off", times.unwrap_or_else(|error| panic!("{error}")))
}
