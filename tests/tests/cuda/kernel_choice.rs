//! A call runs the kernels that `KernelChoice` names. They write the state, so that its reset is
//! not run, or the results at once.

use kyklos::Dtype;
use kyklos_backend_suite::fixed_order::case;
use kyklos_backend_suite::{Prepared, dense_set, run_alone};
use kyklos_cuda::CudaBackend;
use kyklos_oracle::inputs::Case;
use kyklos_oracle::oracle::{OracleMask, OracleTerm};
use pollster::block_on;

use crate::scenario::{Ends, Scenario};

pub(crate) fn scenarios() -> Vec<Scenario> {
    let mut cut = Scenario::new("splits the keys of few rows", "seed=61", few_rows);
    cut.says = &[
        "launched decode_bf16_64 ",
        "launched decode_f16_64 ",
        "launched decode_f32 ",
        "launched merge_parts ",
    ];
    cut.says_not = &["launched attend_", "launched hopper_", "launched reset_state"];
    let mut late =
        Scenario::new("a merge before the parts are computed fails the check", "late_parts=1", few_rows);
    late.ends = Ends::Failing;
    let mut hopper = Scenario::new("takes wgmma on Hopper", "seed=62", many_rows);
    hopper.says = &["launched hopper_bf16_64 "];
    hopper.says_not = &["launched attend_", "launched reset_state", "launched finalize_"];
    let mut older = Scenario::new("takes mma.sync before Hopper", "seed=63,capability=80", many_rows);
    older.says = &["launched attend_bf16_64 ", "launched finalize_bf16 "];
    older.says_not = &["launched hopper_", "launched reset_state"];
    let mut newer = Scenario::new("takes mma.sync after Hopper", "seed=64,capability=100", many_rows);
    newer.says = &["launched attend_bf16_64 "];
    newer.says_not = &["launched hopper_", "launched reset_state"];
    vec![cut, late, hopper, older, newer]
}

fn is_right(case: Case, dtype: Dtype) {
    let backend = CudaBackend::new(0).unwrap();
    let prepared = Prepared::new(case, dtype);
    let whole = block_on(run_alone(&backend, &dense_set(&prepared.problem), &prepared));
    prepared.judge(&whole, "fake cuda").assert_within(&prepared.dense_limit());
}

/// The last rows of a sequence, for two batch entries. The second entry has only padding.
fn few_rows() {
    for dtype in Dtype::ALL {
        let mask = OracleMask::causal().and(OracleTerm::Valid(vec![900, 0]));
        is_right(
            case("3 rows over 900 keys", 900, mask, |case| {
                let problem = &mut case.problem;
                (problem.batch, problem.q_len, problem.q_offset) = (2, 3, 897);
            }),
            dtype,
        );
    }
}

fn many_rows() {
    is_right(case("300 causal tokens", 300, OracleMask::causal(), |_| {}), Dtype::Bf16);
}
