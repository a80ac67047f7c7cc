// Gradients for drivers that compute on the host's cores, as attend/subgroup.wgsl attends: one
// subgroup of {{lanes}} lanes is one workgroup, and one SIMD register there. backward/portable.wgsl says what is
// computed, what is fixed and what moves, and what the bindings hold.
//
// Tile: {{ lanes * rows }} fixed rows, {{rows}} in each lane; moving rows one by one.
//
// Each lane keeps its fixed rows and their sums in named registers. The subgroup loads a moving row
// together, and each element is broadcast from a constant lane. No workgroup memory, no barrier, no
// branch in the loop. The moving tensors and their statistics are textures of 16-byte texels: x =
// head · units of a head + unit, or of statistics the head; y = (batch entry - batch_first) ·
// moving_texels + row - moving_begin.
//
// A logit is added up in {{chains}} sums as in the forward kernel. With logits of 100, another order of
// additions would change P by 1e-5. And a pair that one direction tests may be in a full run of the
// other, so the order may not depend on the kind of the run.
{% include "parts/logits.wgsl" %}
{% include "backward/shares.wgsl" %}
{% include "parts/texel.wgsl" %}
{# The moving row `at`: this lane's units, unpacked before they are broadcast. A query row that saw
   no key is zeros: 0 · NaN is NaN. #}
{% macro fetch(tensor, factor) %}
{% for load in range(loads) %}
            let {{tensor}}_texel{{load}} = textureLoad({{tensor}}, vec2<i32>(vec2<u32>(unit{{load}}, moving_y + at)));
{% for half in range(unit_chunks) %}
{% set texel = "texel_" ~ half ~ "(" ~ tensor ~ "_texel" ~ load ~ ")" ~ factor %}
            let {{tensor}}_own{{load}}_{{half}} = {% if by_rows %}{{texel}}{% else %}select(vec4<f32>(), {{texel}}, live){% endif %};
{% endfor %}
{% endfor %}
{% endmacro %}
{# `name`: the products of the moving row with each fixed one. Each element of the moving row
   becomes a register. #}
{% macro products(name, moving, fixed, factor) %}
{% for c in range(chunks) %}
{% set unit = c // unit_chunks %}
{% for x in ["x", "y", "z", "w"] %}
{% set element = 4 * c + loop.index0 %}
            let {{moving}}_{{c}}{{x}} = subgroupBroadcast({{moving}}_own{{ unit // lanes }}_{{ c % unit_chunks }}.{{x}}, {{ unit % lanes }}u);
{% for r in range(rows) %}
{% set sum = name ~ r ~ "_chain" ~ element % chains %}
{% if element < chains %}
            var {{sum}} = {{fixed}}{{r}}_{{c}}.{{x}} * {{moving}}_{{c}}{{x}};
{% else %}
            {{sum}} = fma({{fixed}}{{r}}_{{c}}.{{x}}, {{moving}}_{{c}}{{x}}, {{sum}});
{% endif %}
{% endfor %}
{% endfor %}
{% endfor %}
{% for r in range(rows) %}
            let {{name}}{{r}} = ({% for chain in range(chains) %}{{name}}{{r}}_chain{{chain}}{{ " + " if not loop.last }}{% endfor %}){{factor}};
{% endfor %}
{% endmacro %}
{# Adds the moving row, times dS or P, to a sum. A hidden element is replaced: 0 · NaN is NaN. #}
{% macro add(sum, moving, weight, tested) %}
{% for c in range(chunks) %}
{% for x in ["x", "y", "z", "w"] %}
{% for r in range(rows) %}
{% if tested %}
            {{sum}}{{r}}_{{c}}{{x}} = fma(select(0.0f, {{moving}}_{{c}}{{x}}, vis{{r}}), {{weight}}{{r}}, {{sum}}{{r}}_{{c}}{{x}});
{% else %}
            {{sum}}{{r}}_{{c}}{{x}} = fma({{moving}}_{{c}}{{x}}, {{weight}}{{r}}, {{sum}}{{r}}_{{c}}{{x}});
{% endif %}
{% endfor %}
{% endfor %}
{% endfor %}
{% endmacro %}
{# The moving rows of one run. #}
{% macro rows_of_run(tested) %}
        for (var at = first; at < end; at++) {
{% if by_rows %}
{{ fetch("k", "") }}
{{- fetch("v", "") }}
{{- products("S", "k", "q", " * params.x_scale") }}
{{- products("dP", "v", "d_o", "") }}
{% else %}
            let stats_at = bitcast<vec4<f32>>(textureLoad(stats, vec2<i32>(vec2<u32>(head, moving_y + at))));
            let live = saw_keys(stats_at.x);
{{ fetch("q", " * params.q_scale") }}
{{- fetch("d_o", "") }}
{{- products("S", "q", "k", " * params.x_scale") }}
{{- products("dP", "d_o", "v", "") }}
{% endif %}
{% if tested %}
            // Which of the lane's pairs are visible; with a bias, also the terms of their logits.
{% if by_rows %}
            let position = lists[params.keys_at + at];
{% else %}
            let lo = lists[spans + 2u * at];
            let hi = lists[spans + 2u * at + 1u];
{% if bias %}
            let bias_row = params.bias_offset + batch * params.bias_batch + at * params.bias_row + head * params.bias_head;
{% endif %}
{% endif %}
{% for r in range(rows) %}
{% set inside = "lo" ~ r ~ " <= position && position < hi" ~ r if by_rows else "lo <= pos" ~ r ~ " && pos" ~ r ~ " < hi" %}
{% if bias %}
            let term{{r}} = bias_term({% if by_rows %}bias_row{{r}}, position{% else %}bias_row, pos{{r}}{% endif %});
            let vis{{r}} = {{inside}} && shows(term{{r}});
{% else %}
            let vis{{r}} = {{inside}};
{% endif %}
{% endfor %}
{% endif %}
            // P and dS.
{% for r in range(rows) %}
{% set logit = "capped(S" ~ r ~ ")" if softcap else "S" ~ r %}
{% set logit = logit ~ " + term" ~ r if bias else logit %}
{% set row = "stats" ~ r if by_rows else "stats_at" %}
{% set delta = "delta" ~ r if by_rows else "stats_at.z" %}
{% set slope = " * slope_of(S" ~ r ~ ")" if slopes else "" %}
{% if tested %}
            let P{{r}} = select(0.0f, share_of({{logit}}, {{row}}.x, {{row}}.y), vis{{r}});
            let dS{{r}} = select(0.0f, P{{r}} * (dP{{r}} - {{delta}}){{slope}}, vis{{r}});
{% else %}
            let P{{r}} = share_of({{logit}}, {{row}}.x, {{row}}.y);
            let dS{{r}} = P{{r}} * (dP{{r}} - {{delta}}){{slope}};
{% endif %}
{% endfor %}
{% if of_bias %}
            // dBias: of rows to memory, where no other lane of the dispatch has these pairs; of
            // keys to sums.
{% for r in range(rows) %}
{% if by_rows %}
            if (adds{{r}} && vis{{r}}) {
                let element = sum_at{{r}} + position;
                d_bias[element] = d_bias[element] + dS{{r}};
            }
{% else %}
            bias{{r}} += select(0.0f, dS{{r}}, vis{{r}} && live);
{% endif %}
{% endfor %}
{% elif by_rows %}
{{ add("dq", "k", "dS", tested) }}
{% else %}
{{ add("dk", "q", "dS", tested) }}
{{- add("dv", "d_o", "P", tested) }}
{% endif %}
        }
{% endmacro %}
{# All runs of query head `head`: the full ones, then those whose pairs are tested; with a bias all
   are. #}
{% macro runs(row_of_moving) %}
{% for load in range(loads) %}
    // Lanes beyond the head load its last unit again; no other lane reads it from them.
    let unit{{load}} = {{row_of_moving}} * {{units}}u + min(lane + {{ load * lanes }}u, {{ units - 1 }}u);
{% endfor %}
{% for tested in ([true] if bias else [false, true]) %}
    for (var run = {{ "tested_runs" if tested and not bias else "full_runs" }}; run < {{ "runs_end" if tested else "tested_runs" }}; run++) {
        let first = max(lists[params.runs_at + 2u * run], params.moving_begin);
        let end = min(lists[params.runs_at + 2u * run + 1u], params.moving_end);
{{ rows_of_run(tested) }}
    }
{% endfor %}
{% endmacro %}
@compute @workgroup_size({{lanes}})
fn main(@builtin(workgroup_id) group_id: vec3<u32>, @builtin(subgroup_invocation_id) lane: u32) {
{% include "backward/item.wgsl" %}
    let moving_y = (batch - params.batch_first) * params.moving_texels - params.moving_begin;
{% for r in range(rows) %}
    let row{{r}} = tile * {{ lanes * rows }}u + {{ lanes * r }}u + lane;
    let in{{r}} = row{{r}} < params.fixed_end;
    let safe{{r}} = min(row{{r}}, params.fixed_end - 1u);
    let sum_at{{r}} = params.sum_offset + batch * params.sum_batch
        + safe{{r}} * params.sum_row + own_head * params.sum_head;
{% if by_rows %}
    let lo{{r}} = lists[spans + 2u * safe{{r}}];
    let hi{{r}} = lists[spans + 2u * safe{{r}} + 1u];
    let stats{{r}} = stats[params.stats_offset + batch * params.stats_batch
        + safe{{r}} * params.stats_row + own_head * params.stats_head];
    let delta{{r}} = stats{{r}}.z;
{% if bias %}
    let bias_row{{r}} = params.bias_offset + batch * params.bias_batch
        + safe{{r}} * params.bias_row + own_head * params.bias_head;
{% endif %}
{% else %}
    let pos{{r}} = lists[params.keys_at + safe{{r}}];
{% endif %}
{% for x in (["q", "d_o"] if by_rows else ["k", "v"]) %}
    let {{x}}_at{{r}} = params.{{x}}_offset + batch * params.{{x}}_batch
        + safe{{r}} * params.{{x}}_row + {{fixed_head}} * params.{{x}}_head;
{% for u in range(units) %}
    let {{x}}_unit{{r}}_{{u}} = {{x}}[{{x}}_at{{r}} + {{u}}u];
{% for half in range(unit_chunks) %}
    let {{x}}{{r}}_{{ u * unit_chunks + half }} = chunk_{{half}}({{x}}_unit{{r}}_{{u}}){{ " * params.q_scale" if x == "q" }};
{% endfor %}
{% endfor %}
{% endfor %}
{% for sum in sums %}
{% for c in range(chunks) %}
    var {{sum.name}}{{r}}_{{c}}x = 0.0f;
    var {{sum.name}}{{r}}_{{c}}y = 0.0f;
    var {{sum.name}}{{r}}_{{c}}z = 0.0f;
    var {{sum.name}}{{r}}_{{c}}w = 0.0f;
{% endfor %}
{% endfor %}
{% if of_bias and by_rows %}
    let adds{{r}} = in{{r}} && saw_keys(stats{{r}}.x);
{% elif of_bias %}
    var bias{{r}} = 0.0f;
{% endif %}
{% endfor %}
{% if by_rows %}
{{ runs("kv_head") }}
{% elif of_one_query_head %}
{{ runs("head") }}
{% else %}
    for (var head = lists[params.heads_at + own_head]; head < lists[params.heads_at + own_head + 1u]; head++) {
{{ runs("head") }}
    }
{% endif %}
    // The sums are added to those in memory. Of dK, the factor on q is in the sum.
{% for r in range(rows) %}
{% if of_bias and not by_rows %}
    if (in{{r}}) {
        let element = sum_at{{r}} + pos{{r}};
        d_bias[element] = d_bias[element] + bias{{r}};
    }
{% elif not of_bias %}
    if (in{{r}}{{ " && saw_keys(stats" ~ r ~ ".x)" if by_rows }}) {
{% for sum in sums %}
{% for c in range(chunks) %}
{% set a = sum.name ~ r ~ "_" ~ c %}
        {{sum.name}}[sum_at{{r}} + {{c}}u] = {{sum.name}}[sum_at{{r}} + {{c}}u]
            + vec4<f32>({{a}}x, {{a}}y, {{a}}z, {{a}}w){{sum.factor}};
{% endfor %}
{% endfor %}
    }
{% endif %}
{% endfor %}
}
