//! Decoding for drivers that compute on the host's cores: one subgroup is one workgroup, each lane
//! is a key.
//!
//! Every lane carries the queries and its own running sums of all slots in named registers; lanes
//! meet only at the end. There is no workgroup memory and no barrier. K and V are textures as in
//! [`attend`](crate::attend)'s broadcast kernel, for the same reason.

use super::{MAX_SLOTS, item, prelude, runs, visible, with_term};
use crate::text::Text;
use crate::variant::DecodeKernel;

const COMPONENTS: [&str; 4] = ["x", "y", "z", "w"];

/// Unrolled statements grow with slots × dim; beyond some hundred, compilation takes seconds.
pub(crate) const fn most_slots(head_dim: u32) -> u32 {
    match 256 / head_dim {
        slots if slots < MAX_SLOTS => slots,
        _ => MAX_SLOTS,
    }
}

pub(crate) fn source(kernel: DecodeKernel, lanes: u32) -> String {
    let slots = kernel.slots;
    let chunks = kernel.head_dim / 4;
    let unit_chunks = kernel.storage.unit_chunks();
    let units = chunks / unit_chunks;
    let mut t = Text::default();
    t.line(format!(
        "// decode, subgroup, {}, head dim {}: {slots} rows of one KV head, a key in each of {lanes} lanes",
        kernel.storage.name(),
        kernel.head_dim
    ));
    t.lines(&prelude(kernel));
    t.lines(kernel.storage.texel_functions());
    t.line("");
    t.line(format!("@compute @workgroup_size({lanes})"));
    t.block(
        "fn main(@builtin(workgroup_id) group_id: vec3<u32>, @builtin(subgroup_invocation_id) lane: u32)",
        |t| {
            item(t, kernel);
            t.line(format!("let unit = kv_head * {units}u;"));
            for x in ["k", "v"] {
                t.line(format!(
                    "let {x}_y = (batch - params.batch_first) * params.{x}_batch - params.key_begin;"
                ));
            }
            for s in 0..slots {
                t.line(format!(
                    "let q_at{s} = params.q_offset + batch * params.q_batch + row{s} * params.q_row + \
                     (first_head + {s}u % params.group_heads) * params.q_head;"
                ));
                for u in 0..units {
                    t.line(format!("let q_unit{s}_{u} = q[q_at{s} + {u}u];"));
                    for half in 0..unit_chunks {
                        let c = u * unit_chunks + half;
                        t.line(format!("let q{s}_{c} = chunk_{half}(q_unit{s}_{u}) * params.q_scale;"));
                        t.line(format!("var a{s}_{c} = vec4<f32>();"));
                    }
                }
                t.line(format!("var m{s} = EMPTY_M;"));
                t.line(format!("var l{s} = 0.0f;"));
                t.line(format!("var seen{s} = 0u;"));
            }
            runs(t, |t| {
                t.block(format!("for (var key = first; key < end; key += {lanes}u)"), |t| {
                    keys(t, kernel, unit_chunks, units);
                });
            });
            end(t, slots, chunks);
        },
    );
    t.finish()
}

/// One key in each lane.
fn keys(t: &mut Text, kernel: DecodeKernel, unit_chunks: u32, units: u32) {
    let slots = kernel.slots;
    t.line("let own = min(key + lane, end - 1u);");
    t.line("let inside = key + lane < end;");
    t.line("let position = positions[params.keys_at + own];");
    for u in 0..units {
        t.line(format!("let k_unit{u} = textureLoad(k, vec2<i32>(vec2<u32>(unit + {u}u, k_y + own)));"));
        for half in 0..unit_chunks {
            let c = u * unit_chunks + half;
            t.line(format!("let k{c} = texel_{half}(k_unit{u});"));
            for s in 0..slots {
                if c == 0 {
                    t.line(format!("var x{s} = q{s}_0 * k0;"));
                } else {
                    t.line(format!("x{s} = fma(q{s}_{c}, k{c}, x{s});"));
                }
            }
        }
    }
    for s in 0..slots {
        let dot = format!("((x{s}.x + x{s}.y) + (x{s}.z + x{s}.w)) * params.x_scale");
        let logit = if kernel.softcap { format!("capped({dot})") } else { dot };
        visible(t, kernel, s);
        let logit = with_term(kernel, s, &logit);
        t.lines(&format!(
            "seen{s} |= select(0u, 1u, vis{s});
let logit{s} = select(EMPTY_M, {logit}, vis{s});
let n{s} = max(m{s}, logit{s});
let corr{s} = weight_of(m{s} - n{s});
let p{s} = select(0.0f, weight_of(logit{s} - n{s}), vis{s});
m{s} = n{s};
l{s} = fma(l{s}, corr{s}, p{s});"
        ));
    }
    for u in 0..units {
        t.line(format!("let v_unit{u} = textureLoad(v, vec2<i32>(vec2<u32>(unit + {u}u, v_y + own)));"));
        for half in 0..unit_chunks {
            let c = u * unit_chunks + half;
            t.line(format!("let v{c} = texel_{half}(v_unit{u});"));
            for s in 0..slots {
                t.line(format!(
                    "a{s}_{c} = fma(select(vec4<f32>(), v{c}, vis{s}), vec4<f32>(p{s}), a{s}_{c} * corr{s});"
                ));
            }
        }
    }
}

/// Merges the lanes and writes the part.
fn end(t: &mut Text, slots: u32, chunks: u32) {
    for s in 0..slots {
        t.lines(&format!(
            "let top{s} = subgroupMax(m{s});
let weight{s} = weight_of(m{s} - top{s});
let sum{s} = subgroupAdd(l{s} * weight{s});
let any{s} = subgroupMax(seen{s}) == 1u;"
        ));
        for c in 0..chunks {
            let sums = COMPONENTS.map(|x| format!("subgroupAdd(a{s}_{c}.{x} * weight{s})")).join(", ");
            t.line(format!("let total{s}_{c} = vec4<f32>({sums});"));
        }
    }
    t.block("if (lane == 0u)", |t| {
        for s in 0..slots {
            t.line(format!(
                "part_ml[item * {slots}u + {s}u] = vec2<f32>(top{s}, select(UNSEEN, sum{s}, any{s}));"
            ));
            for c in 0..chunks {
                t.line(format!("part_a[(item * {slots}u + {s}u) * {chunks}u + {c}u] = total{s}_{c};"));
            }
        }
    });
}
