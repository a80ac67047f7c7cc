// A hidden pair: below every logit with a bias, and finite. It must never be added.
const HIDDEN: f32 = -3e38f;
// By bits, so that NaN is shown: SPIR-V from naga has `!=` false for NaN.
fn shows(term: f32) -> bool { return bitcast<u32>(term) != 0xff61b1e6u; }
// What the row that starts at `row` of the binding adds to its logit of the key at `position`; or
// HIDDEN.
fn bias_term(row: u32, position: u32) -> f32 {
{% if bias == "visible" %}
    let bit = (bias[row + (position >> 5u)] >> (position & 31u)) & 1u;
    return select(HIDDEN, 0.0f, bit == 1u);
{% else %}
{% if storage == "f32" %}
    let bits = bias[row + position];
    let bias = bitcast<f32>(bits);
    let hidden = bits == 0xff800000u;
{% elif storage == "f16" %}
    let word = bias[(row + position) >> 1u];
    let bits = (word >> (((row + position) & 1u) * 16u)) & 0xffffu;
    let bias = unpack2x16float(bits).x;
    let hidden = bits == 0xfc00u;
{% else %}
    let word = bias[(row + position) >> 1u];
    let bits = (word >> (((row + position) & 1u) * 16u)) << 16u;
    let bias = bitcast<f32>(bits);
    let hidden = bits == 0xff800000u;
{% endif %}
    // `max` may drop a NaN, so NaN goes around; logits stay above that of a row that saw no key.
    let is_nan = (bitcast<u32>(bias) & 0x7fffffffu) > 0x7f800000u;
    let kept = select(max(bias, -1e38f), bias, is_nan);
    return select(kept, HIDDEN, hidden);
{% endif %}
}

