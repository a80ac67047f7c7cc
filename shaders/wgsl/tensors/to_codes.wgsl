// Elements to 8-bit codes and their scales. One thread for each 8 channels of the tokens that share
// their scales, or for each row that shares one scale: it looks for the largest elements, then
// writes the codes. -128 is what is not finite.
{% include "parts/interface.wgsl" %}
{% include "parts/unpack.wgsl" %}
// Bits of the magnitude, by which it can be compared; 0 of what is not finite.
fn sizes(x: vec4<f32>) -> vec4<u32> {
    let bits = bitcast<vec4<u32>>(x) & vec4<u32>(0x7fffffffu);
    return select(bits, vec4<u32>(0u), bits >= vec4<u32>(0x7f800000u));
}

fn scales_for(largest: vec4<u32>) -> vec4<f32> {
    let scale = bitcast<vec4<f32>>(largest) / 127.0f;
    // Below the normal numbers.
    return select(scale, vec4<f32>(0.0f), bitcast<vec4<u32>>(scale) < vec4<u32>(0x00800000u));
}

fn word(x: vec4<f32>, scale: vec4<f32>) -> u32 {
    let bits = bitcast<vec4<u32>>(x) & vec4<u32>(0x7fffffffu);
    let finite = bits < vec4<u32>(0x7f800000u);
    let divisor = select(scale, vec4<f32>(1.0f), scale == vec4<f32>(0.0f));
    let rounded = round(clamp(select(vec4<f32>(0.0f), x, finite) / divisor, vec4<f32>(-127.0f), vec4<f32>(127.0f)));
    let whole = select(vec4<i32>(rounded), vec4<i32>(0), scale == vec4<f32>(0.0f));
    let codes = bitcast<vec4<u32>>(select(vec4<i32>(-128), whole, finite)) & vec4<u32>(0xffu);
    return codes.x | (codes.y << 8u) | (codes.z << 16u) | (codes.w << 24u);
}

{# The elements x and y of the chunk of this step. #}
{% macro read_chunk() %}
        let chunk = begin + step * stride;
{% if storage == "f32" %}
        let unit = params.data_offset + 2u * chunk;
        let x = source[unit];
        let y = source[unit + 1u];
{% else %}
        let unit = source[params.data_offset + chunk];
        let x = chunk_0(unit);
        let y = chunk_1(unit);
{% endif %}
{% endmacro %}
{% include "parts/code_group.wgsl" %}
    var largest_x = vec4<u32>(0u);
    var largest_y = vec4<u32>(0u);
    for (var step = 0u; step < steps; step += 1u) {
{{ read_chunk() }}
        largest_x = max(largest_x, sizes(x));
        largest_y = max(largest_y, sizes(y));
    }
{% if scales == "channels" %}
    let scale_x = scales_for(largest_x);
    let scale_y = scales_for(largest_y);
    let scale_at = params.scales_offset + 8u * group;
    for (var i = 0u; i < 4u; i += 1u) {
        scales[scale_at + i] = scale_x[i];
        scales[scale_at + 4u + i] = scale_y[i];
    }
{% else %}
    let both = max(largest_x, largest_y);
    let scale_x = scales_for(vec4<u32>(max(max(both.x, both.y), max(both.z, both.w))));
    let scale_y = scale_x;
    scales[params.scales_offset + group] = scale_x.x;
{% endif %}
    for (var step = 0u; step < steps; step += 1u) {
{{ read_chunk() }}
        let at = params.codes_offset + 2u * chunk;
        codes[at] = word(x, scale_x);
        codes[at + 1u] = word(y, scale_y);
    }
}
