// accumulate, units of 4 words: one thread for each unit
struct RepackParams {
    from_offset: u32,
    from_batch: u32,
    from_row: u32,
    from_head: u32,
    into_offset: u32,
    into_batch: u32,
    into_row: u32,
    into_head: u32,
    row_units: u32,
    heads: u32,
    rows: u32,
    units: u32,
    grid_width: u32,
    pad0: u32,
    pad1: u32,
    pad2: u32,
}
@group(0) @binding(0) var<uniform> params: RepackParams;
@group(0) @binding(1) var<storage, read> source: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> destination: array<vec4<f32>>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group_id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let index = (group_id.x + group_id.y * params.grid_width) * 64u + thread;
    if (index >= params.units) { return; }
    let unit = index % params.row_units;
    let row_head = index / params.row_units;
    let head = row_head % params.heads;
    let row = (row_head / params.heads) % params.rows;
    let batch = row_head / params.heads / params.rows;
    let from_at = params.from_offset + batch * params.from_batch + row * params.from_row + head * params.from_head;
    let into_at = params.into_offset + batch * params.into_batch + row * params.into_row + head * params.into_head;
    destination[into_at + unit] = destination[into_at + unit] + source[from_at + unit];
}
