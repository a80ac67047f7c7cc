{% if storage == "f16" %}
// The bits of x in f16, rounded to nearest, ties to even. `pack2x16float` may truncate, and
// promises nothing for values that overflow.
fn rounded(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    let sign = (bits >> 16u) & 0x8000u;
    let magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) { return sign | 0x7e00u; }
    if (magnitude >= 0x477ff000u) { return sign | 0x7c00u; }
    if (magnitude >= 0x38800000u) {
        return sign | ((magnitude + 0xfffu + ((magnitude >> 13u) & 1u) - 0x38000000u) >> 13u);
    }
    // Below the normal numbers: adding 1/2 leaves the rounded multiple of 2^-24 in the low bits.
    return sign | (bitcast<u32>(bitcast<f32>(magnitude) + 0.5f) - 0x3f000000u);
}

{% elif storage == "bf16" %}
// The bits of x in bf16, rounded to nearest, ties to even.
fn rounded(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) { return (bits >> 16u) | 0x40u; }
    return (bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u;
}

{% endif %}
