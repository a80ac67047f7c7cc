// row_stats, bf16, head dim 16: 8 threads for each row and head
struct RowStatsParams {
    first: u32,
    end: u32,
    grid_width: u32,
    o_skipped: u32,
    d_o_skipped: u32,
    lse_skipped: u32,
    d_lse_skipped: u32,
    stats_skipped: u32,
}
@group(0) @binding(0) var<uniform> params: RowStatsParams;
@group(0) @binding(1) var<storage, read> o: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> d_o: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> lse: array<u32>;
@group(0) @binding(4) var<storage, read_write> stats: array<vec2<f32>>;
@group(0) @binding(5) var<storage, read> d_lse: array<f32>;

const EMPTY_M: f32 = -2.3819763e38f;
fn pair(word: u32) -> vec2<f32> {
    return vec2<f32>(bitcast<f32>(word << 16u), bitcast<f32>(word & 0xffff0000u));
}
fn chunk_0(unit: vec4<u32>) -> vec4<f32> { return vec4<f32>(pair(unit.x), pair(unit.y)); }
fn chunk_1(unit: vec4<u32>) -> vec4<f32> { return vec4<f32>(pair(unit.z), pair(unit.w)); }

var<workgroup> sums: array<f32, 64>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group_id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let row_head = params.first + (group_id.x + group_id.y * params.grid_width) * 8u + (thread >> 3u);
    let lane = thread & 7u;
    let safe = min(row_head, params.end - 1u);
    var sum = 0.0f;
    for (var u = lane; u < 2u; u += 8u) {
        let a = o[safe * 2u + u - params.o_skipped];
        let b = d_o[safe * 2u + u - params.d_o_skipped];
        sum += dot(chunk_0(a), chunk_0(b));
        sum += dot(chunk_1(a), chunk_1(b));
    }
    sums[thread] = sum;
    workgroupBarrier();
    if (lane != 0u || row_head >= params.end) { return; }
    let low = (sums[thread] + sums[thread + 1u]) + (sums[thread + 2u] + sums[thread + 3u]);
    let high = (sums[thread + 4u] + sums[thread + 5u]) + (sums[thread + 6u] + sums[thread + 7u]);
    let bits = lse[row_head - params.lse_skipped];
    let known = vec2<f32>(bitcast<f32>(bits), low + high - d_lse[row_head - params.d_lse_skipped]);
    stats[row_head - params.stats_skipped] = select(known, vec2<f32>(-EMPTY_M, 0.0f), bits == 0xff800000u);
}
