// Half of the workgroup waits at a barrier to which the other half never comes. naga says nothing.
var<workgroup> shared_sum: array<f32, 64>;
@group(0) @binding(0) var<storage, read_write> out: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(local_invocation_index) thread: u32) {
    shared_sum[thread] = f32(thread);
    if (thread < 32u) {
        workgroupBarrier();
        out[thread] = shared_sum[63u - thread];
    }
}
