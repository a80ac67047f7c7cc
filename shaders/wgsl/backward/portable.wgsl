// Gradients of one block of queries against one block of keys, added to f32 sums, within WebGPU's
// default limits: no feature, 64 threads, at most 16 KiB of workgroup memory.
//
// For a query row with log-sum-exp lse, and for each key that it sees (Dao 2023, arXiv 2307.08691,
// 3.1.2):
//
//     S  = scale · q·k           softcap c: c · tanh(S / c); plus the bias
//     P  = e^(S - lse)           dP = d_o·v
//     dS = P · (dP - D)          D = sum of d_o·o - d_lse; softcap: · (1 - tanh^2)
//     dQ += scale · dS · k       dK += scale · dS · q       dV += P · d_o
//
// WGSL has no atomic addition of f32, and an order of additions that depends on timing would change
// bytes. So a sum belongs to one workgroup, which has a tile of what is fixed and loops over what is
// moving:
//   dQ         fixed are query rows (q, d_o), moving are keys (k, v)
//   dK, dV     fixed are keys (k, v), moving are the query rows (q, d_o) of all heads that read them
//   dBias      = dS before the factor of the softcap. A kernel of its own, because the others have no
//              binding left. Fixed are query rows, or keys where all queries share a row of the
//              bias; of one query head at a time. Where heads or batch entries share elements, each
//              has a dispatch, one after the other.
// All compute S; two products of seven are the price. q has the factor that it has in the forward
// kernels, so S has the rounding that is in lse.
//
// Bindings
//   q, d_o, k, v  strided, in units of 16 bytes
//   stats         f32 [batch, rows, heads, 4], strided, in units of 16 bytes: what row_stats.wgsl
//                 makes. Of a row that saw no key lse is -EMPTY_M; the kernel of its own tile does
//                 not write it, the other one reads zeros instead of its q and d_o.
//   dq, dk, dv    f32, strided, in units of 16 bytes: the sums
//   d_bias        f32 [batch, rows, heads, columns], strided, in elements; columns are positions
//   lists         from heads_at the KV head of each query head, or for each KV head the first query
//                 head that reads it, and the end; from keys_at the position of each key; from
//                 spans_at the positions lo..hi of each class and row; from starts_at and runs_at the
//                 work list as in attend/portable.wgsl, with runs of what moves
//   bias          as in attend/portable.wgsl
//
// Of tested pairs that are hidden, P and dS are 0. In a tested run NaN and infinities of the moving rows are zero where
// they are added up, because 0 · NaN is NaN; at the end they are added to the fixed rows that see them.
//
// Tile: {{tile_rows}} fixed rows x 32 moving ones; {{workgroup_bytes}} bytes of workgroup memory.
//
// 64 threads are a grid of 8 x 8. Of S and of dP, thread (tr, tc) holds {{rows}} x 4: fixed rows tr, tr + 8,
// ..., moving ones tc, tc + 8, ... Of the sums it holds the same fixed rows and the units tc, tc + 8, ..., in registers over
// the whole loop: {{unit_chunks}} chunk{{ "s" if unit_chunks == 2 }} of each (dq0_0: row 0, first chunk){% if unit_chunks == 2 %}, or 1 chunk of a last pass with at most 4 units{% endif %}.
//
// Workgroup memory: 8 units of each tensor, of 16-bit types as they are stored, which takes half the reads; unit-major, so
// that neighbouring threads read neighbouring vectors: fixed0 and moving0 of S, fixed1 and moving1 of dP. When S and dP are
// complete, P takes the place of fixed0 and dS that of fixed1, and the moving rows are loaded once
// more, row by row. Slot 4 s + j of P and dS is the moving row 8 j + s: the four of a thread are one
// vector, and the rows lie in the same order.
//
// Barriers stand where an area is replaced (everyone has read it) and where it is read (everyone
// has written).
{% include "parts/logits.wgsl" %}
{% include "backward/shares.wgsl" %}
{% include "parts/finite.wgsl" %}
{% for sum in sums %}
{% set tensor = sum.moving %}
{% include "parts/load.wgsl" %}
{% endfor %}
{% for area in areas %}
var<workgroup> fixed{{loop.index0}}: array<{{unit_type}}, {{ 8 * tile_rows }}>;
var<workgroup> moving{{loop.index0}}: array<{{unit_type}}, 256>;
{% endfor %}

