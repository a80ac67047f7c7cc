//! Merges all parts of a row into its running state.

use super::UNSEEN;
use crate::attend;
use crate::finish::{MAIN, ROW_HEAD, THREADS_PER_ROW};
use crate::kernel::Kernel;
use crate::text::Text;

/// m is the largest of all; l = Σ lᵢ e^(mᵢ−m), a likewise, over the state and the parts that saw a
/// key. If no part saw a key, the state is not written. Bindings: state (a, ml), parts (a, ml).
pub(crate) fn merge_parts(head_dim: u32) -> String {
    let chunks = head_dim / 4;
    let own = chunks.div_ceil(THREADS_PER_ROW);
    let ragged = !chunks.is_multiple_of(THREADS_PER_ROW);
    // Threads beyond the head read its last chunk again, and do not write it.
    let chunk = |c: u32| {
        let chunk = format!("lane + {}u", c * THREADS_PER_ROW);
        if ragged && c + 1 == own { format!("min({chunk}, {}u)", chunks - 1) } else { chunk }
    };
    let mut t = Text::default();
    t.line(format!("// merge parts, head dim {head_dim}: 8 threads for each row and head"));
    t.lines(&Kernel::MergeParts { head_dim }.declarations());
    t.line("");
    t.line(attend::empty_m());
    t.line("");
    t.lines(attend::WEIGHT_OF);
    t.lines(UNSEEN);
    t.line("");
    t.line("@compute @workgroup_size(64)");
    t.block(MAIN, |t| {
        t.lines(ROW_HEAD);
        t.lines(&format!(
            "
let slot = row * params.group_heads + head % params.group_heads;
let group_index = (batch - params.batch_first) * (params.heads / params.group_heads) + head / params.group_heads;
let parts = group_index * params.splits * params.slots + slot;
let a_at = safe * {chunks}u - params.a_skipped;
let state = state_ml[ml_at - params.ml_skipped];
let before = state.x;
var m = before;
var seen = false;
for (var i = 0u; i < params.splits; i++) {{
    let part = part_ml[parts + i * params.slots];
    if (!is_unseen(part.y)) {{
        m = max(m, part.x);
        seen = true;
    }}
}}
let corr = weight_of(before - m);
var l = state.y * corr;"
        ));
        for c in 0..own {
            t.line(format!("var a{c} = state_a[a_at + {}] * corr;", chunk(c)));
        }
        t.block("for (var i = 0u; i < params.splits; i++)", |t| {
            t.line("let at = parts + i * params.slots;");
            t.line("let part = part_ml[at];");
            t.block("if (!is_unseen(part.y))", |t| {
                t.line("let weight = weight_of(part.x - m);");
                t.line("l += part.y * weight;");
                for c in 0..own {
                    t.line(format!("a{c} += part_a[at * {chunks}u + {}] * weight;", chunk(c)));
                }
            });
        });
        t.line("// All 8 threads of a row must have read ml before one of them overwrites it.");
        t.line("storageBarrier();");
        t.line("if (!inside || !seen) { return; }");
        for c in 0..own {
            let store = format!("state_a[a_at + lane + {}u] = a{c};", c * THREADS_PER_ROW);
            if ragged && c + 1 == own {
                t.line(format!("if (lane + {}u < {chunks}u) {{ {store} }}", c * THREADS_PER_ROW));
            } else {
                t.line(store);
            }
        }
        t.block("if (lane == 0u)", |t| {
            t.line("state_ml[ml_at - params.ml_skipped] = vec2<f32>(m, l);");
        });
    });
    t.finish()
}
