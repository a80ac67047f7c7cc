// The trip count comes from a buffer that the kernel may write, so it may differ between threads.
@group(0) @binding(0) var<storage, read_write> out: array<u32>;

@compute @workgroup_size(64)
fn main() {
    for (var i = 0u; i < out[0]; i++) {
        workgroupBarrier();
    }
}
