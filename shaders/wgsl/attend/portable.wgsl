// Attention of one block of queries against one block of keys, into a running state, within
// WebGPU's default limits: no feature{{ " but subgroups" if shuffles }}, 64 threads, at most 16 KiB of workgroup memory.
//
// For a query row with (m, l, O), and for each key j that it sees (Milakov & Gimelshein 2018, 3.1):
//
//     S  = scale · q·k_j             (softcap c: c · tanh(S / c)), plus the bias
//     m' = max(m, S)
//     P  = e^(S - m')
//     l' = l · e^(m - m') + P
//     O' = O · e^(m - m') + P · v_j
//
// A workgroup has a tile of rows of one batch entry and head. It starts from an empty (m, l, O) in registers, goes through
// its keys tile by tile, and merges with the state at the end. m' is n in the code, e^(m - m') is corr. The factor `scale`
// is split: q_scale, at most 1, is on q; x_scale, the rest, is on the product, because q times it may be out of range.
//
// Bindings. A unit is 16 bytes: 4 elements of f32, 8 of a 16-bit type. A chunk is 4 elements.
//   params     strides and offsets in units, of ml in 8 bytes, of the bias in words or elements
//   q          [batch, rows, heads, dim], strided
//   k, v       the same, with KV heads
//   state_a    O, not divided by l: f32 [batch, rows, heads, dim], dense
//   state_ml   m and l: f32 [batch, heads, rows, 2], dense
//   positions  for each query head its KV head; from keys_at the position of each key; from
//              spans_at, for each class and each query row, the positions lo..hi that it sees, as two
//              words. A class is batch entries that share a mask.
//   work       which keys a tile of rows needs, as runs of keys; see below
//   bias       [batch, rows, heads, columns], strided; columns are positions. A mask in bits, or
//              numbers that are added to logits, -inf for a hidden pair
//
// Work list. A run is a range of keys first..end, two words from runs_at on; first is a multiple of Bc. For tile t of class
// c, at = c · starts_class + 2t: the runs with the numbers work[at] up to work[at + 1] are full, every row of the tile sees
// every key; those up to work[at + 2] are partial. A run whose end is not a multiple of Bc is partial. Keys in no run cost
// nothing. In a tested run each pair tests lo <= position < hi; tested are partial runs, and with a bias all runs.
//
// NaN and infinity pass through to the rows that see them. The logit of a hidden pair is replaced by BELOW_EMPTY, so that
// its P is exactly 0. In a tested run, NaN and infinities of V are zero in workgroup memory, because 0 · NaN is NaN; at
// the end they are added to the rows that see them. A row that saw no key in the whole call is not written.
//
// Tile: Br = {{Br}} query rows x Bc = {{Bc}} keys; {{workgroup_bytes}} bytes of workgroup memory.
//
// 64 threads are a grid of 8 x 8. Of the tile's S, thread (tr, tc) holds {{rows}} x {{ 4 * halves }}: rows tr, tr + 8, ..., keys tc, tc + 8,
// ..., as vectors of 4 keys (S0_0: row 0, first 32 keys of the tile; then P0_0).
// S = q k^T goes in passes of 32 elements of the head. P V goes by 32 keys, and in passes of 64 elements: a thread holds 2
// chunks of each pass for its rows (O0_0, O0_1: row 0, pass 0), or 1 chunk of a last pass with at most 32 elements. The 8
// threads of a row agree on its m by {{ "shuffles in a subgroup" if shuffles else "workgroup memory" }}, and keep their own part of l until the end.
//
// Workgroup memory. K and V lie there as they are stored: 16-bit elements take half the room and half the reads.
//   tile_q   a pass of q · q_scale, chunk-major; at the end whether each thread took NaN or infinity out of V
//   tile_kv  a pass of K, unit-major; then a pass of V, key-major
//   tile_p   P of 32 keys, slot-major: slot s has the keys s, s + 8, s + 16 and s + 24 as one vector. Also{{ "" if shuffles else " row maxima," }}
//            the vote on skipping a tile, and at the end l
// Rows and keys are swizzled (x ^ slot): neighbouring threads write to different banks.
//
// Barriers stand where a tile is replaced (everyone has read the old one) and where it is read
// (everyone has written the new one). workgroupUniformLoad is one too.
//
// No compiler can know the bounds of the inner loops, so none unrolls them. Their bodies have 64 and more multiply-adds for
// each row of a thread; copies of them would spill registers and leave the instruction cache.
{% set tensor = "q" %}
{% include "parts/logits.wgsl" %}
{% include "parts/load.wgsl" %}
// The logit of a hidden pair: finite, and so far below EMPTY_M that its weight is 0.
const BELOW_EMPTY: f32 = -3e38f;

