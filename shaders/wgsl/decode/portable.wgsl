// Attention of few query rows against many keys, within WebGPU's default limits: no feature, 64
// threads, less than 16 KiB of workgroup memory. attend/portable.wgsl says what is computed.
//
// A workgroup has one KV head, the rows of all query heads that read it, and one split of the keys.
// It writes a part: the state of those rows over this split alone. decode/merge_parts.wgsl merges
// all parts of a row into its running state. A slot is one (query row, query head) pair of a
// workgroup: slot = row · group_heads + head - first head; here {{slots}}. All slots read the same keys, so
// each key is loaded once for all of them.
//
// Bindings are those of attend/portable.wgsl without the state:
//   part_a   O: f32 [item, slot, dim], dense
//   part_ml  m and l: f32 [item, slot, 2], dense. Where l is UNSEEN the slot saw no key of the split,
//            and its m and O mean nothing.
// The runs of the work list only say which keys to skip; each pair is tested against its row's
// span, which costs little with one key for each thread. All rows are in tile 0.
//
// 64 keys at a time, in three phases. Each thread takes one key, and computes its logits for all
// slots (S0, S1, ...), from the queries in workgroup memory. Then m of each slot is found, by
// {{finders}} threads for each. Then each thread takes a column of V, one unit, with O in registers (O0_0_0: first slot,
// first column, first chunk): {% if many %}for {{own_slots}} of the slots, because all would take too many registers{% else %}for every {{slices}}-th key; at the end these slices are added up{% endif %}.
//
// Workgroup memory, {{workgroup_bytes}} bytes
//   queries  q times its factor
{% if many %}
//   weights  logits, then P, which is 0 for a hidden pair
//   shown    for each key a bit for each slot that sees it
{% else %}
//   weights  logits, then P, at the end each thread's part of l. A hidden pair has weight -1; others are never negative.
{% endif %}
//   tops     the maxima that the finders found
//   maxima   m of each slot, and by what its sums shrink
{% if slices > 1 and not many %}
//   sums     O of the slices
{% endif %}
{% include "parts/logits.wgsl" %}
{% include "decode/unseen.wgsl" %}
{% if many %}
{% include "parts/odd.wgsl" %}
{% endif %}
var<workgroup> queries: array<vec4<f32>, {{ slots * chunks }}>;
var<workgroup> weights: array<f32, {{ slots * 64 }}>;
{% if many %}
var<workgroup> shown: array<u32, 64>;
{% endif %}
var<workgroup> tops: array<f32, {{ slots * finders }}>;
var<workgroup> maxima: array<vec2<f32>, {{slots}}>;
{% if slices > 1 and not many %}
var<workgroup> sums: array<vec4<f32>, {{ slices * chunks }}>;
{% endif %}

