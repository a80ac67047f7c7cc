// Attention of few query rows for drivers that compute on the host's cores: one subgroup of {{lanes}} lanes
// is one workgroup, and each lane is a key. decode/portable.wgsl says what slots and parts are.
//
// Every lane carries the queries and its own m, l and O (O0_0: slot 0, chunk 0) of all {{slots}} slots in named
// registers; lanes meet only at the end. No workgroup memory and no barrier. K and V are textures as
// in attend/subgroup.wgsl, for the same reason.
{% include "parts/logits.wgsl" %}
{% include "decode/unseen.wgsl" %}
{% include "parts/texel.wgsl" %}
@compute @workgroup_size({{lanes}})
fn main(@builtin(workgroup_id) group_id: vec3<u32>, @builtin(subgroup_invocation_id) lane: u32) {
{% include "decode/item.wgsl" %}
    let unit = kv_head * {{units}}u;
    let k_y = (batch - params.batch_first) * params.k_batch - params.key_begin;
    let v_y = (batch - params.batch_first) * params.v_batch - params.key_begin;
{% for s in range(slots) %}
    let q_at{{s}} = params.q_offset + batch * params.q_batch + row{{s}} * params.q_row
        + (first_head + {{s}}u % params.group_heads) * params.q_head;
{% for u in range(units) %}
    let q_unit{{s}}_{{u}} = q[q_at{{s}} + {{u}}u];
{% for half in range(unit_chunks) %}
{% set c = u * unit_chunks + half %}
    let q{{s}}_{{c}} = chunk_{{half}}(q_unit{{s}}_{{u}}) * params.q_scale;
    var O{{s}}_{{c}} = vec4<f32>();
{% endfor %}
{% endfor %}
    var m{{s}} = EMPTY_M;
    var l{{s}} = 0.0f;
    var seen{{s}} = 0u;
{% endfor %}
    for (var run = work[starts]; run < work[starts + 2u]; run++) {
{% include "decode/run.wgsl" %}
        for (var key = first; key < end; key += {{lanes}}u) {
            let own = min(key + lane, end - 1u);
            let inside = key + lane < end;
            let position = positions[params.keys_at + own];
            // S = q k^T
{% for u in range(units) %}
            let k_unit{{u}} = textureLoad(k, vec2<i32>(vec2<u32>(unit + {{u}}u, k_y + own)));
{% for half in range(unit_chunks) %}
{% set c = u * unit_chunks + half %}
            let k{{c}} = texel_{{half}}(k_unit{{u}});
{% for s in range(slots) %}
{% if c == 0 %}
            var x{{s}} = q{{s}}_0 * k0;
{% else %}
            x{{s}} = fma(q{{s}}_{{c}}, k{{c}}, x{{s}});
{% endif %}
{% endfor %}
{% endfor %}
{% endfor %}
            // P = e^(S - m), the new maximum n, and l
{% for s in range(slots) %}
{% include "decode/visible.wgsl" %}
{% set dot = "((x" ~ s ~ ".x + x" ~ s ~ ".y) + (x" ~ s ~ ".z + x" ~ s ~ ".w)) * params.x_scale" %}
            seen{{s}} |= select(0u, 1u, vis{{s}});
            let S{{s}} = select(EMPTY_M, {% if softcap %}capped({{dot}}){% else %}{{dot}}{% endif %}{% if bias %} + term{{s}}{% endif %}, vis{{s}});
            let n{{s}} = max(m{{s}}, S{{s}});
            let corr{{s}} = weight_of(m{{s}} - n{{s}});
            let P{{s}} = select(0.0f, weight_of(S{{s}} - n{{s}}), vis{{s}});
            m{{s}} = n{{s}};
            l{{s}} = fma(l{{s}}, corr{{s}}, P{{s}});
{% endfor %}
            // O = O corr + P V
{% for u in range(units) %}
            let v_unit{{u}} = textureLoad(v, vec2<i32>(vec2<u32>(unit + {{u}}u, v_y + own)));
{% for half in range(unit_chunks) %}
{% set c = u * unit_chunks + half %}
            let v{{c}} = texel_{{half}}(v_unit{{u}});
{% for s in range(slots) %}
            O{{s}}_{{c}} = fma(select(vec4<f32>(), v{{c}}, vis{{s}}), vec4<f32>(P{{s}}), O{{s}}_{{c}} * corr{{s}});
{% endfor %}
{% endfor %}
{% endfor %}
        }
    }
    // The lanes meet.
{% for s in range(slots) %}
    let top{{s}} = subgroupMax(m{{s}});
    let weight{{s}} = weight_of(m{{s}} - top{{s}});
    let sum{{s}} = subgroupAdd(l{{s}} * weight{{s}});
    let any{{s}} = subgroupMax(seen{{s}}) == 1u;
{% for c in range(chunks) %}
{% set a = "O" ~ s ~ "_" ~ c %}
    let total{{s}}_{{c}} = vec4<f32>(
        subgroupAdd({{a}}.x * weight{{s}}), subgroupAdd({{a}}.y * weight{{s}}),
        subgroupAdd({{a}}.z * weight{{s}}), subgroupAdd({{a}}.w * weight{{s}}));
{% endfor %}
{% endfor %}
    if (lane == 0u) {
{% for s in range(slots) %}
        part_ml[item * {{slots}}u + {{s}}u] = vec2<f32>(top{{s}}, select(UNSEEN, sum{{s}}, any{{s}}));
{% for c in range(chunks) %}
        part_a[(item * {{slots}}u + {{s}}u) * {{chunks}}u + {{c}}u] = total{{s}}_{{c}};
{% endfor %}
{% endfor %}
    }
}
