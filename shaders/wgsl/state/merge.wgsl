// A running state `from` into another, `into`, of the same rows: m = max(m1, m2), l = l1 e^(m1 - m)
// + l2 e^(m2 - m), O likewise. 8 threads share a (batch, row, head) triple; each takes every 8th
// chunk of O.
{% include "parts/interface.wgsl" %}
{% include "parts/weight.wgsl" %}
{% include "parts/row_head.wgsl" %}
    let into = into_ml[ml_at];
    let other = from_ml[ml_at];
    let m = max(into.x, other.x);
    let into_weight = weight_of(into.x - m);
    let other_weight = weight_of(other.x - m);
    // All 8 threads of a row must have read ml before one of them overwrites it.
    storageBarrier();
    if (!inside) { return; }
    for (var c = lane; c < {{chunks}}u; c += 8u) {
        let at = row_head * {{chunks}}u + c;
        let into_at = at - params.into_skipped;
        into_a[into_at] = into_a[into_at] * into_weight + from_a[at - params.from_skipped] * other_weight;
    }
    if (lane == 0u) {
        into_ml[ml_at] = vec2<f32>(m, into.y * into_weight + other.y * other_weight);
    }
}
