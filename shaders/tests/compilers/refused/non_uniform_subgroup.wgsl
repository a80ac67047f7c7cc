enable subgroups;
// Lanes that left the branch cannot take part in the sum.
@group(0) @binding(0) var<storage, read_write> out: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(local_invocation_index) thread: u32) {
    if (thread % 2u == 0u) {
        out[thread] = subgroupAdd(f32(thread));
    }
}
