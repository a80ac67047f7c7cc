// Element d of a row of f16, in whose unit it is.
fn element(unit: vec4<u32>, d: u32) -> f32 {
    let pair = unpack2x16float(unit[(d >> 1u) & 3u]);
    return select(pair.x, pair.y, (d & 1u) == 1u);
}
