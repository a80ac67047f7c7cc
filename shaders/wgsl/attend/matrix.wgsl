// Attention on matrix units: products of f16 matrices that a subgroup holds together, summed in
// f32. attend/portable.wgsl says what is computed, and what the bindings hold; there is no bias.
//
// Tile: Br = {{Br}} query rows, {{size}} for each of {{subgroups}} subgroups of {{lanes}} lanes, x Bc = {{Bc}} keys;
// {{workgroup_bytes}} bytes of workgroup memory.
//
// A subgroup's q and O stay in matrix registers for the whole call (q0, q1, ...; O0, O1, ...). The K
// and V tiles are staged once for all subgroups of the workgroup: K key by key, V element by element,
// so that for both a matrix register's column lies together; 16 bytes between them, for the banks. Single elements of a matrix register cannot be
// addressed, so mask and softmax go through workgroup memory: there, lane n has row n % {{size}} and, if
// there are more lanes than rows, its part n / {{size}} of the columns.
//
// O goes through workgroup memory only when a row's maximum grows by more than 2^8 within a tile.
// Otherwise P stays relative to the old maximum, may exceed 1, and nothing is rescaled.
// (FlashAttention-4 does the same to save multiplications.) 2^8 · 2048 keys is far below the largest
// values of f16 weights and f32 sums.
//
// 0 · NaN is NaN in a matrix unit too. So after the first partial tile with a value that is not
// finite, P V of partial tiles is computed element by element.
{% include "parts/logits.wgsl" %}
// Element d of the row at unit `at`.
fn load_q(at: u32, d: u32) -> f16 {
    let unit = q[at + (d >> 3u)];
    let pair = unpack2x16float(unit[(d >> 1u) & 3u]);
    return f16(select(pair.x, pair.y, (d & 1u) == 1u));
}

var<workgroup> tile_k: array<f16, {{ Bc * k_stride }}>;
var<workgroup> tile_v: array<f16, {{ chunks * 4 * v_stride }}>;
var<workgroup> scores: array<f32, {{ Br * score_stride }}>;
var<workgroup> weights: array<f16, {{ Br * weight_stride }}>;
var<workgroup> row_factors: array<vec2<f32>, {{Br}}>;
var<workgroup> grew: atomic<u32>;
var<workgroup> not_finite: atomic<u32>;

