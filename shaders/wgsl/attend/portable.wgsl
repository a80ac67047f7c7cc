// Attention of one block of queries against one block of keys, into a running state, within
// WebGPU's default limits: no feature, 64 threads, at most 16 KiB of workgroup memory.
//
// For a query row with (m, l, O), and for each key j that it sees (Milakov & Gimelshein 2018, 3.1):
//
//     S  = scale · q·k_j             (softcap c: c · tanh(S / c)), plus the bias
//     m' = max(m, S)
//     P  = e^(S - m')
//     l' = l · e^(m - m') + P
//     O' = O · e^(m - m') + P · v_j
//
// A workgroup has a tile of rows of one batch entry and head. It starts from an empty (m, l, O) in
// registers, goes through its keys tile by tile, and merges with the state at the end. m' is n in
// the code, e^(m - m') is corr. The factor `scale` is split: q_scale, at most 1, is on q; x_scale, the
// rest, is on the product, because q times it may be out of range.
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
// Work list. A run is a range of keys first..end, two words from runs_at on; first is a multiple of
// Bc. For tile t of class c, at = c · starts_class + 2t: the runs with the numbers work[at] up to
// work[at + 1] are full, every row of the tile sees every key; those up to work[at + 2] are partial.
// A run whose end is not a multiple of Bc is partial. Keys in no run cost nothing. In a tested run
// each pair tests lo <= position < hi; tested are partial runs, and with a bias all runs.
//
// NaN and infinity pass through to the rows that see them. What a row does not see is replaced by
// selection before it enters a sum: its logit by EMPTY_M, its P in l by 0, its P · v by 0, because 0
// · NaN is NaN. A row that saw no key in the whole call is not written.
//
// Tile: Br = {{Br}} query rows x Bc = {{Bc}} keys; {{workgroup_bytes}} bytes of workgroup memory.
//
// 64 threads are a grid of 8 x 8. Of the tile's S, thread (tr, tc) holds {{rows}} x 4: rows tr, tr + 8,
// ..., keys tc, tc + 8, ... (S0, S1, ..., one vector of 4 keys for each row; then P0, P1, ...).
// O goes in passes over the head, 8 chunks each: thread (tr, tc) holds chunk tc of each pass for its
// rows (O0_1: row 0, pass 1). The 8 threads of a row agree on its m through workgroup memory, and
// keep their own part of l until the end.
//
// Workgroup memory
//   tile_q   q · q_scale, chunk-major: whole heads if they fit, otherwise 8 chunks at a time
//   tile_kv  8 chunks of K, chunk-major, so that neighbouring threads read neighbouring vectors;
//            then 8 chunks of V, slot-major
//   tile_p   the row maxima of 8 threads, then P. Slot 4 tc + j is key 8 j + tc: the four weights
//            of a thread are one vector, and V lies in the same order. A hidden pair has weight -1;
//            others are never negative. Also the vote on skipping a tile, and at the end l.
//
// Barriers stand where a tile is replaced (everyone has read the old one) and where it is read
// (everyone has written the new one). workgroupUniformLoad is one too.
{% include "parts/logits.wgsl" %}
{% for tensor in ["q", "k", "v"] %}
{% include "parts/load.wgsl" %}
{% endfor %}
var<workgroup> tile_q: array<vec4<f32>, {{ q_chunks * Br }}>;
var<workgroup> tile_kv: array<vec4<f32>, {{ 8 * Bc }}>;
var<workgroup> tile_p: array<vec4<f32>, {{ 8 * Br }}>;

