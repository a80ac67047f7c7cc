{# The end of attend/portable.wgsl for what it has taken out of V. #}
    // NaN and infinity of V: where one is in a column of this thread, the keys of tested runs are gone through once more.
    // Their weight is left out: it is more than 0, and changes neither.
    workgroupBarrier();
    tile_q[thread] = vec4<f32>(select(0.0f, 1.0f, odd));
    workgroupBarrier();
    var odds = 0.0f;
    for (var r = 0u; r < 8u; r++) { odds += tile_q[r * 8u + tc].x{{ " + tile_q[r * 8u + (tc >> 1u)].x" if unit_chunks == 2 and held % 2 == 1 }}; }
    if (odds > 0.0f) {
        for (var run = {{ "full_runs" if bias else "partial_runs" }}; run < runs_end; run++) {
{% include "attend/run.wgsl" %}
            for (var key = first; key < end; key++) {
                let pos = positions[params.keys_at + key];
{% for i in range(rows) %}
                let span{{i}} = spans + 2u * {{ safe(i) }};
                let vis{{i}} = positions[span{{i}}] <= pos && pos < positions[span{{i}} + 1u]
                    {{ "&& shows(bias_term(bias_base + " ~ safe(i) ~ " * params.bias_row, pos))" if bias }};
{% endfor %}
{% for c in range(held) %}
                {
                    let unit = v[v_base + key * params.v_row + min({{ unit_of(c) }}, {{ units - 1 }}u)];
                    let chunk = {{ chunk_in(c, "unit") }};
                    let odd_part = select(vec4<f32>(), chunk, odd_in(chunk));
{% for i in range(rows) %}
                    O{{i}}_{{c}} += select(vec4<f32>(), odd_part, vis{{i}});
{% endfor %}
                }
{% endfor %}
            }
        }
    }