var<workgroup> tile_q: array<vec4<f32>, {{ q_vectors }}>;
var<workgroup> tile_kv: array<{{unit_type}}, {{ kv_units }}>;
var<workgroup> tile_p: array<vec4<f32>, {{ 8 * Br }}>;

{% include "parts/finite.wgsl" %}

{# The index of row {{i}} of this thread, and a row that exists. #}
{% macro row(i) %}tile * {{Br}}u + {{ 8 * i }}u + tr{% endmacro %}
{% macro safe(i) %}min({{ row(i) }}, params.rows - 1u){% endmacro %}
{# Where a tile of rows in 8 slots has row {{i}} of this thread. #}
{% macro at(slot, i) %}{{slot}} * {{Br}}u + {{ 8 * i }}u + (tr ^ {{slot}}){% endmacro %}
{# The unit of V that has chunk {{c}} of the thread's columns, and that chunk of a unit. #}
{% macro unit_of(c) %}
{%- if unit_chunks == 1 %}{{ 8 * c }}u + tc
{%- elif c == held - 1 and held % 2 == 1 %}{{ 4 * c }}u + (tc >> 1u)
{%- else %}{{ 8 * (c // 2) }}u + tc
{%- endif %}
{%- endmacro %}
{% macro chunk_in(c, unit) %}
{%- if unit_chunks == 1 %}chunk_0({{unit}})
{%- elif c == held - 1 and held % 2 == 1 %}select(chunk_0({{unit}}), chunk_1({{unit}}), (tc & 1u) == 1u)
{%- else %}chunk_{{ c % 2 }}({{unit}})
{%- endif %}
{%- endmacro %}
{# Which of the thread's 4 keys in half {{h}} each of its rows sees (vis0, ...); with a bias, also the terms of their
   logits. #}
{% macro visible(h) %}
                let keys = vec4<u32>(key + {{ 32 * h }}u + tc) + vec4<u32>(0u, 8u, 16u, 24u);
                let at = vec4<u32>(params.keys_at) + min(keys, vec4<u32>(end - 1u));
                let pos = vec4<u32>(positions[at.x], positions[at.y], positions[at.z], positions[at.w]);
                let inside = keys < vec4<u32>(end);
{% for i in range(rows) %}
                let span{{i}} = spans + 2u * {{ safe(i) }};
                let in_span{{i}} = (vec4<u32>(positions[span{{i}}]) <= pos) & (pos < vec4<u32>(positions[span{{i}} + 1u])) & inside;
{% if bias %}
                let bias_row{{i}} = bias_base + {{ safe(i) }} * params.bias_row;
                let term{{i}} = vec4<f32>(
                    bias_term(bias_row{{i}}, pos.x), bias_term(bias_row{{i}}, pos.y),
                    bias_term(bias_row{{i}}, pos.z), bias_term(bias_row{{i}}, pos.w));
                let vis{{i}} = in_span{{i}}
                    & vec4<bool>(shows(term{{i}}.x), shows(term{{i}}.y), shows(term{{i}}.z), shows(term{{i}}.w));
{% else %}
                let vis{{i}} = in_span{{i}};
{% endif %}
{% endfor %}
{% endmacro %}
@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) group_id: vec3<u32>,
{% if shuffles %}
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_size) subgroup_size: u32,
    @builtin(subgroup_invocation_id) lane: u32
) {
    // Not the index in the workgroup: in this order 8 neighbours are in one subgroup.
    let thread = subgroup * subgroup_size + lane;
{% else %}
    @builtin(local_invocation_index) thread: u32
) {
{% endif %}
{% include "attend/item.wgsl" %}
    let tr = thread >> 3u;
    let tc = thread & 7u;
    let q_base = params.q_offset + batch * params.q_batch + head * params.q_head;
    let k_base = params.k_offset + batch * params.k_batch + kv_head * params.k_head;
    let v_base = params.v_offset + batch * params.v_batch + kv_head * params.v_head;
{% if bias %}
    let bias_base = params.bias_offset + batch * params.bias_batch + head * params.bias_head;
{% endif %}
    // Whether this thread took NaN or infinity out of V.
    var odd = false;
{% for i in range(rows) %}
    var m{{i}} = EMPTY_M;
    var l{{i}} = 0.0f;
    var seen{{i}} = {{ "false" if bias else "full_runs < partial_runs" }};
{% for c in range(held) %}
    var O{{i}}_{{c}} = vec4<f32>();
{% endfor %}
{% endfor %}
    for (var run = full_runs; run < runs_end; run++) {
{% include "attend/run.wgsl" %}
        let tested = {{ "true" if bias else "run >= partial_runs" }};
        for (var key = first; key < end; key += {{Bc}}u) {
            // 1, which only key < end says.
            let one = min(end - key, 1u);
{% if bias %}
            // If no row sees a key of the tile, it is skipped. The vote is in the memory of the weights, because there is no
            // room beside them. Each thread has a vector: a write to one component may write all four.
            workgroupBarrier();
            var seen_by_any = vec4<bool>();
{% for h in range(halves) %}
            {
{{ visible(h) }}
                seen_by_any = seen_by_any{% for i in range(rows) %} | vis{{i}}{% endfor %};
            }
{% endfor %}
            tile_p[thread] = select(vec4<f32>(), vec4<f32>(1.0f), seen_by_any);
            workgroupBarrier();
            if (thread < 8u) {
                var seers = vec4<f32>();
                for (var i = 0u; i < 8u; i++) { seers += tile_p[thread * 8u + i]; }
                tile_p[thread * 8u] = seers;
            }
            workgroupBarrier();
            if (thread == 0u) {
                var seers = vec4<f32>();
                for (var i = 0u; i < 8u; i++) { seers += tile_p[i * 8u]; }
                tile_p[0] = seers;
            }
            if (all(workgroupUniformLoad(&tile_p[0]) == vec4<f32>())) { continue; }
{% endif %}
            // S = q k^T.
{% for i in range(rows) %}
{% for h in range(halves) %}
            var S{{i}}_{{h}} = vec4<f32>();
{% endfor %}
{% endfor %}
            for (var g = 0u; g < {{ qk_passes }}u * one; g++) {
                workgroupBarrier();
{% for i in range(rows) %}
                tile_q[{{ at("tc", i) }}] = load_q(q_base + {{ safe(i) }} * params.q_row, g * 8u + tc) * params.q_scale;
{% endfor %}
                let k_unit = thread & {{ k_units - 1 }}u;
                let k_key = thread >> {{ 2 if k_units == 4 else 3 }}u;
                let k_at = k_base + {{ "min(" if units % k_units }}g * {{k_units}}u + k_unit{{ ", " ~ (units - 1) ~ "u)" if units % k_units }};
                let k_slot = k_unit * {{Bc}}u + (k_key ^ {{ "(k_unit * 2u)" if k_units == 4 else "k_unit" }});
{% for step in range(k_units * halves // 2) %}
                tile_kv[k_slot + {{ 64 // k_units * step }}u] = k[k_at + min(key + k_key + {{ 64 // k_units * step }}u, end - 1u) * params.k_row];
{% endfor %}
                workgroupBarrier();
                let units_here = {{ "min(" ~ units ~ "u - g * " ~ k_units ~ "u, " if units % k_units }}{{ k_units }}u * one{{ ")" if units % k_units }};
                for (var n = 0u; n < units_here; n++) {
                    let u = n & {{ k_units - 1 }}u;
{% for c in range(unit_chunks) %}
                    let c{{c}} = {{ "u" if unit_chunks == 1 else "u * 2u + " ~ c ~ "u" }};
{% for i in range(rows) %}
                    let q{{i}}_{{c}} = tile_q[{{ at("c" ~ c, i) }}];
{% endfor %}
{% endfor %}
                    let k_column = u * {{Bc}}u + (tc ^ {{ "(u * 2u)" if k_units == 4 else "u" }});
{% for h in range(halves) %}
{% for j in range(4) %}
                    let k{{h}}_{{j}} = tile_kv[k_column + {{ 32 * h + 8 * j }}u];
{% for c in range(unit_chunks) %}
                    let k{{h}}_{{j}}_{{c}} = chunk_{{c}}(k{{h}}_{{j}});
{% for i in range(rows) %}
                    S{{i}}_{{h}}.{{ "xyzw"[j] }} += dot(q{{i}}_{{c}}, k{{h}}_{{j}}_{{c}});
{% endfor %}
{% endfor %}
{% endfor %}
{% endfor %}
                }
            }
{% for i in range(rows) %}
{% for h in range(halves) %}
            S{{i}}_{{h}} *= params.x_scale;
{% if softcap %}
            S{{i}}_{{h}} = vec4<f32>(capped(S{{i}}_{{h}}.x), capped(S{{i}}_{{h}}.y), capped(S{{i}}_{{h}}.z), capped(S{{i}}_{{h}}.w));
{% endif %}
{% endfor %}
{% endfor %}
            if (tested) {
{% for h in range(halves) %}
                {
{{ visible(h) }}
{% for i in range(rows) %}
                    S{{i}}_{{h}} = select(vec4<f32>(BELOW_EMPTY), S{{i}}_{{h}}{% if bias %} + term{{i}}{% endif %}, vis{{i}});
                    seen{{i}} = seen{{i}} || any(vis{{i}});
{% endfor %}
                }
{% endfor %}
            }
            // The new maximum n of each row, from those of its 8 threads.
{% for i in range(rows) %}
            let most{{i}} = {{ "max(S" ~ i ~ "_0, S" ~ i ~ "_1)" if halves == 2 else "S" ~ i ~ "_0" }};
            var n{{i}} = max(m{{i}}, max(max(most{{i}}.x, most{{i}}.y), max(most{{i}}.z, most{{i}}.w)));
{% if not shuffles %}
            tile_p[{{ at("tc", i) }}] = vec4<f32>(n{{i}});
{% endif %}
{% endfor %}
{% if shuffles %}
{% for distance in [1, 2, 4] %}
{% for i in range(rows) %}
            n{{i}} = max(n{{i}}, subgroupShuffleXor(n{{i}}, {{distance}}u));
{% endfor %}
{% endfor %}
{% else %}
            workgroupBarrier();
            for (var c = 0u; c < 8u; c++) {
{% for i in range(rows) %}
                n{{i}} = max(n{{i}}, tile_p[{{ at("c", i) }}].x);
{% endfor %}
            }
{% endif %}
            // P = e^(S - n), by what l and O so far shrink, and this thread's part of l.
{% for i in range(rows) %}
            let corr{{i}} = weight_of(m{{i}} - n{{i}});
            m{{i}} = n{{i}};
{% for h in range(halves) %}
            let P{{i}}_{{h}} = vec4<f32>(
                weight_of(S{{i}}_{{h}}.x - n{{i}}), weight_of(S{{i}}_{{h}}.y - n{{i}}),
                weight_of(S{{i}}_{{h}}.z - n{{i}}), weight_of(S{{i}}_{{h}}.w - n{{i}}));
{% endfor %}
            let sum{{i}} = P{{i}}_0{{ " + P" ~ i ~ "_1" if halves == 2 }};
            l{{i}} = l{{i}} * corr{{i}} + ((sum{{i}}.x + sum{{i}}.y) + (sum{{i}}.z + sum{{i}}.w));
{% for c in range(held) %}
            O{{i}}_{{c}} *= corr{{i}};
{% endfor %}
{% endfor %}
            // O += P V.
            let v_unit = thread & {{ v_units - 1 }}u;
            let v_key = thread >> {{ 3 if v_units == 8 else 4 }}u;
{% for h in range(halves) %}
            let slots{{h}} = min(8u, max(end, key + {{ 32 * h }}u) - (key + {{ 32 * h }}u));
{% for p in range(pv_passes) %}
{% set narrow = p == pv_passes - 1 and held % 2 == 1 %}
            workgroupBarrier();
{% if p == 0 %}
{% for i in range(rows) %}
            tile_p[{{ at("tc", i) }}] = P{{i}}_{{h}};
{% endfor %}
{% endif %}
            {
                let v_at = v_base + {{ "min(" if (p + 1) * v_units > units }}{{ p * v_units }}u + v_unit{{ ", " ~ (units - 1) ~ "u)" if (p + 1) * v_units > units }};
{% for part in range(v_units // 8) %}
{% for step in range(4) %}
{% set row_of_v = 64 // v_units * (4 * part + step) %}
                var unit{{part}}_{{step}} = v[v_at + min(key + v_key + {{ 32 * h + row_of_v }}u, end - 1u) * params.v_row];
{% endfor %}
                if (tested) {
{% for step in range(4) %}
                    let finite{{step}} = finite_part(unit{{part}}_{{step}});
                    odd = odd || any(bitcast<vec4<u32>>(finite{{step}}) != bitcast<vec4<u32>>(unit{{part}}_{{step}}));
                    unit{{part}}_{{step}} = finite{{step}};
{% endfor %}
                }
{% for step in range(4) %}
                tile_kv[thread + {{ 64 * (4 * part + step) }}u] = unit{{part}}_{{step}};
{% endfor %}
{% endfor %}
            }
            workgroupBarrier();
            for (var n = 0u; n < slots{{h}}; n++) {
                let s = n & 7u;
{% for i in range(rows) %}
                let w{{i}} = tile_p[{{ at("s", i) }}];
{% endfor %}
{% for j in range(4) %}
{% if unit_chunks == 2 and narrow %}
                let v{{j}} = tile_kv[s * 8u + (tc >> 1u) + {{ 64 * j }}u];
                let v{{j}}_0 = {{ chunk_in(held - 1, "v" ~ j) }};
{% elif unit_chunks == 2 %}
                let v{{j}} = tile_kv[s * 8u + tc + {{ 64 * j }}u];
                let v{{j}}_0 = chunk_0(v{{j}});
                let v{{j}}_1 = chunk_1(v{{j}});
{% else %}
                let v{{j}}_0 = tile_kv[s * 16u + tc + {{ 128 * j }}u];
{% if not narrow %}
                let v{{j}}_1 = tile_kv[s * 16u + tc + {{ 128 * j + 8 }}u];
{% endif %}
{% endif %}
{% for i in range(rows) %}
{% for c in range(1 if narrow else 2) %}
                O{{i}}_{{ 2 * p + c }} += v{{j}}_{{c}} * w{{i}}.{{ "xyzw"[j] }};
{% endfor %}
{% endfor %}
{% endfor %}
            }
{% endfor %}
{% endfor %}
        }
    }
{% include "attend/odd_values.wgsl" %}
    // l of a row, from its 8 threads: part of l, whether it saw a key, and (m, l) of the state, which one of them reads.
    workgroupBarrier();
{% for i in range(rows) %}
    let state{{i}} = params.ml_offset + (batch * params.heads + head) * params.rows + {{ safe(i) }};
    var ml{{i}} = vec2<f32>();
    if (tc == 0u) {
        ml{{i}} = state_ml[state{{i}}];
    }
    tile_p[{{ at("tc", i) }}] = vec4<f32>(l{{i}}, select(0.0f, 1.0f, seen{{i}}), ml{{i}});
{% endfor %}
    workgroupBarrier();
{% for i in range(rows) %}
    var sum{{i}} = vec4<f32>();
{% endfor %}
    for (var c = 0u; c < 8u; c++) {
{% for i in range(rows) %}
        sum{{i}} += tile_p[{{ at("c", i) }}];
{% endfor %}
    }
    // Merged into the state. A row that saw no key is not written.
{% for i in range(rows) %}
    if ({{ row(i) }} < params.rows && sum{{i}}.y > 0.0f) {
        let top = max(sum{{i}}.z, m{{i}});
        let keep = weight_of(sum{{i}}.z - top);
        let found = weight_of(m{{i}} - top);
        let a_at = params.a_offset + ((batch * params.rows + {{ row(i) }}) * params.heads + head) * {{chunks}}u;
{% for c in range(held) %}
{% set p = c // 2 %}
{% if unit_chunks == 1 or (c == held - 1 and held % 2 == 1) %}
{% set first = 16 * p + 8 * (c % 2) %}
{% set last = first + 7 %}
{% set chunk = first ~ "u + tc" %}
{% else %}
{% set last = 16 * p + 14 + c % 2 %}
{% set chunk = (16 * p + c % 2) ~ "u + 2u * tc" %}
{% endif %}
{% if last >= chunks %}
        if ({{chunk}} < {{chunks}}u) {
            state_a[a_at + {{chunk}}] = state_a[a_at + {{chunk}}] * keep + O{{i}}_{{c}} * found;
        }
{% else %}
        state_a[a_at + {{chunk}}] = state_a[a_at + {{chunk}}] * keep + O{{i}}_{{c}} * found;
{% endif %}
{% endfor %}
        if (tc == 0u) {
            state_ml[state{{i}}] = vec2<f32>(top, sum{{i}}.w * keep + sum{{i}}.x * found);
        }
    }
{% endfor %}
}
