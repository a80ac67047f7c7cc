// Attention on matrix units: products of f16 matrices that a subgroup holds together, summed in
// f32. attend/portable.wgsl says what is computed, and what the bindings hold; there is no bias.
//
// Tile: Br = {{Br}} query rows x Bc = {{Bc}} keys, by {{threads}} threads: {{subgroups}} subgroups of {{lanes}} lanes{% if halves %}, or twice as
// many of {{ lanes // 2 }}, as the driver decides{% endif %}.
// {{workgroup_bytes}} bytes of workgroup memory.
//
// Rows lie in groups of {{size}}. The `sharers` of a group are the subgroups that compute it: each has q of its rows, and of
// the columns of S, and of O, every matrix whose number is `own` modulo `sharers`.
//
// A subgroup's q and O stay in matrix registers for the whole call (q0, q1, ...; O0, O1, ...). The K
// and V tiles are staged once for all subgroups of the workgroup: K key by key, V element by element,
// so that for both a matrix register's column lies together; 16 bytes between them, for the banks. Single elements of a
// matrix register cannot be addressed, so mask and softmax go through workgroup memory: there, {{parts}} neighbouring lanes
// share a row.
//
// O goes through workgroup memory only when a row's maximum grows by more than 2^8 within a tile.
// Otherwise P stays relative to the old maximum, may exceed 1, and nothing is rescaled.
// (FlashAttention-4 does the same to save multiplications.) 2^8 · 2048 keys is far below the largest
// values of f16 weights and f32 sums.
//
// 0 · NaN is NaN in a matrix unit too. So in partial tiles values that are not finite are zero in workgroup memory, and if
// there were some, they are added element by element to the rows that see them. No sum changes its order by that.
{% include "parts/logits.wgsl" %}
{% include "parts/element.wgsl" %}
fn q_element(at: u32, d: u32) -> f16 { return f16(element(q[at + (d >> 3u)], d)); }

var<workgroup> tile_k: array<f16, {{ Bc * k_stride }}>;
var<workgroup> tile_v: array<f16, {{ chunks * 4 * v_stride }}>;
var<workgroup> scores: array<f32, {{score_words}}>;
var<workgroup> weights: array<f16, {{ Br * weight_stride }}>;
var<workgroup> row_factors: array<vec2<f32>, {{Br}}>;
var<workgroup> grew: atomic<u32>;
var<workgroup> not_finite: atomic<u32>;
{% if halves %}
var<workgroup> sharers_here: u32;
{% endif %}

