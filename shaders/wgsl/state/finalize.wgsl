// A running state to output and log-sum-exp: o = O / l in the storage type; lse = m + ln l as two
// f32, its bits and the rest. Where l is 0, o = 0 and lse = -inf. A sink is a logit of each head
// that l counts as well. 8 threads share a (batch, row, head) triple; each takes every 8th unit.
{% include "parts/interface.wgsl" %}
{% if sinks %}
{% include "parts/weight.wgsl" %}
{% endif %}
{% include "parts/round.wgsl" %}
// The natural logarithm to about an ulp, after Cephes' logf. WGSL promises only 2^-21 near 1, and
// some drivers are not more exact. Infinity and NaN are handled separately.
fn ln(x: f32) -> f32 {
    let bits = bitcast<u32>(x);
    // x = f · 2^e with f in [sqrt(1/2), sqrt(2))
    let shifted = bits - 0x3f3504f3u;
    let e = f32(bitcast<i32>(shifted) >> 23u);
    let z = bitcast<f32>((shifted & 0x007fffffu) + 0x3f3504f3u) - 1.0f;
    var p = 7.0376836292e-2f * z - 1.1514610310e-1f;
    p = p * z + 1.1676998740e-1f;
    p = p * z - 1.2420140846e-1f;
    p = p * z + 1.4249322787e-1f;
    p = p * z - 1.6668057665e-1f;
    p = p * z + 2.0000714765e-1f;
    p = p * z - 2.4999993993e-1f;
    p = p * z + 3.3333331174e-1f;
    let y = z * z * z * p - 2.12194440e-4f * e - 0.5f * z * z;
    let result = (z + y) + 0.693359375f * e;
    return select(result, x, (bits & 0x7f800000u) == 0x7f800000u);
}

// m + ln l: rounded, and the rest. The integer that is added, 0, is one that no compiler knows:
// WGSL lets it take (m + y) - m for y.
fn log_sum(m: f32, l: f32) -> vec2<u32> {
    let y = ln(l);
    let sum = bitcast<u32>(m + y) + u32(params.heads == 0u);
    return vec2<u32>(sum, bitcast<u32>(y - (bitcast<f32>(sum) - m)));
}

{# Chunk `c` of unit u of the output. Zeros get no sign, because the sign of a zero depends on the
   order of the merges. #}
{% macro output(c) -%}
{% set a = "state_a[row_head * " ~ chunks ~ "u + u * " ~ unit_chunks ~ "u + " ~ c ~ "u - params.a_skipped]" -%}
select({{a}}{{ " * weight" if sinks }} / divisor, vec4<f32>(), vec4<bool>(empty) | ({{a}} == vec4<f32>()))
{%- endmacro %}
{% include "parts/row_head.wgsl" %}
    if (!inside) { return; }
    let ml = state_ml[ml_at];
    // By bits: NaN must not count as empty.
    let empty = (bitcast<u32>(ml.y) & 0x7fffffffu) == 0u;
{% if sinks %}
    let sink = sinks[head];
    let m = max(ml.x, sink);
    let weight = weight_of(ml.x - m);
    let divisor = select(ml.y * weight + weight_of(sink - m), 1.0f, empty);
    if (lane == 0u) {
        lse[row_head] = select(log_sum(m, divisor), vec2<u32>(bitcast<u32>(sink), 0u), empty);
    }
{% else %}
    let divisor = select(ml.y, 1.0f, empty);
    if (lane == 0u) {
        lse[row_head] = select(log_sum(ml.x, divisor), vec2<u32>(0xff800000u, 0u), empty);
    }
{% endif %}
    for (var u = lane; u < {{units}}u; u += 8u) {
{% if storage == "f32" %}
        o[row_head * {{units}}u + u - params.o_skipped] = {{ output(0) }};
{% else %}
        let x = {{ output(0) }};
        let y = {{ output(1) }};
        o[row_head * {{units}}u + u - params.o_skipped] = vec4<u32>(
            rounded(x.x) | (rounded(x.y) << 16u),
            rounded(x.z) | (rounded(x.w) << 16u),
            rounded(y.x) | (rounded(y.y) << 16u),
            rounded(y.z) | (rounded(y.w) << 16u)
        );
{% endif %}
    }
}
