{# The head of the entry point of kernels in which 8 threads share a (batch, row, head) triple. #}
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
