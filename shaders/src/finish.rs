//! Kernels on the running state: merge two, make output of one, make an empty one.

use crate::Storage;
use crate::attend::WEIGHT_OF;
use crate::kernel::{EMPTY_M, Kernel};
use crate::text::Text;

/// Threads that share one (batch, row, head) triple, each taking every 8th chunk of it.
pub(crate) const THREADS_PER_ROW: u32 = 8;

/// Computes `row_head` (its index in `[batch, rows, heads]`), `ml_at` and `lane`; `inside` says
/// whether the thread has one.
pub(crate) const ROW_HEAD: &str = "
let group = group_id.x + group_id.y * params.grid_width;
let row_head = params.first + group * 8u + (thread >> 3u);
let lane = thread & 7u;
let inside = row_head < params.end;
let safe = min(row_head, params.end - 1u);
let head = safe % params.heads;
let row = (safe / params.heads) % params.rows;
let batch = safe / params.heads / params.rows;
let ml_at = (batch * params.heads + head) * params.rows + row;";

pub(crate) const MAIN: &str =
    "fn main(@builtin(workgroup_id) group_id: vec3<u32>, @builtin(local_invocation_index) thread: u32)";

/// m = max(m₁, m₂), l = l₁e^(m₁−m) + l₂e^(m₂−m), a likewise. Bindings: state `into` (a, ml), state
/// `from` (a, ml).
pub(crate) fn merge(head_dim: u32) -> String {
    let chunks = head_dim / 4;
    let mut t = Text::default();
    t.line(format!("// merge, head dim {head_dim}: 8 threads for each row and head"));
    t.lines(&Kernel::Merge { head_dim }.declarations());
    t.line("");
    t.lines(WEIGHT_OF);
    t.line("");
    t.line("@compute @workgroup_size(64)");
    t.block(MAIN, |t| {
        t.lines(ROW_HEAD);
        t.lines(&format!(
            "
let into = into_ml[ml_at];
let other = from_ml[ml_at];
let m = max(into.x, other.x);
let into_weight = weight_of(into.x - m);
let other_weight = weight_of(other.x - m);
// All 8 threads of a row must have read ml before one of them overwrites it.
storageBarrier();
if (!inside) {{ return; }}
for (var c = lane; c < {chunks}u; c += 8u) {{
    let at = row_head * {chunks}u + c;
    let into_at = at - params.into_skipped;
    into_a[into_at] = into_a[into_at] * into_weight + from_a[at - params.from_skipped] * other_weight;
}}
if (lane == 0u) {{
    into_ml[ml_at] = vec2<f32>(m, into.y * into_weight + other.y * other_weight);
}}"
        ));
    });
    t.finish()
}

