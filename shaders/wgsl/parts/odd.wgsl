// Which elements are NaN or infinite.
fn odd_in(chunk: vec4<f32>) -> vec4<bool> {
    return (bitcast<vec4<u32>>(chunk) & vec4<u32>(0x7f800000u)) == vec4<u32>(0x7f800000u);
}