{# The slot of O number s. #}
{% macro slot(s) %}{% if many %}min(first_slot + {{s}}u, {{ slots - 1 }}u){% else %}{{s}}u{% endif %}{% endmacro %}
{# In the last pass over a head of more than 64 units, whether this thread has a column. #}
{% macro if_column(pass) %}{% if (pass + 1) * 64 > units and passes > 1 %}if (column + {{ pass * 64 }}u < {{units}}u) {% endif %}{% endmacro %}
{# The logits of the thread's key. #}
{% macro dots() %}
                for (var u = 0u; u < {{units}}u{{ " * one" if many }}; u++) {
                    let unit = k[k_at + u];
                    // A bound that compilers see: no test of each index.
                    let q_at = min(u, {{ units - 1 }}u) * {{unit_chunks}}u;
{% for half in range(unit_chunks) %}
                    let k_{{half}} = chunk_{{half}}(unit);
{% for s in range(slots) %}
                    S{{s}} += dot(queries[{{ s * chunks + half }}u + q_at], k_{{half}});
{% endfor %}
{% endfor %}
                }
{% endmacro %}
{# O of this thread's columns over its slice of the keys. The value of a hidden element may be NaN or infinite, and must not
   enter a sum. So it is selected, of "all" values; with many slots values that are not finite count as zero first ("finite"),
   so that there are only multiply-adds, and these ("odd") are added in a second walk that seldom happens. #}
{% macro add_values(which) %}
            for (var i = first_own; i < here; i += {{ "1" if many else slices }}u) {
                let v_at = v_base + (key + i) * params.v_row + column;
{% for s in range(own_slots) %}
                let w{{s}} = weights[{{ slot(s) }} * 64u + (i & 63u)];
{% endfor %}
{% if many and (bias or which == "odd") %}
                let slots_of_key = shown[i & 63u];
{% endif %}
{% if bias %}
                if ({% if many %}slots_of_key == 0u{% else %}{% for s in range(slots) %}w{{s}} < 0.0f{{ " && " if not loop.last }}{% endfor %}{% endif %}) { continue; }
{% endif %}
{% for pass in range(passes) %}
{% set guard = if_column(pass) %}
                {{guard}}{{ "{" if guard }}
                let unit{{pass}} = v[v_at + {{ pass * 64 }}u];
{% for half in range(unit_chunks) %}
{% set value = "v" ~ pass ~ "_" ~ half %}
                let {{value}} = chunk_{{half}}(unit{{pass}});
{% if which == "finite" %}
                let finite{{value}} = select({{value}}, vec4<f32>(), odd_in({{value}}));
                odd = odd || any(odd_in({{value}}));
{% elif which == "odd" %}
                let odd{{value}} = select(vec4<f32>(), {{value}}, odd_in({{value}}));
{% endif %}
{% for s in range(own_slots) %}
{% if which == "finite" %}
                O{{s}}_{{pass}}_{{half}} += finite{{value}} * w{{s}};
{% elif which == "odd" %}
                O{{s}}_{{pass}}_{{half}} += select(vec4<f32>(), odd{{value}} * w{{s}}, (slots_of_key & (1u << {{ slot(s) }})) != 0u);
{% else %}
                O{{s}}_{{pass}}_{{half}} += select({{value}} * w{{s}}, vec4<f32>(), w{{s}} < 0.0f);
{% endif %}
{% endfor %}
{% endfor %}
                {{ "}" if guard }}
{% endfor %}
            }
{% endmacro %}
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group_id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
{% include "decode/item.wgsl" %}
    let k_base = params.k_offset + batch * params.k_batch + kv_head * params.k_head;
    let v_base = params.v_offset + batch * params.v_batch + kv_head * params.v_head;
    let column = thread % {{columns}}u;
    let slice = thread / {{columns}}u;
{% if many %}
    let first_slot = slice * {{own_slots}}u;
{% endif %}
    for (var i = thread; i < {{ slots * units }}u; i += 64u) {
        let slot = i / {{units}}u;
        let q_row = (slot / params.group_heads) * params.q_row;
        let q_head = (first_head + slot % params.group_heads) * params.q_head;
        let unit = q[params.q_offset + batch * params.q_batch + q_row + q_head + i % {{units}}u];
{% for half in range(unit_chunks) %}
        queries[i * {{unit_chunks}}u + {{half}}u] = chunk_{{half}}(unit) * params.q_scale;
{% endfor %}
    }
    if (thread < {{slots}}u) { maxima[thread] = vec2<f32>(EMPTY_M, 1.0f); }
    // A bit for each slot that saw a key of this thread.
    var seen = 0u;
{% if many %}
    // l of the keys that this thread finds, in the one slot of which it finds the maximum: l of every slot in every thread
    // would take too many registers.
    var l_found = 0.0f;
{% endif %}
{% if not many %}
{% for s in range(slots) %}
    var l{{s}} = 0.0f;
{% endfor %}
{% endif %}
{% for s in range(own_slots) %}
{% for pass in range(passes) %}
{% for half in range(unit_chunks) %}
    var O{{s}}_{{pass}}_{{half}} = vec4<f32>();
{% endfor %}
{% endfor %}
{% endfor %}
    workgroupBarrier();
    for (var run = work[starts]; run < work[starts + 2u]; run++) {
{% include "decode/run.wgsl" %}
        for (var key = first; key < end; key += 64u) {
{% if many %}
            // 1, which only key < end says: no compiler unrolls a loop with such a bound.
            let one = min(end - key, 1u);
{% endif %}
            // S of the thread's key.
            let own = min(key + thread, end - 1u);
            let inside = key + thread < end;
            let position = positions[params.keys_at + own];
            let k_at = k_base + own * params.k_row;
{% for s in range(slots) %}
            var S{{s}} = 0.0f;
{% endfor %}
{% if bias %}
{% for s in range(slots) %}
{% include "decode/visible.wgsl" %}
{% endfor %}
            // Neighbouring threads together skip keys that a tensor hides from all slots. Spans
            // leave few such keys.
            if ({% for s in range(slots) %}vis{{s}}{{ " || " if not loop.last }}{% endfor %}) {
{{ dots() }}
            }
{% else %}
{{ dots() }}
{% for s in range(slots) %}
{% include "decode/visible.wgsl" %}
{% endfor %}
{% endif %}
            // The weights of the keys before these have been read.
            workgroupBarrier();
            var slots_here = 0u;
{% for s in range(slots) %}
            S{{s}} *= params.x_scale;
{% if softcap %}
            S{{s}} = capped(S{{s}});
{% endif %}
{% if bias %}
            S{{s}} = S{{s}} + term{{s}};
{% endif %}
            slots_here |= select(0u, {{ 2 ** s }}u, vis{{s}});
            weights[{{ s * 64 }}u + thread] = select(EMPTY_M, S{{s}}, vis{{s}});
{% endfor %}
{% if many %}
            shown[thread] = slots_here;
{% endif %}
            seen |= slots_here;
            workgroupBarrier();
            // m of each slot.
            if (thread < {{ slots * finders }}u) {
                var top = EMPTY_M;
                for (var i = thread % {{finders}}u; i < 64u; i += {{finders}}u) {
                    top = max(top, weights[(thread / {{finders}}u) * 64u + i]);
                }
                tops[thread] = top;
            }
            workgroupBarrier();
            if (thread < {{slots}}u) {
                let before = maxima[thread].x;
                var top = before;
                for (var i = 0u; i < {{finders}}u; i++) { top = max(top, tops[thread * {{finders}}u + i]); }
                maxima[thread] = vec2<f32>(top, weight_of(before - top));
            }
            workgroupBarrier();
            // P{{ ", and this thread's part of l" if not many }}.
{% for s in range(slots) %}
            let all{{s}} = weight_of(weights[{{ s * 64 }}u + thread] - maxima[{{s}}].x);
            let P{{s}} = select(0.0f, all{{s}}, (slots_here & {{ 2 ** s }}u) != 0u);
{% if not many %}
            l{{s}} = l{{s}} * maxima[{{s}}].y + P{{s}};
{% endif %}
            weights[{{ s * 64 }}u + thread] = {% if many %}P{{s}}{% else %}select(-1.0f, P{{s}}, (slots_here & {{ 2 ** s }}u) != 0u){% endif %};
{% endfor %}
            workgroupBarrier();
{% if many %}
            if (thread < {{ slots * finders }}u) {
                let slot = thread / {{finders}}u;
                l_found *= maxima[slot].y;
                for (var i = thread % {{finders}}u; i < 64u; i += {{finders}}u) {
                    l_found += weights[slot * 64u + i];
                }
            }
{% endif %}
            // O of this thread's columns{{ " over its slice of the keys" if not many }}.
{% for s in range(own_slots) %}
{% for pass in range(passes) %}
{% for half in range(unit_chunks) %}
            O{{s}}_{{pass}}_{{half}} *= maxima[{{ slot(s) }}].y;
{% endfor %}
{% endfor %}
{% endfor %}
            // Threads without a column have nothing to do.
            let first_own = select(64u, {{ "0u" if many else "slice" }}, slice < {{slices}}u);
            let here = min(end - key, 64u);
{% if many %}
            var odd = false;
{{ add_values("finite") }}
            if (odd) {
{{ add_values("odd") }}
            }
{% else %}
{{ add_values("all") }}
{% endif %}
        }
    }
    // The part: l of each slot from all threads, O{{ ' from all slices' if not many }}.
    workgroupBarrier();
{% for s in range(slots) %}
    weights[{{ s * 64 }}u + thread] = select(UNSEEN, {{ "0.0f" if many else "l" ~ s }}, (seen & {{ 2 ** s }}u) != 0u);
{% endfor %}
{% if many %}
    if (thread < {{ slots * finders }}u) {
        tops[thread] = l_found;
    }
{% endif %}
    workgroupBarrier();
    if (thread < {{slots}}u) {
        var l = 0.0f;
        var seen = false;
        for (var i = 0u; i < 64u; i++) {
            let own_l = weights[thread * 64u + i];
            if (!is_unseen(own_l)) {
                l += own_l;
                seen = true;
            }
        }
{% if many %}
        for (var i = 0u; i < {{finders}}u; i++) { l += tops[thread * {{finders}}u + i]; }
{% endif %}
        part_ml[item * {{slots}}u + thread] = vec2<f32>(maxima[thread].x, select(UNSEEN, l, seen));
    }
{% for s in range(own_slots) %}
{% if many or slices == 1 %}
{% if many %}
    if (slice < {{slices}}u && first_slot + {{s}}u < {{slots}}u) {
{% endif %}
{% for pass in range(passes) %}
{% set guard = if_column(pass) %}
    {{guard}}{{ "{" if guard }}
{% for half in range(unit_chunks) %}
    part_a[(item * {{slots}}u + {{ slot(s) }}) * {{chunks}}u + (column + {{ pass * 64 }}u) * {{unit_chunks}}u + {{half}}u] = O{{s}}_{{pass}}_{{half}};
{% endfor %}
    {{ "}" if guard }}
{% endfor %}
{% if many %}
    }
{% endif %}
{% else %}
    if (slice < {{slices}}u) {
{% for half in range(unit_chunks) %}
        sums[slice * {{chunks}}u + column * {{unit_chunks}}u + {{half}}u] = O{{s}}_0_{{half}};
{% endfor %}
    }
    workgroupBarrier();
    if (thread < {{chunks}}u) {
        var sum{{s}} = vec4<f32>();
        for (var i = 0u; i < {{slices}}u; i++) { sum{{s}} += sums[i * {{chunks}}u + thread]; }
        part_a[(item * {{slots}}u + {{s}}u) * {{chunks}}u + thread] = sum{{s}};
    }
    workgroupBarrier();
{% endif %}
{% endfor %}
}
