// An empty running state: m = EMPTY_M, l = 0; the API clears O to zero. One thread for each (batch,
// head, row).
{% include "parts/interface.wgsl" %}
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group_id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let at = (group_id.x + group_id.y * params.grid_width) * 64u + thread;
    if (at < params.row_heads) { state_ml[at] = vec2<f32>({{EMPTY_M}}, 0.0f); }
}
