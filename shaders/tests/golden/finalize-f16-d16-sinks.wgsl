// finalize, f16, head dim 16: 8 threads for each row and head
struct FinalizeParams {
    first: u32,
    end: u32,
    rows: u32,
    heads: u32,
    grid_width: u32,
    a_skipped: u32,
    o_skipped: u32,
    pad: u32,
}
@group(0) @binding(0) var<uniform> params: FinalizeParams;
@group(0) @binding(1) var<storage, read> state_a: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> state_ml: array<vec2<f32>>;
@group(0) @binding(3) var<storage, read_write> o: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read_write> lse: array<u32>;
@group(0) @binding(5) var<storage, read> sinks: array<f32>;

fn weight_of(below: f32) -> f32 {
    let power = exp2(max(below, -150.0f) * 1.442695f);
    return select(power, below, (bitcast<u32>(below) & 0x7fffffffu) > 0x7f800000u);
}

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

fn ln(x: f32) -> f32 {
    let bits = bitcast<u32>(x);
    // x = f · 2^e with f in [sqrt(1/2), sqrt(2))
    let shifted = bits - 0x3f3504f3u;
    let e = f32(bitcast<i32>(shifted) >> 23u);
    let z = bitcast<f32>((shifted & 0x007fffffu) + 0x3f3504f3u) - 1.0f;
    var p = 7.0376836292e-2f * z - 1.1514610310e-1f;
    p = p * z + 1.1676998740e-1f;
    p = p * z - 1.2420140846e-1f;
    p = p * z + 1.4249322787e-1f;
    p = p * z - 1.6668057665e-1f;
    p = p * z + 2.0000714765e-1f;
    p = p * z - 2.4999993993e-1f;
    p = p * z + 3.3333331174e-1f;
    let y = z * z * z * p - 2.12194440e-4f * e - 0.5f * z * z;
    let result = (z + y) + 0.693359375f * e;
    return select(result, x, (bits & 0x7f800000u) == 0x7f800000u);
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group_id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let group = group_id.x + group_id.y * params.grid_width;
    let row_head = params.first + group * 8u + (thread >> 3u);
    let lane = thread & 7u;
    let inside = row_head < params.end;
    let safe = min(row_head, params.end - 1u);
    let head = safe % params.heads;
    let row = (safe / params.heads) % params.rows;
    let batch = safe / params.heads / params.rows;
    let ml_at = (batch * params.heads + head) * params.rows + row;
    if (!inside) { return; }
    let ml = state_ml[ml_at];
    // By bits: NaN must not count as empty.
    let empty = (bitcast<u32>(ml.y) & 0x7fffffffu) == 0u;
    let sink = sinks[head];
    let m = max(ml.x, sink);
    let weight = weight_of(ml.x - m);
    let divisor = select(ml.y * weight + weight_of(sink - m), 1.0f, empty);
    if (lane == 0u) {
        lse[row_head] = bitcast<u32>(select(m + ln(divisor), sink, empty));
    }
    for (var u = lane; u < 2u; u += 8u) {
        let x = select(state_a[row_head * 4u + u * 2u + 0u - params.a_skipped] * weight / divisor, vec4<f32>(), vec4<bool>(empty) | (state_a[row_head * 4u + u * 2u + 0u - params.a_skipped] == vec4<f32>()));
        let y = select(state_a[row_head * 4u + u * 2u + 1u - params.a_skipped] * weight / divisor, vec4<f32>(), vec4<bool>(empty) | (state_a[row_head * 4u + u * 2u + 1u - params.a_skipped] == vec4<f32>()));
        o[row_head * 2u + u - params.o_skipped] = vec4<u32>(rounded(x.x) | (rounded(x.y) << 16u), rounded(x.z) | (rounded(x.w) << 16u), rounded(y.x) | (rounded(y.y) << 16u), rounded(y.z) | (rounded(y.w) << 16u));
    }
}
