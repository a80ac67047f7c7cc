// Gradients on matrix units: products of f16 matrices that a subgroup holds together, summed in f32. backward/portable.wgsl
// says what is computed, what is fixed and what is moving, and what the bindings hold; there is no bias.
//
// Tile: {{T}} fixed rows x {{M}} moving ones, by {{threads}} threads: {{subgroups}} subgroups of {{lanes}} lanes{% if halves %}, or twice as
// many of {{ lanes // 2 }}, as the driver decides{% endif %}.
// {{workgroup_bytes}} bytes of workgroup memory.
//
// Fixed rows lie in groups of {{size}}. The `sharers` of a group are the subgroups that compute it, and they have two roles:
//   role 0   S = {{areas[0].fixed}} {{areas[0].moving}}^T, its fixed rows in matrix registers for the whole call
//   role 1   dP = {{areas[1].fixed}} {{areas[1].moving}}^T, in the same way
{% if by_rows %}
// and all of them share the columns of dQ.
{% else %}
// and then role 0 adds to dK, role 1 to dV. A role is where a subgroup reads and writes, because conditions around matrices must
// be the same in the whole workgroup.
{% endif %}
//
// Single elements of a matrix register cannot be addressed, so S and dP go through workgroup memory: there, {{parts}} neighbouring
// lanes share a row. Moving rows are staged twice: row by row for S and dP, then element by element, so that for all products a
// matrix register's column lies together.
//
// P and dS are rounded to f16. P <= 1 has the factor 2^15. dS may be of any size, by that of d_o: so each fixed row has a power of
// two as a factor, by which the largest dS of its first tile is 2^7 to 2^8. It falls if one of a later tile would be 2^15 or more, and only
// then the sums go through workgroup memory. So an element of dS is off by at most 2^-11 of itself or 2^-32 of the row's largest,
// one of P by 2^-11 of itself or 2^-40:
//     |error of dQ_i| <= scale · sum of (2^-11 |dS_ij| + 2^-32 max |dS_i|) · |k_j|    and in the same way dK_j, over i
//     |error of dV_j| <= sum of (2^-11 P_ij + 2^-40) · |d_o_i|
// beside the rounding of sums in f32.
//
// 0 · NaN is NaN in a matrix unit too. So in tested runs NaN and infinities of moving rows are zero where they are added up, and if there
// were some, they are added to the fixed rows that see them when the sums are in memory.
{% include "parts/logits.wgsl" %}
{% include "backward/shares.wgsl" %}
{% include "parts/odd.wgsl" %}
{% include "parts/element.wgsl" %}

{% for sum in sums %}
{% set tensor = sum.moving %}
{% include "parts/load.wgsl" %}
{% endfor %}
// Moving rows of S and of dP, then of the sums.
var<workgroup> tiles: array<f16, {{ 2 * area }}>;
// S and dP.
var<workgroup> scores: array<f32, {{score_words}}>;
// dS and P.
var<workgroup> weights: array<f16, {{ 2 * T * weight_stride }}>;
var<workgroup> row_factors: array<f32, {{T}}>;
var<workgroup> grew: atomic<u32>;
var<workgroup> not_finite: atomic<u32>;
{% if halves %}
var<workgroup> sharers_here: u32;
{% endif %}