{% set mat = "coop_mat" ~ size ~ "x" ~ size %}
{# The accumulator through workgroup memory, as many matrices at a time as fit. `step` changes
   scores[at], element d of this lane's row. #}
{% macro through_memory(step) %}
{% for pass in passes %}
{% for f in range(pass.first, pass.end) %}
                coopStoreT(O{{f}}, &scores[own_scores + {{ (f - pass.first) * size }}u], {{score_stride}}u);
{% endfor %}
                workgroupBarrier();
{% for f in range(pass.first, pass.end) %}
                for (var e = part * {{ size // parts }}u; e < (part + 1u) * {{ size // parts }}u; e++) {
{% if step == "rescale" %}
                    scores[score_at + {{ (f - pass.first) * size }}u + e] *= corr;
{% else %}
                    for (var j = 0u; j < {{Bc}}u; j++) {
                        let position = positions[params.keys_at + min(key + j, end - 1u)];
                        if (lo <= position && position < hi && key + j < end) {
                            scores[score_at + {{ (f - pass.first) * size }}u + e] +=
                                f32(weights[weight_at + j]) * f32(tile_v[({{ f * size }}u + e) * {{v_stride}}u + j]);
                        }
                    }
{% endif %}
                }
{% endfor %}
                workgroupBarrier();
{% for f in range(pass.first, pass.end) %}
                O{{f}} = coopLoadT<{{mat}}<f32, C>>(&scores[own_scores + {{ (f - pass.first) * size }}u], {{score_stride}}u);
{% endfor %}
                workgroupBarrier();
{% endfor %}
{% endmacro %}
{# O += P V on matrix units. #}
{% macro accumulate() %}
{% for g in range(at_once) %}
                let w{{g}} = coopLoadT<{{mat}}<f16, A>>(&weights[own_weights + {{ g * size }}u], {{weight_stride}}u);
{% endfor %}
{% for f in range(fragments) %}
{% for g in range(at_once) %}
                let v{{f}}_{{g}} = coopLoad<{{mat}}<f16, B>>(&tile_v[{{ f * size * v_stride + g * size }}u], {{v_stride}}u);
                O{{f}} = coopMultiplyAdd(w{{g}}, v{{f}}_{{g}}, O{{f}});
{% endfor %}
{% endfor %}
{% endmacro %}
{# The tiles of one run. #}
{% macro tiles(tested) %}
        for (var key = first; key < end; key += {{Bc}}u) {
            workgroupBarrier();
            if (thread == 0u) {
                atomicStore(&grew, 0u);
            }
            // K and V of the tile; zero behind the end of a partial run.
            for (var i = thread; i < {{ Bc * units }}u; i += {{threads}}u) {
                let j = i / {{units}}u;
                let u = i % {{units}}u;
                let k_at = j * {{k_stride}}u + 8u * u;
                let v_at = 8u * u * {{v_stride}}u + j;
{% for x in ["k", "v"] %}
{% if tested %}
                let {{x}}_unit = select(vec4<u32>(), {{x}}[{{x}}_base + min(key + j, end - 1u) * params.{{x}}_row + u], key + j < end);
{% else %}
                let {{x}}_unit = {{x}}[{{x}}_base + (key + j) * params.{{x}}_row + u];
{% endif %}
{% for word in ["x", "y", "z", "w"] %}
                let {{x}}_{{word}} = unpack2x16float({{x}}_unit.{{word}});
{% set step = 1 if x == "k" else v_stride %}
                tile_{{x}}[{{x}}_at + {{ 2 * loop.index0 * step }}u] = f16({{x}}_{{word}}.x);
                tile_{{x}}[{{x}}_at + {{ (2 * loop.index0 + 1) * step }}u] = f16({{x}}_{{word}}.y);
{% endfor %}
{% endfor %}
{% if tested %}
                let low = (v_unit & vec4<u32>(0x7c00u)) == vec4<u32>(0x7c00u);
                let high = (v_unit & vec4<u32>(0x7c000000u)) == vec4<u32>(0x7c000000u);
                if (any(low) || any(high)) {
                    atomicStore(&not_finite, 1u);
                }
{% endif %}
            }
            workgroupBarrier();
            // S = q k^T into this subgroup's scores. K column-major: in memory the elements of a
            // key are adjacent, and the product needs K transposed.
{% for g in range(at_once) %}
            var s{{g}} = {{mat}}<f32, C>();
{% endfor %}
{% for f in range(fragments) %}
{% for g in range(at_once) %}
            let k{{f}}_{{g}} = coopLoad<{{mat}}<f16, B>>(&tile_k[{{ g * size * k_stride + f * size }}u], {{k_stride}}u);
            s{{g}} = coopMultiplyAdd(q{{f}}, k{{f}}_{{g}}, s{{g}});
{% endfor %}
{% endfor %}
{% for g in range(at_once) %}
            coopStoreT(s{{g}}, &scores[own_scores + {{ g * size }}u], {{score_stride}}u);
{% endfor %}
            workgroupBarrier();
            // The logits of this lane's part of its row, the row's maximum, P and l.
{% for c in range(columns) %}
            let dot{{c}} = scores[score_at + part * {{columns}}u + {{c}}u] * params.q_scale * params.x_scale;
{% set logit = "capped(dot" ~ c ~ ")" if softcap else "dot" ~ c %}
{% if tested %}
            let key{{c}} = key + part * {{columns}}u + {{c}}u;
            let position{{c}} = positions[params.keys_at + min(key{{c}}, end - 1u)];
            let vis{{c}} = lo <= position{{c}} && position{{c}} < hi && key{{c}} < end;
            let S{{c}} = select(EMPTY_M, {{logit}}, vis{{c}});
            seen = seen || vis{{c}};
{% else %}
            let S{{c}} = {{logit}};
{% endif %}
{% endfor %}
            var n = m;
{% for c in range(columns) %}
            n = max(n, S{{c}});
{% endfor %}
{% for distance in distances %}
            n = max(n, subgroupShuffleXor(n, {{distance}}u));
{% endfor %}
            let far = n > m + 5.5f;
            n = select(m, n, far);
            let corr = weight_of(m - n);
            m = n;
            if (far) {
                atomicStore(&grew, 1u);
            }
            l *= corr;
{% for c in range(columns) %}
{% if tested %}
            let P{{c}} = select(0.0f, weight_of(S{{c}} - m), vis{{c}});
{% else %}
            let P{{c}} = weight_of(S{{c}} - m);
{% endif %}
            l += P{{c}};
            weights[weight_at + part * {{columns}}u + {{c}}u] = f16(P{{c}});
{% endfor %}
            workgroupBarrier();
            if (atomicLoad(&grew) != 0u) {
{{ through_memory("rescale") }}
            }
{% if tested %}
            let exact = atomicLoad(&not_finite) != 0u;
            if (exact) {
{{ through_memory("add elements") }}
            }
            if (!exact) {
{{ accumulate() }}
            }
{% else %}
{{ accumulate() }}
{% endif %}
        }
{% endmacro %}
@compute @workgroup_size({{threads}})
fn main(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_invocation_id) lane: u32
) {
{% include "attend/item.wgsl" %}
    let k_base = params.k_offset + batch * params.k_batch + kv_head * params.k_head;
    let v_base = params.v_offset + batch * params.v_batch + kv_head * params.v_head;
    let own_row = lane % {{size}}u;
    let part = lane / {{size}}u;
    let first_row = tile * {{Br}}u + subgroup * {{size}}u;
    let row = first_row + own_row;
    let row_exists = row < params.rows;
    let safe = min(row, params.rows - 1u);
    let lo = positions[spans + 2u * safe];
    let hi = positions[spans + 2u * safe + 1u];
    let q_at = params.q_offset + batch * params.q_batch + safe * params.q_row + head * params.q_head;
    let ml_at = params.ml_offset + (batch * params.heads + head) * params.rows + safe;
    var m = EMPTY_M;
    var l = 0.0f;
    var seen = full_runs < partial_runs;
    let own_scores = subgroup * {{ size * score_stride }}u;
    let own_weights = subgroup * {{ size * weight_stride }}u;
    let score_at = own_scores + own_row * {{score_stride}}u;
    let weight_at = own_weights + own_row * {{weight_stride}}u;
    if (thread == 0u) {
        atomicStore(&not_finite, 0u);
    }
    // q into matrix registers, through the memory of the weights.
{% for f in range(fragments) %}
    workgroupBarrier();
{% for e in range(size // parts) %}
    weights[weight_at + part * {{ size // parts }}u + {{e}}u] =
        load_q(q_at, {{ f * size }}u + part * {{ size // parts }}u + {{e}}u);
{% endfor %}
    workgroupBarrier();
    let q{{f}} = coopLoadT<{{mat}}<f16, A>>(&weights[own_weights], {{weight_stride}}u);
{% endfor %}
{% for f in range(fragments) %}
    var O{{f}} = {{mat}}<f32, C>();
{% endfor %}
    for (var run = full_runs; run < partial_runs; run++) {
{% include "attend/run.wgsl" %}
{{ tiles(false) }}
    }
    for (var run = partial_runs; run < runs_end; run++) {
{% include "attend/run.wgsl" %}
{{ tiles(true) }}
    }
    // l of each row, from the lanes that share it, and by what the state and the sums are merged.
    var sum = l;
    var any_seen = select(0u, 1u, seen);
{% for distance in distances %}
    sum += subgroupShuffleXor(sum, {{distance}}u);
{% endfor %}
{% for distance in distances %}
    any_seen |= subgroupShuffleXor(any_seen, {{distance}}u);
{% endfor %}
    workgroupBarrier();
    if (part == 0u) {
        let ml = state_ml[ml_at];
        let top = max(ml.x, m);
        let keep = weight_of(ml.x - top);
        let found = weight_of(m - top);
        let merges = row_exists && any_seen != 0u;
        row_factors[subgroup * {{size}}u + own_row] = select(vec2<f32>(1.0f, 0.0f), vec2<f32>(keep, found), merges);
        if (merges) {
            state_ml[ml_at] = vec2<f32>(top, ml.y * keep + sum * found);
        }
    }
    // O into the state, through the scores. A subgroup's lanes share the chunks of its rows.
{% for pass in passes %}
{% for f in range(pass.first, pass.end) %}
    coopStoreT(O{{f}}, &scores[own_scores + {{ (f - pass.first) * size }}u], {{score_stride}}u);
{% endfor %}
    workgroupBarrier();
{% for f in range(pass.first, pass.end) %}
    for (var i = lane; i < {{ size * size // 4 }}u; i += {{lanes}}u) {
        let r = i / {{ size // 4 }}u;
        let c = i % {{ size // 4 }}u;
        let at = own_scores + r * {{score_stride}}u + {{ (f - pass.first) * size }}u + 4u * c;
        let a_row = min(first_row + r, params.rows - 1u);
        let chunk = params.a_offset
            + ((batch * params.rows + a_row) * params.heads + head) * {{chunks}}u + {{ f * size // 4 }}u + c;
        let factors = row_factors[subgroup * {{size}}u + r];
        if (factors.y != 0.0f) {
            let sums = vec4<f32>(scores[at], scores[at + 1u], scores[at + 2u], scores[at + 3u]);
            state_a[chunk] = state_a[chunk] * factors.x + sums * factors.y;
        }
    }
{% endfor %}
    workgroupBarrier();
{% endfor %}
}
