// attend, subgroup broadcast, f16, head dim 16: subgroups of 4, 1 query rows in each lane
struct AttendParams {
    q_offset: u32,
    q_batch: u32,
    q_row: u32,
    q_head: u32,
    k_offset: u32,
    k_batch: u32,
    k_row: u32,
    k_head: u32,
    v_offset: u32,
    v_batch: u32,
    v_row: u32,
    v_head: u32,
    a_offset: u32,
    ml_offset: u32,
    rows: u32,
    heads: u32,
    key_begin: u32,
    key_end: u32,
    tile_first: u32,
    tile_count: u32,
    batch_first: u32,
    first_item: u32,
    items: u32,
    grid_width: u32,
    last_class: u32,
    starts_class: u32,
    runs_at: u32,
    keys_at: u32,
    spans_at: u32,
    q_scale: f32,
    cap: f32,
    pairs_offset: u32,
    pairs_batch: u32,
    pairs_row: u32,
    pairs_head: u32,
    pad: u32,
}
@group(0) @binding(0) var<uniform> params: AttendParams;
@group(0) @binding(1) var<storage, read> q: array<vec4<u32>>;
@group(0) @binding(2) var k: texture_storage_2d<rgba32uint, read>;
@group(0) @binding(3) var v: texture_storage_2d<rgba32uint, read>;
@group(0) @binding(4) var<storage, read_write> state_a: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read_write> state_ml: array<vec2<f32>>;
@group(0) @binding(6) var<storage, read> positions: array<u32>;
@group(0) @binding(7) var<storage, read> work: array<u32>;
@group(0) @binding(8) var<storage, read> pairs: array<u32>;

const EMPTY_M: f32 = -2.3819763e38f;

fn chunk_0(unit: vec4<u32>) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(unit.x), unpack2x16float(unit.y));
}
fn chunk_1(unit: vec4<u32>) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(unit.z), unpack2x16float(unit.w));
}

fn weight_of(below: f32) -> f32 {
    let power = exp2(max(below, -150.0f) * 1.442695f);
    return select(power, below, (bitcast<u32>(below) & 0x7fffffffu) > 0x7f800000u);
}

const HIDDEN: f32 = -3e38f;
// By bits, so that NaN is shown: SPIR-V from naga has `!=` false for NaN.
fn shows(term: f32) -> bool { return bitcast<u32>(term) != 0xff61b1e6u; }
fn pair_term(row: u32, position: u32) -> f32 {
    let word = pairs[(row + position) >> 1u];
    let bits = (word >> (((row + position) & 1u) * 16u)) & 0xffffu;
    let bias = unpack2x16float(bits).x;
    let hidden = bits == 0xfc00u;
    // `max` may drop a NaN, so NaN goes around; logits stay above that of a row that saw no key.
    let is_nan = (bitcast<u32>(bias) & 0x7fffffffu) > 0x7f800000u;
    let kept = select(max(bias, -1e38f), bias, is_nan);
    return select(kept, HIDDEN, hidden);
}

fn texel_0(texel: vec4<u32>) -> vec4<f32> { return chunk_0(texel); }
fn texel_1(texel: vec4<u32>) -> vec4<f32> { return chunk_1(texel); }