{% set mat = "coop_mat" ~ size ~ "x" ~ size %}
{# Which of `count` matrices side by side is number i of this subgroup, if `most` share them, at distances of `step` from
   `own`. The last may not exist; then it is the last that does. #}
{% macro number(i, count, own, step, most) %}
{% if most == 1 %}{{i}}u{% elif (i + 1) * most > count %}min({{own}} + {{i}}u * {{step}}, {{ count - 1 }}u){% else %}({{own}} + {{i}}u * {{step}}){% endif %}
{% endmacro %}
{# Of the columns of S or dP, and of the columns of the sums. #}
{% macro column(i) %}{{ number(i, at_once, "of_role", "per_role", most_per_role) }}{% endmacro %}
{% macro fragment(i) %}
{% if by_rows %}{{ number(i, fragments, "own", "sharers", most_sharers) }}{% else %}{{ number(i, fragments, "of_role", "per_role", most_per_role) }}{% endif %}
{% endmacro %}
{# The moving rows col, col + 1, ... into workgroup memory. Neighbouring threads take {{units_at_once}} units of a row, then the
   next row. Behind the end it is the last row, whose pairs are hidden. Query rows that saw no key are zero. #}
{% macro stage(for_sums) %}
            for (var i = thread; i < {{ M * units }}u; i += {{threads}}u) {
                let j = i / {{units_at_once}}u % {{M}}u;
                // A bound that compilers see: then one write stores the elements of a unit.
                let u = min(i / {{ units_at_once * M }}u * {{units_at_once}}u + i % {{units_at_once}}u, {{ units - 1 }}u);
                let moving_row = min(col + j, end - 1u);
{% if for_sums %}
                let at = 8u * u * {{sum_stride}}u + j;
{% else %}
                let at = j * {{row_stride}}u + 8u * u;
{% endif %}
{% if not by_rows %}
                let live = saw_keys(stats[stats_base + moving_row * params.stats_row].x);
{% endif %}
{% for one in areas %}
{% if one.summed or not for_sums %}
{% set x = one.moving %}
                let {{x}}_read = {{x}}[{{x}}_base + moving_row * params.{{x}}_row + u];
{% set unit = x ~ "_read" if by_rows else "select(vec4<u32>(), " ~ x ~ "_read, live)" %}
{% if for_sums %}
                let {{x}}_low = ({{x}}_read & vec4<u32>(0x7c00u)) == vec4<u32>(0x7c00u);
                let {{x}}_high = ({{x}}_read & vec4<u32>(0x7c000000u)) == vec4<u32>(0x7c000000u);
                let {{x}}_odd = tested && (any({{x}}_low) || any({{x}}_high));
                if ({{x}}_odd) {
                    atomicStore(&not_finite, 1u);
                }
                let {{x}}_mask = select(vec4<u32>(), vec4<u32>(0xffffu), {{x}}_low) | select(vec4<u32>(), vec4<u32>(0xffff0000u), {{x}}_high);
                let {{x}}_unit = {{unit}} & ~select(vec4<u32>(), {{x}}_mask, {{x}}_odd);
{% else %}
                let {{x}}_unit = {{unit}};
{% endif %}
{% set stride = sum_stride if for_sums else 1 %}
{% for word in ["x", "y", "z", "w"] %}
                let {{x}}_{{word}} = unpack2x16float({{x}}_unit.{{word}});
                tiles[at + {{ loop.index0 * 2 * stride + one.index * area }}u] = f16({{x}}_{{word}}.x);
                tiles[at + {{ (loop.index0 * 2 + 1) * stride + one.index * area }}u] = f16({{x}}_{{word}}.y);
{% endfor %}
{% endif %}
{% endfor %}
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
{% include "backward/item.wgsl" %}
{% if halves %}
    // From workgroup memory, because a condition around matrices must be the same in all threads.
    if (thread == 0u) {
        sharers_here = {{ 2 * lanes }}u / subgroup_size;
    }
    let sharers = workgroupUniformLoad(&sharers_here);
{% else %}
    let sharers = 2u;
{% endif %}
    let row_group = subgroup / sharers;
    let own = subgroup % sharers;
    let role = own & 1u;
    let of_role = own >> 1u;
    let per_role = sharers >> 1u;
    let in_rows = subgroup * subgroup_size + lane;
    let tile_row = in_rows / {{parts}}u;
    let part = in_rows % {{parts}}u;
    let safe = min(tile * {{T}}u + tile_row, params.fixed_end - 1u);
{% for one in areas %}
    let {{one.fixed}}_at = params.{{one.fixed}}_offset + batch * params.{{one.fixed}}_batch + own_head * params.{{one.fixed}}_head + safe * params.{{one.fixed}}_row;
{% endfor %}
{% if by_rows %}
    let own_stats = params.stats_offset + batch * params.stats_batch + own_head * params.stats_head;
    let of_row = stats[own_stats + safe * params.stats_row];
    let lo = lists[spans + 2u * safe];
    let hi = lists[spans + 2u * safe + 1u];
{% else %}
    let position = lists[params.keys_at + safe];
{% endif %}
    let own_scores = (role * {{T}}u + row_group * {{size}}u) * {{score_stride}}u;
    let own_square = subgroup * {{ size * size }}u;
    let own_weights = (role * {{T}}u + row_group * {{size}}u) * {{weight_stride}}u;
    let own_tile = role * {{area}}u;
    let score_at = tile_row * {{score_stride}}u + part * {{columns}}u;
    let weight_at = tile_row * {{weight_stride}}u + part * {{columns}}u;
{% if by_rows %}
    let sum_weights = row_group * {{ size * weight_stride }}u;
    let sum_tile = 0u;
{% else %}
    let sum_weights = own_weights;
    let sum_tile = own_tile;
{% endif %}
    if (thread == 0u) {
        atomicStore(&not_finite, 0u);
    }
    // The fixed rows into matrix registers, through the memory of the weights.
{% for f in range(fragments) %}
    workgroupBarrier();
{% for one in areas %}
{% for e in range(size // parts) %}
    {
        let d = {{ f * size }}u + part * {{ size // parts }}u + {{e}}u;
        weights[{{ one.index * T * weight_stride }}u + tile_row * {{weight_stride}}u + d - {{ f * size }}u] =
            f16(element({{one.fixed}}[{{one.fixed}}_at + (d >> 3u)], d));
    }
{% endfor %}
{% endfor %}
    workgroupBarrier();
    let fixed{{f}} = coopLoadT<{{mat}}<f16, A>>(&weights[own_weights], {{weight_stride}}u);
{% endfor %}
{% for i in range(accumulators) %}
    var sum{{i}} = {{mat}}<f32, C>();
{% endfor %}
    // The exponent of the factor of this thread's row, as f32 has it; 0 before its first dS that is not 0.
    var power = 0u;
{% include "backward/every_run.wgsl" %}
        let tested = run >= tested_runs;
        for (var col = first; col < end; col += {{M}}u) {
            workgroupBarrier();
            if (thread == 0u) {
                atomicStore(&grew, 0u);
            }
{{ stage(false) }}
            workgroupBarrier();
            // S or dP.
{% for sharers in sharings %}
{% set count = at_once * 2 // sharers or 1 %}
            {% if halves %}if (sharers == {{sharers}}u) {% endif %}{
{% for i in range(count) %}
                var s{{i}} = {{mat}}<f32, C>();
{% endfor %}
{% for f in range(fragments) %}
{% for i in range(count) %}
                let m{{f}}_{{i}} = coopLoad<{{mat}}<f16, B>>(&tiles[own_tile + {{ column(i) }} * {{ size * row_stride }}u + {{ f * size }}u], {{row_stride}}u);
                s{{i}} = coopMultiplyAdd(fixed{{f}}, m{{f}}_{{i}}, s{{i}});
{% endfor %}
{% endfor %}
{% for i in range(count) %}
                coopStoreT(s{{i}}, &scores[own_scores + {{ column(i) }} * {{size}}u], {{score_stride}}u);
{% endfor %}
            }
{% endfor %}
            workgroupBarrier();
{{ stage(true) }}
            // P and dS of this thread's part of its row.
            var largest = 0.0f;
{% for c in range(columns) %}
            let at{{c}} = min(col + part * {{columns}}u + {{c}}u, end - 1u);
{% if not by_rows %}
            let of{{c}} = stats[stats_base + at{{c}} * params.stats_row];
{% endif %}
{% set of = "of_row" if by_rows else "of" ~ c %}
            var vis{{c}} = true;
            if (tested) {
{% if by_rows %}
                let position = lists[params.keys_at + at{{c}}];
{% else %}
                let lo = lists[spans + 2u * at{{c}}];
                let hi = lists[spans + 2u * at{{c}} + 1u];
{% endif %}
                vis{{c}} = lo <= position && position < hi && col + part * {{columns}}u + {{c}}u < end;
            }
            let dot{{c}} = scores[score_at + {{c}}u] * params.q_scale * params.x_scale;
{% set logit = "capped(dot" ~ c ~ ")" if softcap else "dot" ~ c %}
            let P{{c}} = share_of({{logit}}, {{of}}.x, {{of}}.y);
            let dS{{c}} = select(0.0f, P{{c}} * (scores[score_at + {{ T * score_stride + c }}u] - {{of}}.z){{ " * slope_of(dot" ~ c ~ ")" if slopes }}, vis{{c}});
            largest = max(largest, abs(dS{{c}}));
{% if not by_rows %}
            weights[weight_at + {{ T * weight_stride + c }}u] = f16(select(0.0f, P{{c}} * 32768.0f, vis{{c}}));
{% endif %}
{% endfor %}
{% for distance in distances %}
            largest = max(largest, subgroupShuffleXor(largest, {{distance}}u));
{% endfor %}
            let exponent = (bitcast<u32>(largest) >> 23u) & 0xffu;
            let far = exponent != 0xffu && exponent != 0u && (power == 0u || largest * bitcast<f32>(power << 23u) >= 32768.0f);
            // Integers, because a quotient may be rounded. At most 2^100 and at least 2^-100.
            let next = select(power, clamp(261u - exponent, 27u, 227u), far);
            var corr = 1.0f;
            if (far && power != 0u) {
                corr = bitcast<f32>((127u - min(power - next, 126u)) << 23u);
                atomicStore(&grew, 1u);
            }
            power = next;
            let factor = bitcast<f32>(power << 23u);
{% for c in range(columns) %}
            weights[weight_at + {{c}}u] = f16(dS{{c}} * factor);
{% endfor %}
            workgroupBarrier();
            if (atomicLoad(&grew) != 0u) {
                if (part == 0u) {
                    row_factors[tile_row] = corr;
                }
                workgroupBarrier();
{% for i in range(accumulators) %}
                coopStoreT(sum{{i}}, &scores[own_square], {{size}}u);
                workgroupBarrier();
                for (var e = lane; e < {{ size * size }}u; e += subgroup_size) {
                    scores[own_square + e] *= {{ "" if by_rows else "select(1.0f, " }}row_factors[row_group * {{size}}u + e / {{size}}u]{{ "" if by_rows else ", role == 0u)" }};
                }
                workgroupBarrier();
                sum{{i}} = coopLoadT<{{mat}}<f32, C>>(&scores[own_square], {{size}}u);
                workgroupBarrier();
{% endfor %}
            }
{% for g in range(at_once) %}
            let w{{g}} = coopLoadT<{{mat}}<f16, A>>(&weights[sum_weights + {{ g * size }}u], {{weight_stride}}u);
{% endfor %}
{% for i in range(accumulators) %}
{% if i == always %}
            if (sharers == 2u) {
{% endif %}
{% for g in range(at_once) %}
            let x{{i}}_{{g}} = coopLoad<{{mat}}<f16, B>>(&tiles[sum_tile + {{ fragment(i) }} * {{ size * sum_stride }}u + {{ g * size }}u], {{sum_stride}}u);
            sum{{i}} = coopMultiplyAdd(w{{g}}, x{{i}}_{{g}}, sum{{i}});
{% endfor %}
{% endfor %}
{% if always < accumulators %}
            }
{% endif %}
        }
    }
    // The sums are added to those in memory, through the scores.
    workgroupBarrier();
    if (part == 0u) {
        row_factors[tile_row] = params.scale * bitcast<f32>(select(254u - power, 127u, power == 0u) << 23u);
    }
{% for i in range(accumulators) %}
    coopStoreT(sum{{i}}, &scores[own_square], {{size}}u);
    workgroupBarrier();
{% set most = most_sharers if by_rows else most_per_role %}
    {% if (i + 1) * most > fragments %}if ({{ "own" if by_rows else "of_role" }} + {{i}}u * {{ "sharers" if by_rows else "per_role" }} < {{fragments}}u) {% endif %}{
        for (var e = lane; e < {{ size * size // 4 }}u; e += subgroup_size) {
            let r = row_group * {{size}}u + e / {{ size // 4 }}u;
            let row = tile * {{T}}u + r;
            if (row < params.fixed_end{{ " && saw_keys(stats[own_stats + row * params.stats_row].x)" if by_rows }}) {
                let at = own_square + 4u * e;
                let found = vec4<f32>(scores[at], scores[at + 1u], scores[at + 2u], scores[at + 3u]);
                let chunk = params.sum_offset + batch * params.sum_batch + row * params.sum_row + own_head * params.sum_head
                    + {{ fragment(i) }} * {{ size // 4 }}u + e % {{ size // 4 }}u;
{% if by_rows %}
                dq[chunk] = dq[chunk] + found * row_factors[r];
{% else %}
                if (role == 0u) {
                    dk[chunk] = dk[chunk] + found * row_factors[r];
                } else {
                    dv[chunk] = dv[chunk] + found * 3.0517578125e-5f;
                }
{% endif %}
            }
        }
    }
    workgroupBarrier();
{% endfor %}
{% include "backward/odd_elements.wgsl" %}
}
