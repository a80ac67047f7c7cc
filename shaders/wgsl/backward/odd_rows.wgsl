{# The end of backward/portable.wgsl for what it has taken out of moving rows. #}
    // NaN and infinity of moving rows: where one is in a column of this thread, the tested runs are gone through once more.
    // P is more than 0, so dV gets what d_o has. A logit of such a row or key is not finite or capped, so dS is NaN or 0, and
    // its product is NaN.
    workgroupBarrier();
    fixed0[thread] = {{ as_unit("vec4<f32>(f32(odd))") }};
    workgroupBarrier();
    var odds = vec4<f32>();
    for (var r = 0u; r < 8u; r++) {
        odds += {{ as_vector("fixed0[r * 8u + tc]") }}{{ " + " ~ as_vector("fixed0[r * 8u + (tc >> 1u)]") if unit_chunks == 2 and held % 2 == 1 }};
    }
    if (odds.x > 0.0f) {
        let nan = vec4<f32>(bitcast<f32>(params.rows | 0x7fc00000u));
{% include "backward/every_run.wgsl" %}
        if ({{ "false" if bias else "run < tested_runs" }}) { continue; }
        for (var col = first; col < end; col++) {
{% if by_rows %}
            let pos = lists[params.keys_at + col];
{% else %}
            let lo = lists[spans + 2u * col];
            let hi = lists[spans + 2u * col + 1u];
            let live = saw_keys(stats[stats_base + col * params.stats_row].x);
{% endif %}
{% for i in range(rows) %}
{% if by_rows %}
            let span{{i}} = spans + 2u * {{ safe(i) }};
            let vis{{i}} = lists[span{{i}}] <= pos && pos < lists[span{{i}} + 1u]
{%- if bias %} && shows(bias_term(bias_base + {{ safe(i) }} * params.bias_row, pos)){% endif %};
{% else %}
            let pos{{i}} = lists[params.keys_at + {{ safe(i) }}];
            let vis{{i}} = live && lo <= pos{{i}} && pos{{i}} < hi
{%- if bias %} && shows(bias_term(params.bias_offset + batch * params.bias_batch + head * params.bias_head + col * params.bias_row, pos{{i}})){% endif %};
{% endif %}
{% endfor %}
{% for sum in sums %}
{% for c in range(held) %}
            {
                let chunk = load_{{sum.moving}}({{sum.moving}}_base + col * params.{{sum.moving}}_row, {{ chunk_of(c) }});
                let odd_part = select(vec4<f32>(), {{ "chunk" if sum.weight == "P" else "nan" }}, odd_in(chunk));
{% for i in range(rows) %}
                {{sum.name}}{{i}}_{{c}} += select(vec4<f32>(), odd_part, vis{{i}});
{% endfor %}
            }
{% endfor %}
{% endfor %}
        }
    }
    }
