// Attention for drivers that compute on the host's cores: one subgroup of {{lanes}} lanes is one
// workgroup, and one SIMD register there. attend/portable.wgsl says what is computed, and what the
// bindings hold.
//
// Tile: Br = {{ lanes * rows }} query rows, {{rows}} in each lane. Keys one by one; where all rows see them,
// {{keys_at_once}} at a time.
//
// Each lane keeps whole query rows in named registers (q0_0: row 0, chunk 0; O0_0x, ...), and
// all lanes go through the same keys. The subgroup loads a key's row together: lane n loads units
// n, n + {{lanes}}, ... Then each element is broadcast from a constant lane, which is one shuffle. No
// workgroup memory, no barrier, no private array and no branch in the loop over keys: on such
// drivers each of these costs more than the arithmetic it could save. For the same reason the
// rescaling is unconditional.
//
// K and V are textures of 16-byte texels: x = KV head · units of a head + unit, y = (batch entry -
// batch_first) · k_batch + key - key_begin (v_batch for v). These drivers read a texel in a few
// instructions, but turn a load from a buffer into a loop over lanes and components that goes
// through memory: 20 times slower without AVX-512.
//
// A logit has {{chains}} independent sums, so that additions overlap. Their number depends on the head dim
// alone: every loop here and in backward/lanes.wgsl rounds the logit of a pair alike, so weights
// fit the log-sum-exp. A run of any end may be full here.
{% include "parts/logits.wgsl" %}
{% include "parts/texel.wgsl" %}
{% if bias == "visible" %}
fn ones(count: u32) -> u32 { return select((1u << (count & 31u)) - 1u, 0xffffffffu, count >= 32u); }
// The visibility of up to 32 keys at consecutive positions for a row, as the low bits of a word. By
// spans: bit i is lo <= base + i < hi.
fn span_bits(lo: u32, hi: u32, base: u32) -> u32 { return ones(max(hi, base) - base) & ~ones(max(lo, base) - base); }
// By the mask tensor; bits `count` on mean nothing.
fn bias_bits(row: u32, base: u32, count: u32) -> u32 {
    let shift = base & 31u;
    let low = bias[row + (base >> 5u)] >> shift;
    let high = bias[row + ((base + count - 1u) >> 5u)] << ((32u - shift) & 31u);
    return low | select(high, 0u, shift == 0u);
}

var<workgroup> seen_from: u32;