{# The index of fixed row {{i}} of this thread; one that exists; where its sum lies; and its statistics. #}
{% macro row(i) %}tile * {{tile_rows}}u + {{ 8 * i }}u + tr{% endmacro %}
{% macro safe(i) %}min({{ row(i) }}, params.fixed_end - 1u){% endmacro %}
{% macro sum_of(i) -%}
params.sum_offset + batch * params.sum_batch + ({{ safe(i) }}) * params.sum_row + own_head * params.sum_head
{%- endmacro %}
{% macro stats_of(i) %}stats[own_stats + {{ safe(i) }} * params.stats_row]{% endmacro %}
{# The unit that this thread loads in a pass; of a last pass that is not whole the last that exists, which is not used. #}
{% macro unit_of(first) %}{{ "min(" ~ first ~ " + tc, " ~ (units - 1) ~ "u)" if units % 8 else first ~ " + tc" }}{% endmacro %}
{# The moving row that this thread loads at step `j`, and a unit of it. Behind the end it is the last row, whose pairs are
   hidden. Of query rows that saw no key it is zero. #}
{% macro moving_row(j) %}min(col + load + {{ 2 * j }}u, end - 1u){% endmacro %}
{% macro moving_unit(tensor, j, first) -%}
{% set unit = tensor ~ "[" ~ tensor ~ "_base + " ~ moving_row(j) ~ " * params." ~ tensor ~ "_row + " ~ unit_of(first) ~ "]" -%}
{% if by_rows -%}
{{unit}}
{%- else -%}
select({{unit_type}}(), {{unit}}, saw_keys(stats[stats_base + {{ moving_row(j) }} * params.stats_row].x))
{%- endif %}
{%- endmacro %}
{# The factor of q: of f32 on its way into workgroup memory, of 16-bit types when it is read. #}
{% macro stored(tensor) %}{{ " * params.q_scale" if tensor == "q" and unit_chunks == 1 }}{% endmacro %}
{% macro read(tensor) %}{{ " * params.q_scale" if tensor == "q" and unit_chunks == 2 }}{% endmacro %}
{# P and dS in place of units. #}
{% macro as_unit(x) %}{{ x if unit_chunks == 1 else "bitcast<vec4<u32>>(" ~ x ~ ")" }}{% endmacro %}
{% macro as_vector(x) %}{{ x if unit_chunks == 1 else "bitcast<vec4<f32>>(" ~ x ~ ")" }}{% endmacro %}
{# The chunk of the head that is number `c` of this thread's. #}
{% macro chunk_of(c) -%}
{% if unit_chunks == 1 or (c == held - 1 and held % 2 == 1) -%}
{{ 8 * c }}u + tc
{%- else -%}
{{ 16 * (c // 2) + c % 2 }}u + 2u * tc
{%- endif %}
{%- endmacro %}
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group_id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
{% include "backward/item.wgsl" %}
    let tr = thread >> 3u;
    let tc = thread & 7u;
{% for area in areas %}
    let {{area.fixed}}_fixed = params.{{area.fixed}}_offset + batch * params.{{area.fixed}}_batch + {{fixed_head}} * params.{{area.fixed}}_head;
{% endfor %}
{% if by_rows %}
    let own_stats = params.stats_offset + batch * params.stats_batch + own_head * params.stats_head;
{% if bias %}
    let bias_base = params.bias_offset + batch * params.bias_batch + own_head * params.bias_head;
{% endif %}
{% endif %}
{% for i in range(rows) %}
{% for sum in sums %}
{% for c in range(held) %}
    var {{sum.name}}{{i}}_{{c}} = vec4<f32>();
{% endfor %}
{% endfor %}
{% if of_bias and by_rows %}
    let adds{{i}} = {{ row(i) }} < params.fixed_end && saw_keys({{ stats_of(i) }}.x);
{% elif of_bias %}
    var bias{{i}} = vec4<f32>();
{% endif %}
{% endfor %}
    // Whether this thread took NaN or infinity out of a moving row.
    var odd = false;
    // The moving row of slot 8 j + tr is this one and 2 j.
    let load = (tr & 3u) * 8u + (tr >> 2u);
{% include "backward/every_run.wgsl" %}
        let tested = {{ "true" if bias else "run >= tested_runs" }};
        for (var col = first; col < end; col += 32u) {
            // 1, which only col < end says: no compiler unrolls a loop with such a bound.
            let one = min(end - col, 1u);
            // S and dP, 8 units of the head at a time.
{% for area in areas %}
{% for i in range(rows) %}
            var {{area.name}}{{i}} = vec4<f32>();
{% endfor %}
{% endfor %}
            for (var g = 0u; g < {{passes}}u * one; g++) {
                workgroupBarrier();
{% for area in areas %}
{% set index = loop.index0 %}
{% for i in range(rows) %}
                fixed{{index}}[tc * {{tile_rows}}u + {{ 8 * i }}u + tr] = {{area.fixed}}[{{area.fixed}}_fixed + {{ safe(i) }} * params.{{area.fixed}}_row + {{ unit_of("g * 8u") }}]{{ stored(area.fixed) }};
{% endfor %}
{% for j in range(4) %}
                moving{{index}}[tc * 32u + load + {{ 2 * j }}u] = {{ moving_unit(area.moving, j, "g * 8u") }}{{ stored(area.moving) }};
{% endfor %}
{% endfor %}
                workgroupBarrier();
                let units_here = {{ "min(8u, " ~ units ~ "u - g * 8u)" if units % 8 else "8u" }} * one;
                for (var n = 0u; n < units_here; n++) {
                    let u = n & 7u;
{% for area in areas %}
{% set x = area.name %}
{% for i in range(rows) %}
                    let {{x}}f{{i}} = fixed{{area.index}}[u * {{tile_rows}}u + {{ 8 * i }}u + tr];
{% for h in range(unit_chunks) %}
                    let {{x}}f{{i}}_{{h}} = chunk_{{h}}({{x}}f{{i}}){{ read(area.fixed) }};
{% endfor %}
{% endfor %}
{% for j in range(4) %}
                    let {{x}}m{{j}} = moving{{area.index}}[u * 32u + {{ 8 * j }}u + tc];
{% for h in range(unit_chunks) %}
                    let {{x}}m{{j}}_{{h}} = chunk_{{h}}({{x}}m{{j}}){{ read(area.moving) }};
{% for i in range(rows) %}
                    {{x}}{{i}}.{{ "xyzw"[j] }} += dot({{x}}f{{i}}_{{h}}, {{x}}m{{j}}_{{h}});
{% endfor %}
{% endfor %}
{% endfor %}
{% endfor %}
                }
            }
{% if not by_rows %}
            // What is known of the thread's moving rows.
            let there = min(vec4<u32>(col + tc) + vec4<u32>(0u, 8u, 16u, 24u), vec4<u32>(end - 1u));
            let stats_x = stats[stats_base + there.x * params.stats_row];
            let stats_y = stats[stats_base + there.y * params.stats_row];
            let stats_z = stats[stats_base + there.z * params.stats_row];
            let stats_w = stats[stats_base + there.w * params.stats_row];
            let lse = vec4<f32>(stats_x.x, stats_y.x, stats_z.x, stats_w.x);
            let factor = vec4<f32>(stats_x.y, stats_y.y, stats_z.y, stats_w.y);
{% if scores %}
            let delta = vec4<f32>(stats_x.z, stats_y.z, stats_z.z, stats_w.z);
{% endif %}
{% endif %}
            // Which of the thread's pairs are visible; with a bias, also the terms of their logits.
{% for i in range(rows) %}
            var vis{{i}} = vec4<bool>(true, true, true, true);
{% if bias %}
            var term{{i}} = vec4<f32>();
{% endif %}
{% endfor %}
            if (tested) {
                let cols = vec4<u32>(col + tc) + vec4<u32>(0u, 8u, 16u, 24u);
                let inside = cols < vec4<u32>(end);
                let at = min(cols, vec4<u32>(end - 1u));
{% if by_rows %}
                let pos = vec4<u32>(
                    lists[params.keys_at + at.x], lists[params.keys_at + at.y],
                    lists[params.keys_at + at.z], lists[params.keys_at + at.w]);
{% else %}
                let lo = vec4<u32>(
                    lists[spans + 2u * at.x], lists[spans + 2u * at.y],
                    lists[spans + 2u * at.z], lists[spans + 2u * at.w]);
                let hi = vec4<u32>(
                    lists[spans + 2u * at.x + 1u], lists[spans + 2u * at.y + 1u],
                    lists[spans + 2u * at.z + 1u], lists[spans + 2u * at.w + 1u]);
{% if bias %}
                let bias_rows = vec4<u32>(params.bias_offset + batch * params.bias_batch + head * params.bias_head) + at * params.bias_row;
{% endif %}
{% endif %}
{% for i in range(rows) %}
{% if by_rows %}
                let span{{i}} = spans + 2u * {{ safe(i) }};
                vis{{i}} = (vec4<u32>(lists[span{{i}}]) <= pos) & (pos < vec4<u32>(lists[span{{i}} + 1u])) & inside;
{% if bias %}
                let bias_row{{i}} = bias_base + {{ safe(i) }} * params.bias_row;
                term{{i}} = vec4<f32>(
                    bias_term(bias_row{{i}}, pos.x), bias_term(bias_row{{i}}, pos.y),
                    bias_term(bias_row{{i}}, pos.z), bias_term(bias_row{{i}}, pos.w));
{% endif %}
{% else %}
                let pos{{i}} = lists[params.keys_at + {{ safe(i) }}];
                vis{{i}} = (lo <= vec4<u32>(pos{{i}})) & (vec4<u32>(pos{{i}}) < hi) & inside;
{% if bias %}
                term{{i}} = vec4<f32>(
                    bias_term(bias_rows.x, pos{{i}}), bias_term(bias_rows.y, pos{{i}}),
                    bias_term(bias_rows.z, pos{{i}}), bias_term(bias_rows.w, pos{{i}}));
{% endif %}
{% endif %}
{% if bias %}
                vis{{i}} = vis{{i}} & vec4<bool>(shows(term{{i}}.x), shows(term{{i}}.y), shows(term{{i}}.z), shows(term{{i}}.w));
{% endif %}
{% endfor %}
            }
            // P and dS.
{% for i in range(rows) %}
{% if by_rows %}
            let stats{{i}} = {{ stats_of(i) }};
{% endif %}
            S{{i}} *= params.x_scale;
{% if softcap %}
{% if slopes %}
            let slope{{i}} = vec4<f32>(slope_of(S{{i}}.x), slope_of(S{{i}}.y), slope_of(S{{i}}.z), slope_of(S{{i}}.w));
{% endif %}
            S{{i}} = vec4<f32>(capped(S{{i}}.x), capped(S{{i}}.y), capped(S{{i}}.z), capped(S{{i}}.w));
{% endif %}
{% if bias %}
            S{{i}} += term{{i}};
{% endif %}
            let P{{i}} = select(vec4<f32>(), vec4<f32>(
{%- for x in ["x", "y", "z", "w"] -%}
share_of(S{{i}}.{{x}}, {% if by_rows %}stats{{i}}.x, stats{{i}}.y{% else %}lse.{{x}}, factor.{{x}}{% endif %}){{ ", " if not loop.last }}
{%- endfor -%}
), vis{{i}});
{% if scores %}
            let dS{{i}} = select(vec4<f32>(), P{{i}} * (dP{{i}} - {% if by_rows %}stats{{i}}.z{% else %}delta{% endif %}){{ " * slope" ~ i if slopes }}, vis{{i}});
{% endif %}
{% endfor %}
{% if of_bias %}
            // dBias: of rows to memory, where no other thread of the dispatch has these pairs; of
            // keys to sums.
{% if by_rows %}
{% for i in range(rows) %}
{% for x in ["x", "y", "z", "w"] %}
            if (adds{{i}} && vis{{i}}.{{x}}) {
                let element = {{ sum_of(i) }} + lists[params.keys_at + min(col + {{ 8 * loop.index0 }}u + tc, end - 1u)];
                d_bias[element] = d_bias[element] + dS{{i}}.{{x}};
            }
{% endfor %}
{% endfor %}
{% else %}
            let live = vec4<bool>(saw_keys(stats_x.x), saw_keys(stats_y.x), saw_keys(stats_z.x), saw_keys(stats_w.x));
{% for i in range(rows) %}
            bias{{i}} += select(vec4<f32>(), dS{{i}}, vis{{i}} & live);
{% endfor %}
{% endif %}
{% else %}
            workgroupBarrier();
{% for sum in sums %}
{% for i in range(rows) %}
            {{sum.factors}}[tc * {{tile_rows}}u + {{ 8 * i }}u + tr] = {{ as_unit(sum.weight ~ i) }};
{% endfor %}
{% endfor %}
            // The sums, 8 units of the head at a time.
{% for g in range(passes) %}
{# The thread's chunks in this pass: one of f32; of a 16-bit type two, or one of a last pass with at most 4 units. #}
{% set narrow = held < unit_chunks * (g + 1) %}
{% set here = range(unit_chunks * g, held if narrow else unit_chunks * (g + 1)) %}
{% if g > 0 %}
            workgroupBarrier();
{% endif %}
{% for sum in sums %}
            {
{% for j in range(4) %}
                var unit{{j}} = {{ moving_unit(sum.moving, j, 8 * g ~ "u") }};
{% endfor %}
                if (tested) {
{% for j in range(4) %}
                    let finite{{j}} = finite_part(unit{{j}});
                    odd = odd || any(bitcast<vec4<u32>>(finite{{j}}) != bitcast<vec4<u32>>(unit{{j}}));
                    unit{{j}} = finite{{j}};
{% endfor %}
                }
{% for j in range(4) %}
                {{sum.area}}[({{ 8 * j }}u + tr) * 8u + tc] = unit{{j}};
{% endfor %}
            }
{% endfor %}
            workgroupBarrier();
            for (var n = 0u; n < 8u * one; n++) {
                let s = n & 7u;
{% for sum in sums %}
{% set n = sum.name %}
{% for i in range(rows) %}
                let {{n}}w{{i}} = {{ as_vector(sum.factors ~ "[s * " ~ tile_rows ~ "u + " ~ 8 * i ~ "u + tr]") }};
{% endfor %}
{% for j in range(4) %}
{% set m = n ~ "m" ~ j %}
                let {{m}} = {{sum.area}}[(s * 4u + {{j}}u) * 8u + {{ "(tc >> 1u)" if narrow else "tc" }}];
{% for c in here %}
                let {{m}}_{{c}} = {{ "select(chunk_0(" ~ m ~ "), chunk_1(" ~ m ~ "), (tc & 1u) == 1u)" if narrow else "chunk_" ~ c % unit_chunks ~ "(" ~ m ~ ")" }};
{% for i in range(rows) %}
                {{n}}{{i}}_{{c}} += {{m}}_{{c}} * {{n}}w{{i}}.{{ "xyzw"[j] }};
{% endfor %}
{% endfor %}
{% endfor %}
{% endfor %}
            }
{% endfor %}
{% endif %}
        }
    }
{% if not of_bias %}
{% include "backward/odd_rows.wgsl" %}
{% endif %}
{% if of_bias and not by_rows %}
    // The sums of a key are in eight threads.
    workgroupBarrier();
{% for i in range(rows) %}
    fixed0[tc * {{tile_rows}}u + {{ 8 * i }}u + tr] = {{ as_unit("bias" ~ i) }};
{% endfor %}
    workgroupBarrier();
    if (tc != 0u) { return; }
{% for i in range(rows) %}
    if ({{ row(i) }} < params.fixed_end) {
        var sum = vec4<f32>();
        for (var c = 0u; c < 8u; c++) {
            sum += {{ as_vector("fixed0[c * " ~ tile_rows ~ "u + " ~ 8 * i ~ "u + tr]") }};
        }
        let element = {{ sum_of(i) }} + lists[params.keys_at + {{ safe(i) }}];
        d_bias[element] = d_bias[element] + ((sum.x + sum.y) + (sum.z + sum.w));
    }
{% endfor %}
{% elif not of_bias %}
    // The sums are added to those in memory.
{% for i in range(rows) %}
    if ({{ row(i) }} < params.fixed_end{{ " && saw_keys(" ~ stats_of(i) ~ ".x)" if by_rows }}) {
        let sum_at = {{ sum_of(i) }};
{% for sum in sums %}
{% for c in range(held) %}
{% set at = sum.name ~ "[sum_at + " ~ chunk_of(c) ~ "]" %}
{% set guarded = c >= unit_chunks * (passes - 1) and units % 8 %}
        {{ "if (" ~ chunk_of(c) ~ " < " ~ chunks ~ "u) { " if guarded }}{{at}} = {{at}} + {{sum.name}}{{i}}_{{c}}{{sum.factor}};{{ " }" if guarded }}
{% endfor %}
{% endfor %}
    }
{% endfor %}
{% endif %}
}