@compute @workgroup_size(4)
fn main(@builtin(workgroup_id) group_id: vec3<u32>, @builtin(subgroup_invocation_id) lane: u32) {
    let group = group_id.x + group_id.y * params.grid_width;
    if (group >= params.items) { return; }
    let item = params.first_item + group;
    let tile = params.tile_first + params.tile_count - 1u - item % params.tile_count;
    let batch_head = item / params.tile_count;
    let batch = params.batch_first + batch_head / params.heads;
    let head = batch_head % params.heads;
    let kv_head = positions[head];
    let class_index = min(batch, params.last_class);
    let starts = class_index * params.starts_class + 2u * tile;
    let full_runs = work[starts];
    let partial_runs = work[starts + 1u];
    let runs_end = work[starts + 2u];
    if (full_runs == runs_end) { return; }
    let spans = params.spans_at + 2u * class_index * params.rows;
    let unit0 = kv_head * 2u + min(lane + 0u, 1u);
    let k_y = (batch - params.batch_first) * params.k_batch - params.key_begin;
    let v_y = (batch - params.batch_first) * params.v_batch - params.key_begin;
    let row0 = tile * 4u + 0u + lane;
    let in0 = row0 < params.rows;
    let safe0 = min(row0, params.rows - 1u);
    let lo0 = positions[spans + 2u * safe0];
    let hi0 = positions[spans + 2u * safe0 + 1u];
    let q_at0 = params.q_offset + batch * params.q_batch + safe0 * params.q_row + head * params.q_head;
    let a_at0 = params.a_offset + ((batch * params.rows + safe0) * params.heads + head) * 4u;
    let ml_at0 = params.ml_offset + (batch * params.heads + head) * params.rows + safe0;
    var m0 = EMPTY_M;
    var l0 = 0.0f;
    var seen0 = false;
    let pair_row0 = params.pairs_offset + batch * params.pairs_batch + safe0 * params.pairs_row + head * params.pairs_head;
    let q_unit0_0 = q[q_at0 + 0u];
    let q0_0 = chunk_0(q_unit0_0) * params.q_scale;
    let q0_1 = chunk_1(q_unit0_0) * params.q_scale;
    let q_unit0_1 = q[q_at0 + 1u];
    let q0_2 = chunk_0(q_unit0_1) * params.q_scale;
    let q0_3 = chunk_1(q_unit0_1) * params.q_scale;
    var a0_0x = 0.0f;
    var a0_0y = 0.0f;
    var a0_0z = 0.0f;
    var a0_0w = 0.0f;
    var a0_1x = 0.0f;
    var a0_1y = 0.0f;
    var a0_1z = 0.0f;
    var a0_1w = 0.0f;
    var a0_2x = 0.0f;
    var a0_2y = 0.0f;
    var a0_2z = 0.0f;
    var a0_2w = 0.0f;
    var a0_3x = 0.0f;
    var a0_3y = 0.0f;
    var a0_3z = 0.0f;
    var a0_3w = 0.0f;
    for (var run = full_runs; run < runs_end; run++) {
        let first = max(work[params.runs_at + 2u * run], params.key_begin);
        let end = min(work[params.runs_at + 2u * run + 1u], params.key_end);
        for (var key = first; key < end; key += 1u) {
            let k0_unit0 = textureLoad(k, vec2<i32>(vec2<u32>(unit0, k_y + key + 0u)));
            let k0_own0_0 = texel_0(k0_unit0);
            let k0_own0_1 = texel_1(k0_unit0);
            let k0_0x = subgroupBroadcast(k0_own0_0.x, 0u);
            var s0_0_0 = q0_0.x * k0_0x;
            let k0_0y = subgroupBroadcast(k0_own0_0.y, 0u);
            var s0_0_1 = q0_0.y * k0_0y;
            let k0_0z = subgroupBroadcast(k0_own0_0.z, 0u);
            s0_0_0 = fma(q0_0.z, k0_0z, s0_0_0);
            let k0_0w = subgroupBroadcast(k0_own0_0.w, 0u);
            s0_0_1 = fma(q0_0.w, k0_0w, s0_0_1);
            let k0_1x = subgroupBroadcast(k0_own0_1.x, 0u);
            s0_0_0 = fma(q0_1.x, k0_1x, s0_0_0);
            let k0_1y = subgroupBroadcast(k0_own0_1.y, 0u);
            s0_0_1 = fma(q0_1.y, k0_1y, s0_0_1);
            let k0_1z = subgroupBroadcast(k0_own0_1.z, 0u);
            s0_0_0 = fma(q0_1.z, k0_1z, s0_0_0);
            let k0_1w = subgroupBroadcast(k0_own0_1.w, 0u);
            s0_0_1 = fma(q0_1.w, k0_1w, s0_0_1);
            let k0_2x = subgroupBroadcast(k0_own0_0.x, 1u);
            s0_0_0 = fma(q0_2.x, k0_2x, s0_0_0);
            let k0_2y = subgroupBroadcast(k0_own0_0.y, 1u);
            s0_0_1 = fma(q0_2.y, k0_2y, s0_0_1);
            let k0_2z = subgroupBroadcast(k0_own0_0.z, 1u);
            s0_0_0 = fma(q0_2.z, k0_2z, s0_0_0);
            let k0_2w = subgroupBroadcast(k0_own0_0.w, 1u);
            s0_0_1 = fma(q0_2.w, k0_2w, s0_0_1);
            let k0_3x = subgroupBroadcast(k0_own0_1.x, 1u);
            s0_0_0 = fma(q0_3.x, k0_3x, s0_0_0);
            let k0_3y = subgroupBroadcast(k0_own0_1.y, 1u);
            s0_0_1 = fma(q0_3.y, k0_3y, s0_0_1);
            let k0_3z = subgroupBroadcast(k0_own0_1.z, 1u);
            s0_0_0 = fma(q0_3.z, k0_3z, s0_0_0);
            let k0_3w = subgroupBroadcast(k0_own0_1.w, 1u);
            s0_0_1 = fma(q0_3.w, k0_3w, s0_0_1);
            let position = positions[params.keys_at + key];
            let dot0_0 = s0_0_0 + s0_0_1;
            let term0 = pair_term(pair_row0, position);
            let vis0 = lo0 <= position && position < hi0 && shows(term0);
            let x0_0 = select(EMPTY_M, dot0_0 + term0, vis0);
            seen0 = seen0 || vis0;
            let n0 = max(m0, x0_0);
            let corr0 = weight_of(m0 - n0);
            let p0_0 = select(0.0f, weight_of(x0_0 - n0), vis0);
            m0 = n0;
            l0 = fma(l0, corr0, p0_0);
            let v0_unit0 = textureLoad(v, vec2<i32>(vec2<u32>(unit0, v_y + key + 0u)));
            let v0_own0_0 = texel_0(v0_unit0);
            let v0_own0_1 = texel_1(v0_unit0);
            let v0_0x = subgroupBroadcast(v0_own0_0.x, 0u);
            a0_0x = fma(select(0.0f, v0_0x, vis0), p0_0, a0_0x * corr0);
            let v0_0y = subgroupBroadcast(v0_own0_0.y, 0u);
            a0_0y = fma(select(0.0f, v0_0y, vis0), p0_0, a0_0y * corr0);
            let v0_0z = subgroupBroadcast(v0_own0_0.z, 0u);
            a0_0z = fma(select(0.0f, v0_0z, vis0), p0_0, a0_0z * corr0);
            let v0_0w = subgroupBroadcast(v0_own0_0.w, 0u);
            a0_0w = fma(select(0.0f, v0_0w, vis0), p0_0, a0_0w * corr0);
            let v0_1x = subgroupBroadcast(v0_own0_1.x, 0u);
            a0_1x = fma(select(0.0f, v0_1x, vis0), p0_0, a0_1x * corr0);
            let v0_1y = subgroupBroadcast(v0_own0_1.y, 0u);
            a0_1y = fma(select(0.0f, v0_1y, vis0), p0_0, a0_1y * corr0);
            let v0_1z = subgroupBroadcast(v0_own0_1.z, 0u);
            a0_1z = fma(select(0.0f, v0_1z, vis0), p0_0, a0_1z * corr0);
            let v0_1w = subgroupBroadcast(v0_own0_1.w, 0u);
            a0_1w = fma(select(0.0f, v0_1w, vis0), p0_0, a0_1w * corr0);
            let v0_2x = subgroupBroadcast(v0_own0_0.x, 1u);
            a0_2x = fma(select(0.0f, v0_2x, vis0), p0_0, a0_2x * corr0);
            let v0_2y = subgroupBroadcast(v0_own0_0.y, 1u);
            a0_2y = fma(select(0.0f, v0_2y, vis0), p0_0, a0_2y * corr0);
            let v0_2z = subgroupBroadcast(v0_own0_0.z, 1u);
            a0_2z = fma(select(0.0f, v0_2z, vis0), p0_0, a0_2z * corr0);
            let v0_2w = subgroupBroadcast(v0_own0_0.w, 1u);
            a0_2w = fma(select(0.0f, v0_2w, vis0), p0_0, a0_2w * corr0);
            let v0_3x = subgroupBroadcast(v0_own0_1.x, 1u);
            a0_3x = fma(select(0.0f, v0_3x, vis0), p0_0, a0_3x * corr0);
            let v0_3y = subgroupBroadcast(v0_own0_1.y, 1u);
            a0_3y = fma(select(0.0f, v0_3y, vis0), p0_0, a0_3y * corr0);
            let v0_3z = subgroupBroadcast(v0_own0_1.z, 1u);
            a0_3z = fma(select(0.0f, v0_3z, vis0), p0_0, a0_3z * corr0);
            let v0_3w = subgroupBroadcast(v0_own0_1.w, 1u);
            a0_3w = fma(select(0.0f, v0_3w, vis0), p0_0, a0_3w * corr0);
        }
    }
    if (in0 && seen0) {
        let ml = state_ml[ml_at0];
        let top = max(ml.x, m0);
        let keep = weight_of(ml.x - top);
        let found = weight_of(m0 - top);
        state_a[a_at0 + 0u] = state_a[a_at0 + 0u] * keep + vec4<f32>(a0_0x, a0_0y, a0_0z, a0_0w) * found;
        state_a[a_at0 + 1u] = state_a[a_at0 + 1u] * keep + vec4<f32>(a0_1x, a0_1y, a0_1z, a0_1w) * found;
        state_a[a_at0 + 2u] = state_a[a_at0 + 2u] * keep + vec4<f32>(a0_2x, a0_2y, a0_2z, a0_2w) * found;
        state_a[a_at0 + 3u] = state_a[a_at0 + 3u] * keep + vec4<f32>(a0_3x, a0_3y, a0_3z, a0_3w) * found;
        state_ml[ml_at0] = vec2<f32>(top, ml.y * keep + l0 * found);
    }
}
