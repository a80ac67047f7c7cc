// 16 bytes more than WebGPU's default limit: well-formed, but no pipeline on a device with default limits.
var<workgroup> tile: array<vec4<f32>, 1025>;
@group(0) @binding(0) var<storage, read_write> out: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(local_invocation_index) thread: u32) {
    tile[thread] = vec4<f32>(f32(thread));
    workgroupBarrier();
    out[thread] = tile[63u - thread].x + tile[1024].x;
}