{# A chunk of a key's row; zero, and no read out of bounds, past the end of a tested run. #}
{% macro load_row(tensor, key, chunk, tested) -%}
{% if tested -%}
select(vec4<f32>(), load_{{tensor}}({{tensor}}_base + min({{key}}, end - 1u) * params.{{tensor}}_row, {{chunk}}), {{key}} < end)
{%- else -%}
load_{{tensor}}({{tensor}}_base + ({{key}}) * params.{{tensor}}_row, {{chunk}})
{%- endif %}
{%- endmacro %}
{# The tiles of one run. #}
{% macro tiles(tested) %}
        for (var key = first; key < end; key += {{Bc}}u) {
{% if tested and bias %}
{{ visible() }}
            // If no row sees a key of the tile, it is skipped. The vote is in the memory of the weights, because there is no
            // room beside them. Each thread has a vector: a write to one component may write all four.
            workgroupBarrier();
            tile_p[thread] = select(vec4<f32>(), vec4<f32>(1.0f), {% for i in range(rows) %}vis{{i}}{{ " | " if not loop.last }}{% endfor %});
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
            // S = q k^T, 8 chunks of the head at a time.
{% for i in range(rows) %}
            var S{{i}} = vec4<f32>();
{% endfor %}
            for (var g = 0u; g < {{passes}}u; g++) {
                workgroupBarrier();
{% if not q_stays %}
{% for i in range(rows) %}
                tile_q[tc * {{Br}}u + {{ 8 * i }}u + tr] = load_q(q_at{{i}}, g * 8u + tc) * params.q_scale;
{% endfor %}
{% endif %}
{% for j in range(4) %}
                tile_kv[tc * {{Bc}}u + {{ 8 * j }}u + tr] = {{ load_row("k", "key + " ~ 8 * j ~ "u + tr", "g * 8u + tc", tested) }};
{% endfor %}
                workgroupBarrier();
                for (var c = 0u; c < 8u; c++) {
{% for j in range(4) %}
                    let k{{j}} = tile_kv[c * {{Bc}}u + {{ 8 * j }}u + tc];
{% endfor %}
{% for i in range(rows) %}
                    let q{{i}} = tile_q[{{ "(g * 8u + c)" if q_stays else "c" }} * {{Br}}u + {{ 8 * i }}u + tr];
                    S{{i}} += vec4<f32>(dot(q{{i}}, k0), dot(q{{i}}, k1), dot(q{{i}}, k2), dot(q{{i}}, k3));
{% endfor %}
                }
            }
{% for i in range(rows) %}
            S{{i}} *= params.x_scale;
{% endfor %}
{% if softcap %}
{% for i in range(rows) %}
            S{{i}} = vec4<f32>(capped(S{{i}}.x), capped(S{{i}}.y), capped(S{{i}}.z), capped(S{{i}}.w));
{% endfor %}
{% endif %}
{% if tested %}
{% if not bias %}
{{ visible() }}
{% endif %}
{% for i in range(rows) %}
            S{{i}} = select(vec4<f32>(EMPTY_M), S{{i}}{% if bias %} + term{{i}}{% endif %}, vis{{i}});
            seen{{i}} = seen{{i}} || any(vis{{i}});
{% endfor %}
{% endif %}
            // The new maximum n of each row, from the maxima of its 8 threads.
{% for i in range(rows) %}
            tile_p[tc * {{Br}}u + {{ 8 * i }}u + tr] = vec4<f32>(max(max(S{{i}}.x, S{{i}}.y), max(S{{i}}.z, S{{i}}.w)));
{% endfor %}
            workgroupBarrier();
{% for i in range(rows) %}
            var n{{i}} = m{{i}};
{% endfor %}
            for (var c = 0u; c < 8u; c++) {
{% for i in range(rows) %}
                n{{i}} = max(n{{i}}, tile_p[c * {{Br}}u + {{ 8 * i }}u + tr].x);
{% endfor %}
            }
            workgroupBarrier();
            // P = e^(S - n), by what l and O so far shrink, and this thread's part of l.
{% for i in range(rows) %}
            let corr{{i}} = weight_of(m{{i}} - n{{i}});
            m{{i}} = n{{i}};
            let P{{i}} = vec4<f32>(
                weight_of(S{{i}}.x - n{{i}}), weight_of(S{{i}}.y - n{{i}}),
                weight_of(S{{i}}.z - n{{i}}), weight_of(S{{i}}.w - n{{i}}));
{% if tested %}
            let kept{{i}} = select(vec4<f32>(), P{{i}}, vis{{i}});
            tile_p[tc * {{Br}}u + {{ 8 * i }}u + tr] = select(vec4<f32>(-1.0f), P{{i}}, vis{{i}});
{% else %}
            let kept{{i}} = P{{i}};
            tile_p[tc * {{Br}}u + {{ 8 * i }}u + tr] = P{{i}};
{% endif %}
            l{{i}} = l{{i}} * corr{{i}} + ((kept{{i}}.x + kept{{i}}.y) + (kept{{i}}.z + kept{{i}}.w));
{% endfor %}
            // O = O corr + P V. The first pass needs no barrier: those of the maxima are between K and V.
{% for g in range(passes) %}
{% if g > 0 %}
            workgroupBarrier();
{% endif %}
{% for j in range(4) %}
            // Slot s holds key 8 (s % 4) + s / 4.
            let slot{{g}}_{{j}} = {{ 8 * j }}u + tr;
{% set key_of_slot = "key + (slot" ~ g ~ "_" ~ j ~ " & 3u) * 8u + (slot" ~ g ~ "_" ~ j ~ " >> 2u)" %}
            tile_kv[slot{{g}}_{{j}} * 8u + tc] = {{ load_row("v", key_of_slot, 8 * g ~ "u + tc", tested) }};
{% endfor %}
            workgroupBarrier();
{% for i in range(rows) %}
            O{{i}}_{{g}} *= corr{{i}};
{% endfor %}
            for (var s = 0u; s < 8u; s++) {
{% for j in range(4) %}
                let v{{j}} = tile_kv[(s * 4u + {{j}}u) * 8u + tc];
{% endfor %}
{% for i in range(rows) %}
                let w{{i}} = tile_p[s * {{Br}}u + {{ 8 * i }}u + tr];
{% if tested %}
                // Selected once more: neither the weight -1 nor the value of a hidden element may
                // enter the sum.
                O{{i}}_{{g}} += (select(v0 * w{{i}}.x, vec4<f32>(), w{{i}}.x < 0.0f)
                    + select(v1 * w{{i}}.y, vec4<f32>(), w{{i}}.y < 0.0f))
                    + (select(v2 * w{{i}}.z, vec4<f32>(), w{{i}}.z < 0.0f)
                    + select(v3 * w{{i}}.w, vec4<f32>(), w{{i}}.w < 0.0f));
{% else %}
                O{{i}}_{{g}} += (v0 * w{{i}}.x + v1 * w{{i}}.y) + (v2 * w{{i}}.z + v3 * w{{i}}.w);
{% endif %}
{% endfor %}
            }
{% endfor %}
        }
{% endmacro %}
{# Which of its 4 keys each of the thread's rows sees; with a bias, also the term of each logit. #}
{% macro visible() %}
            let keys = vec4<u32>(key + 0u + tc, key + 8u + tc, key + 16u + tc, key + 24u + tc);
            let at = vec4<u32>(params.keys_at) + min(keys, vec4<u32>(end - 1u));
            let pos = vec4<u32>(positions[at.x], positions[at.y], positions[at.z], positions[at.w]);
            let inside = keys < vec4<u32>(end);
{% for i in range(rows) %}
{% if bias %}
            let term{{i}} = vec4<f32>(
                bias_term(bias_row{{i}}, pos.x), bias_term(bias_row{{i}}, pos.y),
                bias_term(bias_row{{i}}, pos.z), bias_term(bias_row{{i}}, pos.w));
            let vis{{i}} = (vec4<u32>(lo{{i}}) <= pos) & (pos < vec4<u32>(hi{{i}})) & inside
                & vec4<bool>(shows(term{{i}}.x), shows(term{{i}}.y), shows(term{{i}}.z), shows(term{{i}}.w));
{% else %}
            let vis{{i}} = (vec4<u32>(lo{{i}}) <= pos) & (pos < vec4<u32>(hi{{i}})) & inside;
{% endif %}
{% endfor %}
{% endmacro %}
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group_id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
{% include "attend/item.wgsl" %}
    let tr = thread >> 3u;
    let tc = thread & 7u;
    let k_base = params.k_offset + batch * params.k_batch + kv_head * params.k_head;
    let v_base = params.v_offset + batch * params.v_batch + kv_head * params.v_head;
{% for i in range(rows) %}
    let row{{i}} = tile * {{Br}}u + {{ 8 * i }}u + tr;
    let in{{i}} = row{{i}} < params.rows;
    let safe{{i}} = min(row{{i}}, params.rows - 1u);
    let lo{{i}} = positions[spans + 2u * safe{{i}}];
    let hi{{i}} = positions[spans + 2u * safe{{i}} + 1u];
    let q_at{{i}} = params.q_offset + batch * params.q_batch + safe{{i}} * params.q_row + head * params.q_head;
    let a_at{{i}} = params.a_offset + ((batch * params.rows + safe{{i}}) * params.heads + head) * {{chunks}}u;
    let ml_at{{i}} = params.ml_offset + (batch * params.heads + head) * params.rows + safe{{i}};
    var m{{i}} = EMPTY_M;
    var l{{i}} = 0.0f;
    var seen{{i}} = {{ "false" if bias else "full_runs < partial_runs" }};
{% if bias %}
    let bias_row{{i}} = params.bias_offset + batch * params.bias_batch
        + safe{{i}} * params.bias_row + head * params.bias_head;
{% endif %}
{% for g in range(passes) %}
    var O{{i}}_{{g}} = vec4<f32>();
{% endfor %}
{% endfor %}
{% if q_stays %}
    for (var g = 0u; g < {{passes}}u; g++) {
{% for i in range(rows) %}
        tile_q[(g * 8u + tc) * {{Br}}u + {{ 8 * i }}u + tr] = load_q(q_at{{i}}, g * 8u + tc) * params.q_scale;
{% endfor %}
    }
{% endif %}
{% if bias %}
    for (var run = full_runs; run < runs_end; run++) {
{% include "attend/run.wgsl" %}
{{ tiles(true) }}
    }
{% else %}
    for (var run = full_runs; run < partial_runs; run++) {
{% include "attend/run.wgsl" %}
{{ tiles(false) }}
    }
    for (var run = partial_runs; run < runs_end; run++) {
{% include "attend/run.wgsl" %}
{{ tiles(true) }}
    }
{% endif %}
    // l of a row, from its 8 threads: part of l, whether it saw a key, and (m, l) of the state, which one of them reads.
    workgroupBarrier();
{% for i in range(rows) %}
    var ml{{i}} = vec2<f32>();
    if (tc == 0u) {
        ml{{i}} = state_ml[ml_at{{i}}];
    }
    tile_p[tc * {{Br}}u + {{ 8 * i }}u + tr] = vec4<f32>(l{{i}}, select(0.0f, 1.0f, seen{{i}}), ml{{i}});
{% endfor %}
    workgroupBarrier();
{% for i in range(rows) %}
    var sum{{i}} = vec4<f32>();
{% endfor %}
    for (var c = 0u; c < 8u; c++) {
{% for i in range(rows) %}
        sum{{i}} += tile_p[c * {{Br}}u + {{ 8 * i }}u + tr];
{% endfor %}
    }
    // Merged into the state. A row that saw no key is not written.
{% for i in range(rows) %}
    if (in{{i}} && sum{{i}}.y > 0.0f) {
        let top = max(sum{{i}}.z, m{{i}});
        let keep = weight_of(sum{{i}}.z - top);
        let found = weight_of(m{{i}} - top);
{% for g in range(passes) %}
{% if (g + 1) * 8 > chunks %}
        if ({{ 8 * g }}u + tc < {{chunks}}u) {
            state_a[a_at{{i}} + {{ 8 * g }}u + tc] = state_a[a_at{{i}} + {{ 8 * g }}u + tc] * keep + O{{i}}_{{g}} * found;
        }
{% else %}
        state_a[a_at{{i}} + {{ 8 * g }}u + tc] = state_a[a_at{{i}} + {{ 8 * g }}u + tc] * keep + O{{i}}_{{g}} * found;
{% endif %}
{% endfor %}
        if (tc == 0u) {
            state_ml[ml_at{{i}}] = vec2<f32>(top, sum{{i}}.w * keep + sum{{i}}.x * found);
        }
    }
{% endfor %}
}
