{# odd_in, and of a unit of 16 bytes: finite_part. #}
{% include "parts/odd.wgsl" %}
// `unit` with 0 for these elements.
{% if storage == "f32" %}
fn finite_part(unit: vec4<f32>) -> vec4<f32> { return select(unit, vec4<f32>(), odd_in(unit)); }
{% else %}
{% set exponent = "0x7c00u" if storage == "f16" else "0x7f80u" %}
fn finite_part(unit: vec4<u32>) -> vec4<u32> {
    let low = vec4<u32>({{exponent}});
    let high = vec4<u32>({{exponent}} << 16u);
    return select(unit & vec4<u32>(0xffffu), vec4<u32>(), (unit & low) == low)
        | select(unit & vec4<u32>(0xffff0000u), vec4<u32>(), (unit & high) == high);
}
{% endif %}