{% endif %}
{# The row of key `key + j` of k or v: this lane's units, unpacked before they are broadcast.
   Coordinates are signed: where naga has to clamp unsigned coordinates itself, it makes invalid
   SPIR-V. #}
{% macro fetch(tensor, j) %}
{% for load in range(loads) %}
            let {{tensor}}{{j}}_unit{{load}} = textureLoad({{tensor}}, vec2<i32>(vec2<u32>(unit{{load}}, {{tensor}}_y + key + {{j}}u)));
{% for half in range(unit_chunks) %}
            let {{tensor}}{{j}}_own{{load}}_{{half}} = texel_{{half}}({{tensor}}{{j}}_unit{{load}});
{% endfor %}
{% endfor %}
{% endmacro %}
{# An element of that row, in every lane. #}
{% macro broadcast(tensor, j, c, x) -%}
{% set unit = c // unit_chunks -%}
subgroupBroadcast({{tensor}}{{j}}_own{{ unit // lanes }}_{{ c % unit_chunks }}.{{x}}, {{ unit % lanes }}u)
{%- endmacro %}
{# The keys first..end, `together` of them in each iteration. Written element by element, so that
   few values are alive at a time: values that do not fit the processor's registers go through
   memory, which costs more than the arithmetic. #}
{% macro keys(first, end, together, tested) %}
        for (var key = {{first}}; key < {{end}}; key += {{together}}u) {
            // S = q k^T
{% for j in range(together) %}
{{ fetch("k", j) }}
{%- endfor %}
{% for c in range(chunks) %}
{% for x in ["x", "y", "z", "w"] %}
{% set element = 4 * c + loop.index0 %}
{% set chain = element % chains %}
{% for j in range(together) %}
            let k{{j}}_{{c}}{{x}} = {{ broadcast("k", j, c, x) }};
{% endfor %}
{% for r in range(rows) %}
{% for j in range(together) %}
{% if element < chains %}
            var s{{r}}_{{j}}_{{chain}} = q{{r}}_{{c}}.{{x}} * k{{j}}_{{c}}{{x}};
{% else %}
            s{{r}}_{{j}}_{{chain}} = fma(q{{r}}_{{c}}.{{x}}, k{{j}}_{{c}}{{x}}, s{{r}}_{{j}}_{{chain}});
{% endif %}
{% endfor %}
{% endfor %}
{% endfor %}
{% endfor %}
            // P = e^(S - m), the new maximum n, and l
{% if tested and bias != "visible" %}
            let position = positions[params.keys_at + key];
{% endif %}
{% for r in range(rows) %}
{% for j in range(together) %}
            let dot{{r}}_{{j}} = ({% for chain in range(chains) %}s{{r}}_{{j}}_{{chain}}{{ " + " if not loop.last }}{% endfor %}) * params.x_scale;
{% set dot = "dot" ~ r ~ "_" ~ j %}
{% set logit = "capped(" ~ dot ~ ")" if softcap else dot %}
{% if not tested %}
            let S{{r}}_{{j}} = {{logit}};
{% else %}
{% if bias == "visible" %}
            let vis{{r}} = ((bits{{r}} >> (key - group)) & 1u) == 1u;
{% elif bias %}
            let term{{r}} = bias_term(bias_row{{r}}, position);
            let vis{{r}} = lo{{r}} <= position && position < hi{{r}} && shows(term{{r}});
{% else %}
            let vis{{r}} = lo{{r}} <= position && position < hi{{r}};
{% endif %}
            let S{{r}}_{{j}} = select(EMPTY_M, {{logit}}{% if bias == "bias" %} + term{{r}}{% endif %}, vis{{r}});
            seen{{r}} = seen{{r}} || vis{{r}};
{% endif %}
{% endfor %}
            let n{{r}} = {{ "max(" * together }}m{{r}}{% for j in range(together) %}, S{{r}}_{{j}}){% endfor %};
            let corr{{r}} = weight_of(m{{r}} - n{{r}});
{% for j in range(together) %}
{% if tested %}
            let P{{r}}_{{j}} = select(0.0f, weight_of(S{{r}}_{{j}} - n{{r}}), vis{{r}});
{% else %}
            let P{{r}}_{{j}} = weight_of(S{{r}}_{{j}} - n{{r}});
{% endif %}
{% endfor %}
            m{{r}} = n{{r}};
            l{{r}} = fma(l{{r}}, corr{{r}}, {% for j in range(together) %}P{{r}}_{{j}}{{ " + " if not loop.last }}{% endfor %});
{% endfor %}
            // O = O corr + P V
{% for j in range(together) %}
{{ fetch("v", j) }}
{%- endfor %}
{% for c in range(chunks) %}
{% for x in ["x", "y", "z", "w"] %}
{% for j in range(together) %}
            let v{{j}}_{{c}}{{x}} = {{ broadcast("v", j, c, x) }};
{% endfor %}
{% for r in range(rows) %}
{% if tested %}
            O{{r}}_{{c}}{{x}} = fma(select(0.0f, v0_{{c}}{{x}}, vis{{r}}), P{{r}}_0, O{{r}}_{{c}}{{x}} * corr{{r}});
{% elif together == 1 %}
            O{{r}}_{{c}}{{x}} = fma(v0_{{c}}{{x}}, P{{r}}_0, O{{r}}_{{c}}{{x}} * corr{{r}});
{% else %}
            O{{r}}_{{c}}{{x}} = fma(v1_{{c}}{{x}}, P{{r}}_1, fma(v0_{{c}}{{x}}, P{{r}}_0, O{{r}}_{{c}}{{x}} * corr{{r}}));
{% endif %}
{% endfor %}
{% endfor %}
{% endfor %}
        }
{% endmacro %}
@compute @workgroup_size({{lanes}})
fn main(@builtin(workgroup_id) group_id: vec3<u32>, @builtin(subgroup_invocation_id) lane: u32) {
{% include "attend/item.wgsl" %}
{% for load in range(loads) %}
    // Lanes beyond the head load its last unit again; no other lane reads it from them.
    let unit{{load}} = kv_head * {{units}}u + min(lane + {{ load * lanes }}u, {{ units - 1 }}u);
{% endfor %}
    let k_y = (batch - params.batch_first) * params.k_batch - params.key_begin;
    let v_y = (batch - params.batch_first) * params.v_batch - params.key_begin;
{% for r in range(rows) %}
    let row{{r}} = tile * {{ lanes * rows }}u + {{ lanes * r }}u + lane;
    let in{{r}} = row{{r}} < params.rows;
    let safe{{r}} = min(row{{r}}, params.rows - 1u);
    let lo{{r}} = positions[spans + 2u * safe{{r}}];
    let hi{{r}} = positions[spans + 2u * safe{{r}} + 1u];
    let q_at{{r}} = params.q_offset + batch * params.q_batch + safe{{r}} * params.q_row + head * params.q_head;
    let a_at{{r}} = params.a_offset + ((batch * params.rows + safe{{r}}) * params.heads + head) * {{chunks}}u;
    let ml_at{{r}} = params.ml_offset + (batch * params.heads + head) * params.rows + safe{{r}};
    var m{{r}} = EMPTY_M;
    var l{{r}} = 0.0f;
    var seen{{r}} = {{ "false" if bias else "full_runs < partial_runs" }};
{% if bias %}
    let bias_row{{r}} = params.bias_offset + batch * params.bias_batch
        + safe{{r}} * params.bias_row + head * params.bias_head;
{% endif %}
{% for u in range(units) %}
    let q_unit{{r}}_{{u}} = q[q_at{{r}} + {{u}}u];
{% for half in range(unit_chunks) %}
    let q{{r}}_{{ u * unit_chunks + half }} = chunk_{{half}}(q_unit{{r}}_{{u}}) * params.q_scale;
{% endfor %}
{% endfor %}
{% for c in range(chunks) %}
    var O{{r}}_{{c}}x = 0.0f;
    var O{{r}}_{{c}}y = 0.0f;
    var O{{r}}_{{c}}z = 0.0f;
    var O{{r}}_{{c}}w = 0.0f;
{% endfor %}
{% endfor %}
{% if not bias %}
    for (var run = full_runs; run < partial_runs; run++) {
{% include "attend/run.wgsl" %}
{{ keys("first", "end", keys_at_once, false) }}
    }
    for (var run = partial_runs; run < runs_end; run++) {
{% include "attend/run.wgsl" %}
{{ keys("first", "end", 1, true) }}
    }
{% elif bias == "bias" %}
    for (var run = full_runs; run < runs_end; run++) {
{% include "attend/run.wgsl" %}
{{ keys("first", "end", 1, true) }}
    }
{% else %}
    // 32 keys at a time. First the visible keys of each row become the bits of a word; if no row
    // sees any of the 32 keys, none is loaded. Loads dominate the cost: for consecutive keys the
    // bits are two words of a row.
    for (var run = full_runs; run < runs_end; run++) {
{% include "attend/run.wgsl" %}
        for (var group = first; group < end; group += 32u) {
            let group_end = min(group + 32u, end);
            let base = positions[params.keys_at + group];
            var consecutive = true;
            for (var i = group + lane; i < group_end; i += {{lanes}}u) {
                consecutive = consecutive && positions[params.keys_at + i] == base + (i - group);
            }
{% for r in range(rows) %}
            var bits{{r}} = 0u;
{% endfor %}
            let word_only = subgroupAll(consecutive);
            if (word_only) {
                let inside = ones(group_end - group);
{% for r in range(rows) %}
                bits{{r}} = inside & span_bits(lo{{r}}, hi{{r}}, base) & bias_bits(bias_row{{r}}, base, group_end - group);
{% endfor %}
            }
            for (var i = select(group, group_end, word_only); i < group_end; i++) {
                let position = positions[params.keys_at + i];
{% for r in range(rows) %}
                bits{{r}} |= select(0u, 1u << (i - group),
                    lo{{r}} <= position && position < hi{{r}} && shows(bias_term(bias_row{{r}}, position)));
{% endfor %}
            }
            let any_seen = subgroupAny(({% for r in range(rows) %}bits{{r}}{{ " | " if not loop.last }}{% endfor %}) != 0u);
            if (lane == 0u) { seen_from = select(group_end, group, any_seen); }
            // Through workgroup memory, because browsers count what subgroups agree on as different
            // in every lane.
            let group_first = workgroupUniformLoad(&seen_from);
{{ keys("group_first", "group_end", 1, true) }}
        }
    }
{% endif %}
    // Merged into the state. A row that saw no key is not written.
{% for r in range(rows) %}
    if (in{{r}} && seen{{r}}) {
        let ml = state_ml[ml_at{{r}}];
        let top = max(ml.x, m{{r}});
        let keep = weight_of(ml.x - top);
        let found = weight_of(m{{r}} - top);
{% for c in range(chunks) %}
        state_a[a_at{{r}} + {{c}}u] = state_a[a_at{{r}} + {{c}}u] * keep
            + vec4<f32>(O{{r}}_{{c}}x, O{{r}}_{{c}}y, O{{r}}_{{c}}z, O{{r}}_{{c}}w) * found;
{% endfor %}
        state_ml[ml_at{{r}}] = vec2<f32>(top, ml.y * keep + l{{r}} * found);
    }
{% endfor %}
}
