// Of a row that saw no key, row_stats.wgsl makes the log-sum-exp -EMPTY_M. By bits, so that a row of
// NaN counts: SPIR-V from naga has `!=` false for NaN.
fn saw_keys(lse: f32) -> bool { return bitcast<u32>(lse) != {{unseen_bits}}u; }
// P of a logit. Rounded, a logit may be above the log-sum-exp.
fn share_of(logit: f32, lse: f32, factor: f32) -> f32 {
    let below = logit - lse;
    return weight_of(select(below, 0.0f, below > 0.0f)) * factor;
}
{% if slopes %}
// 1 - tanh^2(t), from the exponential: near 1 the difference would have lost most of its digits.
fn slope_of(t: f32) -> f32 {
    let u = exp2(min(abs(t), 80.0f) * -2.8853900f);
    let below = 1.0f + u;
    return 4.0f * u / (below * below);
}
{% endif %}

