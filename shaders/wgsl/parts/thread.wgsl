{# The head of the entry point of kernels whose threads work for themselves: `index` counts them
   over the dispatch. #}
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group_id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let index = (group_id.x + group_id.y * params.grid_width) * 64u + thread;
