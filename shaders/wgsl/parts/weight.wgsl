// e^below, the weight of a key whose logit is `below` the largest one of its row. Below -150 the
// power is 0 in f32, and the product with log2 e cannot overflow. NaN is handled by bits: WGSL
// promises nothing about the exp2 of a NaN, and `max` may drop it.
fn weight_of(below: f32) -> f32 {
    let power = exp2(max(below, -150.0f) * 1.442695f);
    return select(power, below, (bitcast<u32>(below) & 0x7fffffffu) > 0x7f800000u);
}

