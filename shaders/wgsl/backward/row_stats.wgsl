// What backward kernels read of each row of a finished output: log-sum-exp, e^-rest, D = sum of
// d_o · o - d_lse, and the rest of the log-sum-exp; (-EMPTY_M, 1, 0, 0) where it is -inf. 8 threads
// share a row and head, and each takes every 8th unit of o and d_o. lse is two words: its bits and
// those of the rest.
{% include "parts/interface.wgsl" %}
const EMPTY_M: f32 = {{EMPTY_M}};

{% include "parts/weight.wgsl" %}
{% include "parts/unpack.wgsl" %}
var<workgroup> sums: array<f32, 64>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group_id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let row_head = params.first + (group_id.x + group_id.y * params.grid_width) * 8u + (thread >> 3u);
    let lane = thread & 7u;
    let safe = min(row_head, params.end - 1u);
    var sum = 0.0f;
    for (var u = lane; u < {{units}}u; u += 8u) {
        let a = o[safe * {{units}}u + u - params.o_skipped];
        let b = d_o[safe * {{units}}u + u - params.d_o_skipped];
{% for half in range(unit_chunks) %}
        sum += dot(chunk_{{half}}(a), chunk_{{half}}(b));
{% endfor %}
    }
    sums[thread] = sum;
    workgroupBarrier();
    if (lane != 0u || row_head >= params.end) { return; }
    let low = (sums[thread] + sums[thread + 1u]) + (sums[thread + 2u] + sums[thread + 3u]);
    let high = (sums[thread + 4u] + sums[thread + 5u]) + (sums[thread + 6u] + sums[thread + 7u]);
    let of_row = lse[row_head - params.lse_skipped];
    let rest = bitcast<f32>(of_row.y);
    let known = vec4<f32>(bitcast<f32>(of_row.x), weight_of(-rest), low + high{% if d_lse %} - d_lse[row_head - params.d_lse_skipped]{% endif %}, rest);
    // By bits: WGSL promises nothing about infinities.
    let unseen = vec4<f32>(-EMPTY_M, 1.0f, 0.0f, 0.0f);
    stats[row_head - params.stats_skipped] = select(known, unseen, of_row.x == 0xff800000u);
}
