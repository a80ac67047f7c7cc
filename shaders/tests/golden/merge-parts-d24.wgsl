// merge parts, head dim 24: 8 threads for each row and head
struct MergePartsParams {
    first: u32,
    end: u32,
    rows: u32,
    heads: u32,
    grid_width: u32,
    a_skipped: u32,
    ml_skipped: u32,
    batch_first: u32,
    group_heads: u32,
    splits: u32,
    slots: u32,
    pad: u32,
}
@group(0) @binding(0) var<uniform> params: MergePartsParams;
@group(0) @binding(1) var<storage, read_write> state_a: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> state_ml: array<vec2<f32>>;
@group(0) @binding(3) var<storage, read> part_a: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> part_ml: array<vec2<f32>>;

const EMPTY_M: f32 = -2.3819763e38f;

fn weight_of(below: f32) -> f32 {
    let power = exp2(max(below, -150.0f) * 1.442695f);
    return select(power, below, (bitcast<u32>(below) & 0x7fffffffu) > 0x7f800000u);
}
const UNSEEN: f32 = -1.0f;
// By bits, so that NaN counts as seen.
fn is_unseen(l: f32) -> bool { return bitcast<u32>(l) == 0xbf800000u; }

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
    let slot = row * params.group_heads + head % params.group_heads;
    let group_index = (batch - params.batch_first) * (params.heads / params.group_heads) + head / params.group_heads;
    let parts = group_index * params.splits * params.slots + slot;
    let a_at = safe * 6u - params.a_skipped;
    let state = state_ml[ml_at - params.ml_skipped];
    let before = state.x;
    var m = before;
    var seen = false;
    for (var i = 0u; i < params.splits; i++) {
        let part = part_ml[parts + i * params.slots];
        if (!is_unseen(part.y)) {
            m = max(m, part.x);
            seen = true;
        }
    }
    let corr = weight_of(before - m);
    var l = state.y * corr;
    var a0 = state_a[a_at + min(lane + 0u, 5u)] * corr;
    for (var i = 0u; i < params.splits; i++) {
        let at = parts + i * params.slots;
        let part = part_ml[at];
        if (!is_unseen(part.y)) {
            let weight = weight_of(part.x - m);
            l += part.y * weight;
            a0 += part_a[at * 6u + min(lane + 0u, 5u)] * weight;
        }
    }
    // All 8 threads of a row must have read ml before one of them overwrites it.
    storageBarrier();
    if (!inside || !seen) { return; }
    if (lane + 0u < 6u) { state_a[a_at + lane + 0u] = a0; }
    if (lane == 0u) {
        state_ml[ml_at - params.ml_skipped] = vec2<f32>(m, l);
    }
}