{% set mat = "coop_mat" ~ size ~ "x" ~ size %}
{# Which of `count` matrices side by side is number i of this subgroup. The last may not exist; then it is the last that does. #}
{% macro number(i, count) %}
{% if most_sharers == 1 %}{{i}}u{% elif (i + 1) * most_sharers > count %}min(own + {{i}}u * sharers, {{ count - 1 }}u){% else %}(own + {{i}}u * sharers){% endif %}
{% endmacro %}
{# The accumulator through workgroup memory, one matrix at a time. `step` changes `scores[at]`: row r, column c. #}
{% macro through_memory(step) %}
{% for i in range(accumulators) %}
                coopStoreT(O{{i}}, &scores[own_square], {{size}}u);
                workgroupBarrier();
                for (var e = lane; e < {{ size * size }}u; e += subgroup_size) {
                    let r = row_group * {{size}}u + e / {{size}}u;
{% if step == "rescale" %}
                    scores[own_square + e] *= row_factors[r].x;
{% else %}
                    let of_row = spans + 2u * min(tile * {{Br}}u + r, params.rows - 1u);
                    let d = {{ number(i, fragments) }} * {{size}}u + e % {{size}}u;
                    for (var j = 0u; j < {{Bc}}u && key + j < end; j++) {
                        let position = positions[params.keys_at + key + j];
                        let sees = positions[of_row] <= position && position < positions[of_row + 1u];
                        let value = element(v[v_base + (key + j) * params.v_row + (d >> 3u)], d);
                        if (sees && (bitcast<u32>(value) & 0x7f800000u) == 0x7f800000u) {
                            scores[own_square + e] += f32(weights[r * {{weight_stride}}u + j]) * value;
                        }
                    }
{% endif %}
                }
                workgroupBarrier();
                O{{i}} = coopLoadT<{{mat}}<f32, C>>(&scores[own_square], {{size}}u);
                workgroupBarrier();
{% endfor %}
{% endmacro %}
{# S = q k^T of this subgroup's columns, into the scores. K column-major: in memory the elements of a key are adjacent, and
   the product needs K transposed. #}
{% macro products(count) %}
{% for i in range(count) %}
                var s{{i}} = {{mat}}<f32, C>();
{% endfor %}
{% for f in range(fragments) %}
{% for i in range(count) %}
                let k{{f}}_{{i}} = coopLoad<{{mat}}<f16, B>>(&tile_k[{{ number(i, at_once) }} * {{ size * k_stride }}u + {{ f * size }}u], {{k_stride}}u);
                s{{i}} = coopMultiplyAdd(q{{f}}, k{{f}}_{{i}}, s{{i}});
{% endfor %}
{% endfor %}
{% for i in range(count) %}
                coopStoreT(s{{i}}, &scores[own_scores + {{ number(i, at_once) }} * {{size}}u], {{score_stride}}u);
{% endfor %}
{% endmacro %}
{# O += P V on matrix units. #}
{% macro accumulate() %}
{% for g in range(at_once) %}
                let w{{g}} = coopLoadT<{{mat}}<f16, A>>(&weights[own_weights + {{ g * size }}u], {{weight_stride}}u);
{% endfor %}
{% for i in range(accumulators) %}
{% if i == always %}
                if (sharers == {{share}}u) {
{% endif %}
{% for g in range(at_once) %}
                let v{{i}}_{{g}} = coopLoad<{{mat}}<f16, B>>(&tile_v[{{ number(i, fragments) }} * {{ size * v_stride }}u + {{ g * size }}u], {{v_stride}}u);
                O{{i}} = coopMultiplyAdd(w{{g}}, v{{i}}_{{g}}, O{{i}});
{% endfor %}
{% endfor %}
{% if always < accumulators %}
                }
{% endif %}
{% endmacro %}
{# The tiles of one run. #}
{% macro tiles(tested) %}
        for (var key = first; key < end; key += {{Bc}}u) {
            workgroupBarrier();
            if (thread == 0u) {
                atomicStore(&grew, 0u);
            }
            // K and V of the tile; zero behind the end of a partial run. Neighbouring threads take {{units_at_once}} units of a
            // row, then the next row: so they read {{ 16 * units_at_once }} bytes together, and write V to several banks.
            for (var i = thread; i < {{ Bc * units }}u; i += {{threads}}u) {
                let j = i / {{units_at_once}}u % {{Bc}}u;
                // A bound that compilers see: then the elements of a unit of K need no tests of their own, and one
                // write stores them.
                let u = min(i / {{ units_at_once * Bc }}u * {{units_at_once}}u + i % {{units_at_once}}u, {{ units - 1 }}u);
                let k_at = j * {{k_stride}}u + 8u * u;
                let v_at = 8u * u * {{v_stride}}u + j;
{% for x in ["k", "v"] %}
{% if not tested %}
                let {{x}}_unit = {{x}}[{{x}}_base + (key + j) * params.{{x}}_row + u];
{% else %}
                let {{x}}_read = select(vec4<u32>(), {{x}}[{{x}}_base + min(key + j, end - 1u) * params.{{x}}_row + u], key + j < end);
{% if x == "k" %}
                let k_unit = k_read;
{% else %}
                let low = (v_read & vec4<u32>(0x7c00u)) == vec4<u32>(0x7c00u);
                let high = (v_read & vec4<u32>(0x7c000000u)) == vec4<u32>(0x7c000000u);
                if (any(low) || any(high)) {
                    atomicStore(&not_finite, 1u);
                }
                let v_unit = v_read & ~(select(vec4<u32>(), vec4<u32>(0xffffu), low) | select(vec4<u32>(), vec4<u32>(0xffff0000u), high));
{% endif %}
{% endif %}
{% for word in ["x", "y", "z", "w"] %}
                let {{x}}_{{word}} = unpack2x16float({{x}}_unit.{{word}});
{% set step = 1 if x == "k" else v_stride %}
                tile_{{x}}[{{x}}_at + {{ 2 * loop.index0 * step }}u] = f16({{x}}_{{word}}.x);
                tile_{{x}}[{{x}}_at + {{ (2 * loop.index0 + 1) * step }}u] = f16({{x}}_{{word}}.y);
{% endfor %}
{% endfor %}
            }
            workgroupBarrier();
{% for sharers in sharings %}
            {% if halves %}if (sharers == {{sharers}}u) {% endif %}{
{{ products(at_once // sharers or 1) }}
            }
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
            // O of a row is zero as long as its l is.
            if (far && l != 0.0f) {
                atomicStore(&grew, 1u);
            }
            n = select(m, n, far);
            let corr = weight_of(m - n);
            m = n;
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
                if (part == 0u) {
                    row_factors[tile_row] = vec2<f32>(corr, 0.0f);
                }
                workgroupBarrier();
{{ through_memory("rescale") }}
            }
{{ accumulate() }}
{% if tested %}
            if (atomicLoad(&not_finite) != 0u) {
{{ through_memory("add elements") }}
            }
{% endif %}
        }
{% endmacro %}
@compute @workgroup_size({{threads}})
fn main(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_size) subgroup_size: u32,
    @builtin(subgroup_invocation_id) lane: u32
) {
{% include "attend/item.wgsl" %}
    let k_base = params.k_offset + batch * params.k_batch + kv_head * params.k_head;
    let v_base = params.v_offset + batch * params.v_batch + kv_head * params.v_head;
{% if halves %}
    // From workgroup memory, because a condition around matrices must be the same in all threads.
    if (thread == 0u) {
        sharers_here = {{ share * lanes }}u / subgroup_size;
    }
    let sharers = workgroupUniformLoad(&sharers_here);
{% else %}
    let sharers = {{share}}u;
{% endif %}
    let row_group = subgroup / sharers;
    let own = subgroup % sharers;
    let in_rows = subgroup * subgroup_size + lane;
    let tile_row = in_rows / {{parts}}u;
    let part = in_rows % {{parts}}u;
    let row = tile * {{Br}}u + tile_row;
    let row_exists = row < params.rows;
    let safe = min(row, params.rows - 1u);
    let lo = positions[spans + 2u * safe];
    let hi = positions[spans + 2u * safe + 1u];
    let q_at = params.q_offset + batch * params.q_batch + safe * params.q_row + head * params.q_head;
    let ml_at = params.ml_offset + (batch * params.heads + head) * params.rows + safe;
    var m = EMPTY_M;
    var l = 0.0f;
    var seen = full_runs < partial_runs;
    let own_scores = row_group * {{ size * score_stride }}u;
    let own_square = subgroup * {{ size * size }}u;
    let own_weights = row_group * {{ size * weight_stride }}u;
    let score_at = tile_row * {{score_stride}}u;
    let weight_at = tile_row * {{weight_stride}}u;
    if (thread == 0u) {
        atomicStore(&not_finite, 0u);
    }
    // q into matrix registers, through the memory of the weights.
{% for f in range(fragments) %}
    workgroupBarrier();
{% for e in range(size // parts) %}
    weights[weight_at + part * {{ size // parts }}u + {{e}}u] =
        q_element(q_at, {{ f * size }}u + part * {{ size // parts }}u + {{e}}u);
{% endfor %}
    workgroupBarrier();
    let q{{f}} = coopLoadT<{{mat}}<f16, A>>(&weights[own_weights], {{weight_stride}}u);
{% endfor %}
{% for i in range(accumulators) %}
    var O{{i}} = {{mat}}<f32, C>();
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
        row_factors[tile_row] = select(vec2<f32>(1.0f, 0.0f), vec2<f32>(keep, found), merges);
        if (merges) {
            state_ml[ml_at] = vec2<f32>(top, ml.y * keep + sum * found);
        }
    }
    // O into the state, through the scores. A subgroup's lanes share the chunks of its rows.
{% for i in range(accumulators) %}
    coopStoreT(O{{i}}, &scores[own_square], {{size}}u);
    workgroupBarrier();
    if (own + {{i}}u * sharers < {{fragments}}u) {
        for (var e = lane; e < {{ size * size // 4 }}u; e += subgroup_size) {
            let r = row_group * {{size}}u + e / {{ size // 4 }}u;
            let at = own_square + 4u * e;
            let a_row = min(tile * {{Br}}u + r, params.rows - 1u);
            let chunk = params.a_offset
                + ((batch * params.rows + a_row) * params.heads + head) * {{chunks}}u
                + {{ number(i, fragments) }} * {{ size // 4 }}u + e % {{ size // 4 }}u;
            let factors = row_factors[r];
            if (factors.y != 0.0f) {
                let sums = vec4<f32>(scores[at], scores[at + 1u], scores[at + 2u], scores[at + 3u]);
                state_a[chunk] = state_a[chunk] * factors.x + sums * factors.y;
            }
        }
    }
    workgroupBarrier();
{% endfor %}
}
