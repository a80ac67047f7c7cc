// Elements from one storage type to another, one of the two f32. One thread for each 8 elements: a
// unit of a 16-bit type, two units of f32.
{% include "parts/interface.wgsl" %}
{% if widens %}
{% include "parts/unpack.wgsl" %}
{% else %}
{% include "parts/round.wgsl" %}
{% endif %}
{% if reports %}
// Whether a finite element is large enough for `rounded` to make it infinite.
fn overflows(x: vec4<f32>) -> bool {
    let magnitude = bitcast<vec4<u32>>(x) & vec4<u32>(0x7fffffffu);
    return any((magnitude >= vec4<u32>(0x477ff000u)) & (magnitude < vec4<u32>(0x7f800000u)));
}

{% endif %}
{% include "parts/thread.wgsl" %}
    if (index >= params.count) { return; }
{% if widens %}
    let unit = source[params.from_offset + index];
    let at = params.into_offset + 2u * index;
    destination[at] = chunk_0(unit);
    destination[at + 1u] = chunk_1(unit);
{% else %}
    let at = params.from_offset + 2u * index;
    let x = source[at];
    let y = source[at + 1u];
    destination[params.into_offset + index] = vec4<u32>(
        rounded(x.x) | (rounded(x.y) << 16u),
        rounded(x.z) | (rounded(x.w) << 16u),
        rounded(y.x) | (rounded(y.y) << 16u),
        rounded(y.z) | (rounded(y.w) << 16u),
    );
{% endif %}
{% if reports %}
    if (overflows(x) || overflows(y)) { atomicStore(&overflow[0], 1u); }
{% endif %}
}
