{# What every kernel that computes logits has: its interface, the empty maximum, loads, weights, and
   where the kernel has them softcap and bias. #}
{% include "parts/interface.wgsl" %}
// m of a row that saw no key: finite, because WGSL promises nothing about infinities.
const EMPTY_M: f32 = {{EMPTY_M}};

{% include "parts/unpack.wgsl" %}
{% include "parts/weight.wgsl" %}
{% if softcap %}
// cap · tanh(t), with a relative error of a few ulp. WGSL's own tanh promises only 1e-5 absolute,
// and overflows on some drivers. The polynomial is Cephes' tanhf. `min` may drop a NaN, so NaN is
// handled separately.
fn capped(t: f32) -> f32 {
    let size = min(abs(t), 16.0f);
    let large = 1.0f - 2.0f / (exp2(size * 2.8853900f) + 1.0f);
    let z = size * size;
    let tail = (((-5.7049887e-3f * z + 2.0639088e-2f) * z - 5.3739715e-2f) * z + 1.3331442e-1f) * z - 3.3333282e-1f;
    let value = params.cap * select(large, size + size * z * tail, size < 0.625f);
    let result = select(value, -value, t < 0.0f);
    return select(result, t, (bitcast<u32>(t) & 0x7fffffffu) > 0x7f800000u);
}

{% endif %}
{% if bias %}
{% include "parts/bias.wgsl" %}
{% endif %}
