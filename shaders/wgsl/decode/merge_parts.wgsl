// All parts of a row into its running state: m is the largest of all, l = sum of l_i e^(m_i - m), O
// likewise, over the state and the parts that saw a key. If no part saw one, the state is not
// written. 8 threads share a (batch, row, head) triple; each takes every 8th chunk of O.
{% include "parts/interface.wgsl" %}
const EMPTY_M: f32 = {{EMPTY_M}};

{% include "parts/weight.wgsl" %}
{% include "decode/unseen.wgsl" %}
{% set own = (chunks + 7) // 8 %}
{# The c-th chunk of this thread. Threads beyond the head read its last chunk again, and do not
   write it. #}
{% macro chunk(c) %}{% if 8 * (c + 1) > chunks %}min(lane + {{ 8 * c }}u, {{ chunks - 1 }}u){% else %}lane + {{ 8 * c }}u{% endif %}{% endmacro %}
{% include "parts/row_head.wgsl" %}
    let slot = row * params.group_heads + head % params.group_heads;
    let group_index = (batch - params.batch_first) * (params.heads / params.group_heads) + head / params.group_heads;
    let parts = group_index * params.splits * params.slots + slot;
    let a_at = safe * {{chunks}}u - params.a_skipped;
    let state = state_ml[ml_at - params.ml_skipped];
    let before = state.x;
    var m = before;
    var seen = false;
    for (var i = 0u; i < params.splits; i++) {
        let part = part_ml[parts + i * params.slots];
        if (!is_unseen(part.y)) {
            m = max(m, part.x);
            seen = true;
        }
    }
    let corr = weight_of(before - m);
    var l = state.y * corr;
{% for c in range(own) %}
    var O{{c}} = state_a[a_at + {{ chunk(c) }}] * corr;
{% endfor %}
    for (var i = 0u; i < params.splits; i++) {
        let at = parts + i * params.slots;
        let part = part_ml[at];
        if (!is_unseen(part.y)) {
            let weight = weight_of(part.x - m);
            l += part.y * weight;
{% for c in range(own) %}
            O{{c}} += part_a[at * {{chunks}}u + {{ chunk(c) }}] * weight;
{% endfor %}
        }
    }
    // All 8 threads of a row must have read ml before one of them overwrites it.
    storageBarrier();
    if (!inside || !seen) { return; }
{% for c in range(own) %}
{% if 8 * (c + 1) > chunks %}
    if (lane + {{ 8 * c }}u < {{chunks}}u) { state_a[a_at + lane + {{ 8 * c }}u] = O{{c}}; }
{% else %}
    state_a[a_at + lane + {{ 8 * c }}u] = O{{c}};
{% endif %}
{% endfor %}
    if (lane == 0u) {
        state_ml[ml_at - params.ml_skipped] = vec2<f32>(m, l);
    }
}
