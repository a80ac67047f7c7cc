//! The statistics of each row of a finished output.

use crate::Storage;
use crate::attend::WEIGHT_OF;
use crate::finish::MAIN;
use crate::kernel::Kernel;
use crate::text::Text;

/// Log-sum-exp, e^−rest, δ = Σ d_o · o − d_lse and the rest; (−EMPTY_M, 1, 0, 0) where the
/// log-sum-exp is −∞. Bindings: o, d_o, lse (bits), stats, and where there is `d_lse`, that.
pub(crate) fn source(storage: Storage, head_dim: u32, d_lse: bool) -> String {
    let units = head_dim / storage.unit_elements();
    let mut t = Text::default();
    t.line(format!("// row_stats, {}, head dim {head_dim}: 8 threads for each row and head", storage.name()));
    t.lines(&Kernel::RowStats { storage, head_dim, d_lse }.declarations());
    t.line("");
    t.line(crate::attend::empty_m());
    t.lines(WEIGHT_OF);
    t.lines(storage.unpack_functions());
    t.line("");
    t.line("var<workgroup> sums: array<f32, 64>;");
    t.line("");
    t.line("@compute @workgroup_size(64)");
    t.block(MAIN, |t| {
        t.lines(
            "
let row_head = params.first + (group_id.x + group_id.y * params.grid_width) * 8u + (thread >> 3u);
let lane = thread & 7u;
let safe = min(row_head, params.end - 1u);
var sum = 0.0f;",
        );
        t.block(format!("for (var u = lane; u < {units}u; u += 8u)"), |t| {
            t.line(format!("let a = o[safe * {units}u + u - params.o_skipped];"));
            t.line(format!("let b = d_o[safe * {units}u + u - params.d_o_skipped];"));
            t.line("sum += dot(chunk_0(a), chunk_0(b));");
            if storage.unit_chunks() == 2 {
                t.line("sum += dot(chunk_1(a), chunk_1(b));");
            }
        });
        t.lines(
            "
sums[thread] = sum;
workgroupBarrier();
if (lane != 0u || row_head >= params.end) { return; }
let low = (sums[thread] + sums[thread + 1u]) + (sums[thread + 2u] + sums[thread + 3u]);
let high = (sums[thread + 4u] + sums[thread + 5u]) + (sums[thread + 6u] + sums[thread + 7u]);
let of_row = lse[row_head - params.lse_skipped];",
        );
        let delta = if d_lse { "low + high - d_lse[row_head - params.d_lse_skipped]" } else { "low + high" };
        t.line("let rest = bitcast<f32>(of_row.y);");
        t.line(format!("let known = vec4<f32>(bitcast<f32>(of_row.x), weight_of(-rest), {delta}, rest);"));
        // By bits: WGSL promises nothing about infinities.
        t.lines(
            "
let unseen = vec4<f32>(-EMPTY_M, 1.0f, 0.0f, 0.0f);
stats[row_head - params.stats_skipped] = select(known, unseen, of_row.x == 0xff800000u);",
        );
    });
    t.finish()
}
