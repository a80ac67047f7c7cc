{# The end of backward/matrix.wgsl for what it has taken out of moving rows. #}
    // NaN and infinity of moving rows: if there were some, the tested runs are gone through once more. P is more than 0, so dV
    // gets what d_o has. A logit of such a row or key is not finite or capped, so dS is NaN or 0, and its product is NaN.
    // Each thread has the elements of the sums that it has stored: a barrier for storage memory, as naga writes it, needs a feature
    // of Vulkan's memory model.
    if (atomicLoad(&not_finite) == 0u) { return; }
    let nan = vec4<f32>(bitcast<f32>(params.rows | 0x7fc00000u));
    for (var fragment = {{ "own" if by_rows else "of_role" }}; fragment < {{fragments}}u; fragment += {{ "sharers" if by_rows else "per_role" }}) {
    for (var e = lane; e < {{ size * size // 4 }}u; e += subgroup_size) {
        let row = tile * {{T}}u + row_group * {{size}}u + e / {{ size // 4 }}u;
        let chunk = fragment * {{ size // 4 }}u + e % {{ size // 4 }}u;
        if (row >= params.fixed_end{{ " || !saw_keys(stats[own_stats + row * params.stats_row].x)" if by_rows }}) { continue; }
{% for sum in sums %}
        var {{sum.name}}_odd = vec4<f32>();
{% endfor %}
{% include "backward/every_run.wgsl" %}
        if (run < tested_runs) { continue; }
        for (var col = first; col < end; col++) {
{% if by_rows %}
            let span = spans + 2u * row;
            let vis = lists[span] <= lists[params.keys_at + col] && lists[params.keys_at + col] < lists[span + 1u];
{% else %}
            let span = spans + 2u * col;
            let vis = lists[span] <= lists[params.keys_at + row] && lists[params.keys_at + row] < lists[span + 1u]
                && saw_keys(stats[stats_base + col * params.stats_row].x);
{% endif %}
{% for sum in sums %}
            let {{sum.moving}}_chunk = load_{{sum.moving}}({{sum.moving}}_base + col * params.{{sum.moving}}_row, chunk);
            {{sum.name}}_odd += select(vec4<f32>(), {{ sum.moving ~ "_chunk" if sum.name == "dv" else "nan" }}, odd_in({{sum.moving}}_chunk) & vec4<bool>(vis));
{% endfor %}
        }
    }
        let sum_at = params.sum_offset + batch * params.sum_batch + row * params.sum_row + own_head * params.sum_head + chunk;
{% for sum in sums %}
        {% if not by_rows %}if (role == {{ loop.index0 }}u) {% endif %}{
            {{sum.name}}[sum_at] = select({{sum.name}}[sum_at], {{sum.name}}[sum_at] + {{sum.name}}_odd, odd_in({{sum.name}}_odd));
        }
{% endfor %}
    }
    }
