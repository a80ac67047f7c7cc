// 8-bit codes and their scales back to elements; -128 becomes NaN. As many threads as to_codes.wgsl
// has.
{% include "parts/interface.wgsl" %}
{% include "parts/round.wgsl" %}
fn numbers(word: u32, scale: vec4<f32>) -> vec4<f32> {
    let codes = (vec4<i32>(bitcast<i32>(word)) << vec4<u32>(24u, 16u, 8u, 0u)) >> vec4<u32>(24u);
    let bits = bitcast<vec4<u32>>(vec4<f32>(codes) * scale);
    return bitcast<vec4<f32>>(select(bits, vec4<u32>(0x7fc00000u), codes == vec4<i32>(-128)));
}

{% include "parts/code_group.wgsl" %}
{% if scales == "channels" %}
    let scale_at = params.scales_offset + 8u * group;
    let scale_x = vec4<f32>(scales[scale_at], scales[scale_at + 1u], scales[scale_at + 2u], scales[scale_at + 3u]);
    let scale_y = vec4<f32>(scales[scale_at + 4u], scales[scale_at + 5u], scales[scale_at + 6u], scales[scale_at + 7u]);
{% else %}
    let scale_x = vec4<f32>(scales[params.scales_offset + group]);
    let scale_y = scale_x;
{% endif %}
    for (var step = 0u; step < steps; step += 1u) {
        let chunk = begin + step * stride;
        let at = params.codes_offset + 2u * chunk;
        let x = numbers(codes[at], scale_x);
        let y = numbers(codes[at + 1u], scale_y);
{% if storage == "f32" %}
        let unit = params.data_offset + 2u * chunk;
        destination[unit] = x;
        destination[unit + 1u] = y;
{% else %}
        destination[params.data_offset + chunk] = vec4<u32>(
            rounded(x.x) | (rounded(x.y) << 16u),
            rounded(x.z) | (rounded(x.w) << 16u),
            rounded(y.x) | (rounded(y.y) << 16u),
            rounded(y.z) | (rounded(y.w) << 16u),
        );
{% endif %}
    }
}