/// o = a / l in the storage type and lse = m + ln l; where l is 0, o = 0 and lse = −∞. Bindings: a,
/// ml, o, lse (f32 bits and the rest, `[batch, rows, heads, 2]`), and where there are `sinks`, one
/// logit for each head that l counts as well.
pub(crate) fn finalize(storage: Storage, head_dim: u32, sinks: bool) -> String {
    let mut t = Text::default();
    t.line(format!("// finalize, {}, head dim {head_dim}: 8 threads for each row and head", storage.name()));
    t.lines(&Kernel::Finalize { storage, head_dim, sinks }.declarations());
    t.line("");
    if sinks {
        t.lines(WEIGHT_OF);
        t.line("");
    }
    t.lines(storage.round_function());
    t.line("");
    t.lines(LN);
    t.line("");
    t.lines(LOG_SUM);
    t.line("");
    t.line("@compute @workgroup_size(64)");
    t.block(MAIN, |t| {
        t.lines(ROW_HEAD);
        t.lines(
            "
if (!inside) { return; }
let ml = state_ml[ml_at];
// By bits: NaN must not count as empty.
let empty = (bitcast<u32>(ml.y) & 0x7fffffffu) == 0u;",
        );
        t.lines(if sinks {
            "let sink = sinks[head];
let m = max(ml.x, sink);
let weight = weight_of(ml.x - m);
let divisor = select(ml.y * weight + weight_of(sink - m), 1.0f, empty);
if (lane == 0u) {
    lse[row_head] = select(log_sum(m, divisor), vec2<u32>(bitcast<u32>(sink), 0u), empty);
}"
        } else {
            "let divisor = select(ml.y, 1.0f, empty);
if (lane == 0u) {
    lse[row_head] = select(log_sum(ml.x, divisor), vec2<u32>(0xff800000u, 0u), empty);
}"
        });
        let units = head_dim / storage.unit_elements();
        t.block(format!("for (var u = lane; u < {units}u; u += 8u)"), |t| {
            // Zeros get no sign, because the sign of a zero depends on the order of the merges.
            let load = |c: u32| {
                let (chunks, unit) = (head_dim / 4, storage.unit_chunks());
                let a = format!("state_a[row_head * {chunks}u + u * {unit}u + {c}u - params.a_skipped]");
                let weight = if sinks { " * weight" } else { "" };
                format!(
                    "select({a}{weight} / divisor, vec4<f32>(), vec4<bool>(empty) | ({a} == vec4<f32>()))"
                )
            };
            if storage == Storage::F32 {
                t.line(format!("o[row_head * {units}u + u - params.o_skipped] = {};", load(0)));
            } else {
                t.line(format!("let x = {};", load(0)));
                t.line(format!("let y = {};", load(1)));
                let word = |lo: &str, hi: &str| format!("rounded({lo}) | (rounded({hi}) << 16u)");
                t.line(format!(
                    "o[row_head * {units}u + u - params.o_skipped] = vec4<u32>({}, {}, {}, {});",
                    word("x.x", "x.y"),
                    word("x.z", "x.w"),
                    word("y.x", "y.y"),
                    word("y.z", "y.w")
                ));
            }
        });
    });
    t.finish()
}

/// The natural logarithm to about an ulp, after Cephes' logf. WGSL promises only 2^-21 near 1, and
/// some drivers are not more exact. Infinity and NaN are handled separately.
const LN: &str = "fn ln(x: f32) -> f32 {
    let bits = bitcast<u32>(x);
    // x = f · 2^e with f in [sqrt(1/2), sqrt(2))
    let shifted = bits - 0x3f3504f3u;
    let e = f32(bitcast<i32>(shifted) >> 23u);
    let z = bitcast<f32>((shifted & 0x007fffffu) + 0x3f3504f3u) - 1.0f;
    var p = 7.0376836292e-2f * z - 1.1514610310e-1f;
    p = p * z + 1.1676998740e-1f;
    p = p * z - 1.2420140846e-1f;
    p = p * z + 1.4249322787e-1f;
    p = p * z - 1.6668057665e-1f;
    p = p * z + 2.0000714765e-1f;
    p = p * z - 2.4999993993e-1f;
    p = p * z + 3.3333331174e-1f;
    let y = z * z * z * p - 2.12194440e-4f * e - 0.5f * z * z;
    let result = (z + y) + 0.693359375f * e;
    return select(result, x, (bits & 0x7f800000u) == 0x7f800000u);
}";

/// m + ln l: rounded, and the rest. The integer that is added, 0, is one that no compiler knows:
/// WGSL lets it take `(m + y) - m` for y.
const LOG_SUM: &str = "fn log_sum(m: f32, l: f32) -> vec2<u32> {
    let y = ln(l);
    let sum = bitcast<u32>(m + y) + u32(params.heads == 0u);
    return vec2<u32>(sum, bitcast<u32>(y - (bitcast<f32>(sum) - m)));
}";

/// m = EMPTY_M, l = 0. Bindings: ml. (a is cleared to zero by the API.)
pub(crate) fn reset_state() -> String {
    let mut t = Text::default();
    t.line("// reset_state: one thread for each row and head");
    t.lines(&Kernel::ResetState.declarations());
    t.line("");
    t.line("@compute @workgroup_size(64)");
    t.block(MAIN, |t| {
        t.line("let at = (group_id.x + group_id.y * params.grid_width) * 64u + thread;");
        t.line(format!("if (at < params.row_heads) {{ state_ml[at] = vec2<f32>({EMPTY_M:?}f, 0.0f); }}"));
    });
    t.finish()
}
