// Gradients for drivers that compute on the host's cores, as attend/subgroup.wgsl attends: one
// subgroup of 4 lanes is one workgroup, and one SIMD register there. backward/portable.wgsl says what is
// computed, what is fixed and what moves, and what the bindings hold.
//
// Tile: 8 fixed rows, 2 in each lane; moving rows one by one.
//
// Each lane keeps its fixed rows and their sums in named registers. The subgroup loads a moving row
// together, and each element is broadcast from a constant lane. No workgroup memory, no barrier, no
// branch in the loop. The moving tensors and their statistics are textures of 16-byte texels: x =
// head · units of a head + unit, or of statistics the head; y = (batch entry - batch_first) ·
// moving_texels + row - moving_begin.
//
// A logit is added up in 2 sums as in the forward kernel. With logits of 100, another order of
// additions would change P by 1e-5. And a pair that one direction tests may be in a full run of the
// other, so the order may not depend on the kind of the run.
// backward-dkv-lanes-4-f32-d8-softcap
struct BackwardParams {
    q_offset: u32,
    q_batch: u32,
    q_row: u32,
    q_head: u32,
    d_o_offset: u32,
    d_o_batch: u32,
    d_o_row: u32,
    d_o_head: u32,
    stats_offset: u32,
    stats_batch: u32,
    stats_row: u32,
    stats_head: u32,
    k_offset: u32,
    k_batch: u32,
    k_row: u32,
    k_head: u32,
    v_offset: u32,
    v_batch: u32,
    v_row: u32,
    v_head: u32,
    sum_offset: u32,
    sum_batch: u32,
    sum_row: u32,
    sum_head: u32,
    bias_offset: u32,
    bias_batch: u32,
    bias_row: u32,
    bias_head: u32,
    rows: u32,
    heads: u32,
    fixed_end: u32,
    moving_begin: u32,
    moving_end: u32,
    tile_first: u32,
    tile_count: u32,
    batch_first: u32,
    first_item: u32,
    items: u32,
    grid_width: u32,
    last_class: u32,
    starts_at: u32,
    starts_class: u32,
    runs_at: u32,
    heads_at: u32,
    keys_at: u32,
    spans_at: u32,
    q_scale: f32,
    x_scale: f32,
    cap: f32,
    scale: f32,
    unscale: f32,
    moving_texels: u32,
    head_first: u32,
    pad0: u32,
    pad1: u32,
    pad2: u32,
}
@group(0) @binding(0) var<uniform> params: BackwardParams;
@group(0) @binding(1) var q: texture_storage_2d<rgba32uint, read>;
@group(0) @binding(2) var d_o: texture_storage_2d<rgba32uint, read>;
@group(0) @binding(3) var<storage, read> k: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> v: array<vec4<f32>>;
@group(0) @binding(5) var stats: texture_storage_2d<rgba32uint, read>;
@group(0) @binding(6) var<storage, read_write> dk: array<vec4<f32>>;
@group(0) @binding(7) var<storage, read_write> dv: array<vec4<f32>>;
@group(0) @binding(8) var<storage, read> lists: array<u32>;

// m of a row that saw no key: finite, because WGSL promises nothing about infinities.
const EMPTY_M: f32 = -2.3819763e38f;

fn chunk_0(unit: vec4<f32>) -> vec4<f32> { return unit; }

// e^below, the weight of a key whose logit is `below` the largest one of its row. Below -150 the
// power is 0 in f32, and the product with log2 e cannot overflow. NaN is handled by bits: WGSL
// promises nothing about the exp2 of a NaN, and `max` may drop it.
fn weight_of(below: f32) -> f32 {
    let power = exp2(max(below, -150.0f) * 1.442695f);
    return select(power, below, (bitcast<u32>(below) & 0x7fffffffu) > 0x7f800000u);
}

// cap · tanh(t), with a relative error of a few ulp. WGSL's own tanh promises only 1e-5 absolute,
// and overflows on some drivers. The polynomial is Cephes' tanhf. `min` may drop a NaN, so NaN is
// handled separately.
fn capped(t: f32) -> f32 {
    let size = min(abs(t), 16.0f);
    let large = 1.0f - 2.0f / (exp2(size * 2.8853900f) + 1.0f);
    let z = size * size;
    let tail = (((-5.7049887e-3f * z + 2.0639088e-2f) * z - 5.3739715e-2f) * z + 1.3331442e-1f) * z - 3.3333282e-1f;
    let value = params.cap * select(large, size + size * z * tail, size < 0.625f);
    let result = select(value, -value, t < 0.0f);
    return select(result, t, (bitcast<u32>(t) & 0x7fffffffu) > 0x7f800000u);
}

// Of a row that saw no key, row_stats.wgsl makes the log-sum-exp -EMPTY_M. By bits, so that a row of
// NaN counts: SPIR-V from naga has `!=` false for NaN.
fn saw_keys(lse: f32) -> bool { return bitcast<u32>(lse) != 0x7f333332u; }
// P of a logit. Rounded, a logit may be above the log-sum-exp.
fn share_of(logit: f32, lse: f32, factor: f32) -> f32 {
    let below = logit - lse;
    return weight_of(select(below, 0.0f, below > 0.0f)) * factor;
}
// 1 - tanh^2(t), from the exponential: near 1 the difference would have lost most of its digits.
fn slope_of(t: f32) -> f32 {
    let u = exp2(min(abs(t), 80.0f) * -2.8853900f);
    let below = 1.0f + u;
    return 4.0f * u / (below * below);
}

fn texel_0(texel: vec4<u32>) -> vec4<f32> { return bitcast<vec4<f32>>(texel); }

@compute @workgroup_size(4)
fn main(@builtin(workgroup_id) group_id: vec3<u32>, @builtin(subgroup_invocation_id) lane: u32) {
    let group = group_id.x + group_id.y * params.grid_width;
    if (group >= params.items) { return; }
    let item = params.first_item + group;
    let tile = params.tile_first + item % params.tile_count;
    let batch_head = item / params.tile_count;
    let batch = params.batch_first + batch_head / params.heads;
    let own_head = params.head_first + batch_head % params.heads;
    let class_index = min(batch, params.last_class);
    let starts = params.starts_at + class_index * params.starts_class + 2u * (tile / 4u);
    let full_runs = lists[starts];
    let tested_runs = lists[starts + 1u];
    let runs_end = lists[starts + 2u];
    if (full_runs == runs_end) { return; }
    let spans = params.spans_at + 2u * class_index * params.rows;
    let moving_y = (batch - params.batch_first) * params.moving_texels - params.moving_begin;
    let row0 = tile * 8u + 0u + lane;
    let in0 = row0 < params.fixed_end;
    let safe0 = min(row0, params.fixed_end - 1u);
    let sum_at0 = params.sum_offset + batch * params.sum_batch
        + safe0 * params.sum_row + own_head * params.sum_head;
    let pos0 = lists[params.keys_at + safe0];
    let k_at0 = params.k_offset + batch * params.k_batch
        + safe0 * params.k_row + own_head * params.k_head;
    let k_unit0_0 = k[k_at0 + 0u];
    let k0_0 = chunk_0(k_unit0_0);
    let k_unit0_1 = k[k_at0 + 1u];
    let k0_1 = chunk_0(k_unit0_1);
    let v_at0 = params.v_offset + batch * params.v_batch
        + safe0 * params.v_row + own_head * params.v_head;
    let v_unit0_0 = v[v_at0 + 0u];
    let v0_0 = chunk_0(v_unit0_0);
    let v_unit0_1 = v[v_at0 + 1u];
    let v0_1 = chunk_0(v_unit0_1);
    var dk0_0x = 0.0f;
    var dk0_0y = 0.0f;
    var dk0_0z = 0.0f;
    var dk0_0w = 0.0f;
    var dk0_1x = 0.0f;
    var dk0_1y = 0.0f;
    var dk0_1z = 0.0f;
    var dk0_1w = 0.0f;
    var dv0_0x = 0.0f;
    var dv0_0y = 0.0f;
    var dv0_0z = 0.0f;
    var dv0_0w = 0.0f;
    var dv0_1x = 0.0f;
    var dv0_1y = 0.0f;
    var dv0_1z = 0.0f;
    var dv0_1w = 0.0f;
    let row1 = tile * 8u + 4u + lane;
    let in1 = row1 < params.fixed_end;
    let safe1 = min(row1, params.fixed_end - 1u);
    let sum_at1 = params.sum_offset + batch * params.sum_batch
        + safe1 * params.sum_row + own_head * params.sum_head;
    let pos1 = lists[params.keys_at + safe1];
    let k_at1 = params.k_offset + batch * params.k_batch
        + safe1 * params.k_row + own_head * params.k_head;
    let k_unit1_0 = k[k_at1 + 0u];
    let k1_0 = chunk_0(k_unit1_0);
    let k_unit1_1 = k[k_at1 + 1u];
    let k1_1 = chunk_0(k_unit1_1);
    let v_at1 = params.v_offset + batch * params.v_batch
        + safe1 * params.v_row + own_head * params.v_head;
    let v_unit1_0 = v[v_at1 + 0u];
    let v1_0 = chunk_0(v_unit1_0);
    let v_unit1_1 = v[v_at1 + 1u];
    let v1_1 = chunk_0(v_unit1_1);
    var dk1_0x = 0.0f;
    var dk1_0y = 0.0f;
    var dk1_0z = 0.0f;
    var dk1_0w = 0.0f;
    var dk1_1x = 0.0f;
    var dk1_1y = 0.0f;
    var dk1_1z = 0.0f;
    var dk1_1w = 0.0f;
    var dv1_0x = 0.0f;
    var dv1_0y = 0.0f;
    var dv1_0z = 0.0f;
    var dv1_0w = 0.0f;
    var dv1_1x = 0.0f;
    var dv1_1y = 0.0f;
    var dv1_1z = 0.0f;
    var dv1_1w = 0.0f;
    for (var head = lists[params.heads_at + own_head]; head < lists[params.heads_at + own_head + 1u]; head++) {
    // Lanes beyond the head load its last unit again; no other lane reads it from them.
    let unit0 = head * 2u + min(lane + 0u, 1u);
    for (var run = full_runs; run < tested_runs; run++) {
        let first = max(lists[params.runs_at + 2u * run], params.moving_begin);
        let end = min(lists[params.runs_at + 2u * run + 1u], params.moving_end);
        for (var at = first; at < end; at++) {
            let stats_at = bitcast<vec4<f32>>(textureLoad(stats, vec2<i32>(vec2<u32>(head, moving_y + at))));
            let live = saw_keys(stats_at.x);
            let q_texel0 = textureLoad(q, vec2<i32>(vec2<u32>(unit0, moving_y + at)));
            let q_own0_0 = select(vec4<f32>(), texel_0(q_texel0) * params.q_scale, live);
            let d_o_texel0 = textureLoad(d_o, vec2<i32>(vec2<u32>(unit0, moving_y + at)));
            let d_o_own0_0 = select(vec4<f32>(), texel_0(d_o_texel0), live);
            let q_0x = subgroupBroadcast(q_own0_0.x, 0u);
            var S0_chain0 = k0_0.x * q_0x;
            var S1_chain0 = k1_0.x * q_0x;
            let q_0y = subgroupBroadcast(q_own0_0.y, 0u);
            var S0_chain1 = k0_0.y * q_0y;
            var S1_chain1 = k1_0.y * q_0y;
            let q_0z = subgroupBroadcast(q_own0_0.z, 0u);
            S0_chain0 = fma(k0_0.z, q_0z, S0_chain0);
            S1_chain0 = fma(k1_0.z, q_0z, S1_chain0);
            let q_0w = subgroupBroadcast(q_own0_0.w, 0u);
            S0_chain1 = fma(k0_0.w, q_0w, S0_chain1);
            S1_chain1 = fma(k1_0.w, q_0w, S1_chain1);
            let q_1x = subgroupBroadcast(q_own0_0.x, 1u);
            S0_chain0 = fma(k0_1.x, q_1x, S0_chain0);
            S1_chain0 = fma(k1_1.x, q_1x, S1_chain0);
            let q_1y = subgroupBroadcast(q_own0_0.y, 1u);
            S0_chain1 = fma(k0_1.y, q_1y, S0_chain1);
            S1_chain1 = fma(k1_1.y, q_1y, S1_chain1);
            let q_1z = subgroupBroadcast(q_own0_0.z, 1u);
            S0_chain0 = fma(k0_1.z, q_1z, S0_chain0);
            S1_chain0 = fma(k1_1.z, q_1z, S1_chain0);
            let q_1w = subgroupBroadcast(q_own0_0.w, 1u);
            S0_chain1 = fma(k0_1.w, q_1w, S0_chain1);
            S1_chain1 = fma(k1_1.w, q_1w, S1_chain1);
            let S0 = (S0_chain0 + S0_chain1) * params.x_scale;
            let S1 = (S1_chain0 + S1_chain1) * params.x_scale;
            let d_o_0x = subgroupBroadcast(d_o_own0_0.x, 0u);
            var dP0_chain0 = v0_0.x * d_o_0x;
            var dP1_chain0 = v1_0.x * d_o_0x;
            let d_o_0y = subgroupBroadcast(d_o_own0_0.y, 0u);
            var dP0_chain1 = v0_0.y * d_o_0y;
            var dP1_chain1 = v1_0.y * d_o_0y;
            let d_o_0z = subgroupBroadcast(d_o_own0_0.z, 0u);
            dP0_chain0 = fma(v0_0.z, d_o_0z, dP0_chain0);
            dP1_chain0 = fma(v1_0.z, d_o_0z, dP1_chain0);
            let d_o_0w = subgroupBroadcast(d_o_own0_0.w, 0u);
            dP0_chain1 = fma(v0_0.w, d_o_0w, dP0_chain1);
            dP1_chain1 = fma(v1_0.w, d_o_0w, dP1_chain1);
            let d_o_1x = subgroupBroadcast(d_o_own0_0.x, 1u);
            dP0_chain0 = fma(v0_1.x, d_o_1x, dP0_chain0);
            dP1_chain0 = fma(v1_1.x, d_o_1x, dP1_chain0);
            let d_o_1y = subgroupBroadcast(d_o_own0_0.y, 1u);
            dP0_chain1 = fma(v0_1.y, d_o_1y, dP0_chain1);
            dP1_chain1 = fma(v1_1.y, d_o_1y, dP1_chain1);
            let d_o_1z = subgroupBroadcast(d_o_own0_0.z, 1u);
            dP0_chain0 = fma(v0_1.z, d_o_1z, dP0_chain0);
            dP1_chain0 = fma(v1_1.z, d_o_1z, dP1_chain0);
            let d_o_1w = subgroupBroadcast(d_o_own0_0.w, 1u);
            dP0_chain1 = fma(v0_1.w, d_o_1w, dP0_chain1);
            dP1_chain1 = fma(v1_1.w, d_o_1w, dP1_chain1);
            let dP0 = (dP0_chain0 + dP0_chain1);
            let dP1 = (dP1_chain0 + dP1_chain1);

            // P and dS.
            let P0 = share_of(capped(S0), stats_at.x, stats_at.y);
            let dS0 = P0 * (dP0 - stats_at.z) * slope_of(S0);
            let P1 = share_of(capped(S1), stats_at.x, stats_at.y);
            let dS1 = P1 * (dP1 - stats_at.z) * slope_of(S1);
            dk0_0x = fma(q_0x, dS0, dk0_0x);
            dk1_0x = fma(q_0x, dS1, dk1_0x);
            dk0_0y = fma(q_0y, dS0, dk0_0y);
            dk1_0y = fma(q_0y, dS1, dk1_0y);
            dk0_0z = fma(q_0z, dS0, dk0_0z);
            dk1_0z = fma(q_0z, dS1, dk1_0z);
            dk0_0w = fma(q_0w, dS0, dk0_0w);
            dk1_0w = fma(q_0w, dS1, dk1_0w);
            dk0_1x = fma(q_1x, dS0, dk0_1x);
            dk1_1x = fma(q_1x, dS1, dk1_1x);
            dk0_1y = fma(q_1y, dS0, dk0_1y);
            dk1_1y = fma(q_1y, dS1, dk1_1y);
            dk0_1z = fma(q_1z, dS0, dk0_1z);
            dk1_1z = fma(q_1z, dS1, dk1_1z);
            dk0_1w = fma(q_1w, dS0, dk0_1w);
            dk1_1w = fma(q_1w, dS1, dk1_1w);
            dv0_0x = fma(d_o_0x, P0, dv0_0x);
            dv1_0x = fma(d_o_0x, P1, dv1_0x);
            dv0_0y = fma(d_o_0y, P0, dv0_0y);
            dv1_0y = fma(d_o_0y, P1, dv1_0y);
            dv0_0z = fma(d_o_0z, P0, dv0_0z);
            dv1_0z = fma(d_o_0z, P1, dv1_0z);
            dv0_0w = fma(d_o_0w, P0, dv0_0w);
            dv1_0w = fma(d_o_0w, P1, dv1_0w);
            dv0_1x = fma(d_o_1x, P0, dv0_1x);
            dv1_1x = fma(d_o_1x, P1, dv1_1x);
            dv0_1y = fma(d_o_1y, P0, dv0_1y);
            dv1_1y = fma(d_o_1y, P1, dv1_1y);
            dv0_1z = fma(d_o_1z, P0, dv0_1z);
            dv1_1z = fma(d_o_1z, P1, dv1_1z);
            dv0_1w = fma(d_o_1w, P0, dv0_1w);
            dv1_1w = fma(d_o_1w, P1, dv1_1w);

        }

    }
    for (var run = tested_runs; run < runs_end; run++) {
        let first = max(lists[params.runs_at + 2u * run], params.moving_begin);
        let end = min(lists[params.runs_at + 2u * run + 1u], params.moving_end);
        for (var at = first; at < end; at++) {
            let stats_at = bitcast<vec4<f32>>(textureLoad(stats, vec2<i32>(vec2<u32>(head, moving_y + at))));
            let live = saw_keys(stats_at.x);
            let q_texel0 = textureLoad(q, vec2<i32>(vec2<u32>(unit0, moving_y + at)));
            let q_own0_0 = select(vec4<f32>(), texel_0(q_texel0) * params.q_scale, live);
            let d_o_texel0 = textureLoad(d_o, vec2<i32>(vec2<u32>(unit0, moving_y + at)));
            let d_o_own0_0 = select(vec4<f32>(), texel_0(d_o_texel0), live);
            let q_0x = subgroupBroadcast(q_own0_0.x, 0u);
            var S0_chain0 = k0_0.x * q_0x;
            var S1_chain0 = k1_0.x * q_0x;
            let q_0y = subgroupBroadcast(q_own0_0.y, 0u);
            var S0_chain1 = k0_0.y * q_0y;
            var S1_chain1 = k1_0.y * q_0y;
            let q_0z = subgroupBroadcast(q_own0_0.z, 0u);
            S0_chain0 = fma(k0_0.z, q_0z, S0_chain0);
            S1_chain0 = fma(k1_0.z, q_0z, S1_chain0);
            let q_0w = subgroupBroadcast(q_own0_0.w, 0u);
            S0_chain1 = fma(k0_0.w, q_0w, S0_chain1);
            S1_chain1 = fma(k1_0.w, q_0w, S1_chain1);
            let q_1x = subgroupBroadcast(q_own0_0.x, 1u);
            S0_chain0 = fma(k0_1.x, q_1x, S0_chain0);
            S1_chain0 = fma(k1_1.x, q_1x, S1_chain0);
            let q_1y = subgroupBroadcast(q_own0_0.y, 1u);
            S0_chain1 = fma(k0_1.y, q_1y, S0_chain1);
            S1_chain1 = fma(k1_1.y, q_1y, S1_chain1);
            let q_1z = subgroupBroadcast(q_own0_0.z, 1u);
            S0_chain0 = fma(k0_1.z, q_1z, S0_chain0);
            S1_chain0 = fma(k1_1.z, q_1z, S1_chain0);
            let q_1w = subgroupBroadcast(q_own0_0.w, 1u);
            S0_chain1 = fma(k0_1.w, q_1w, S0_chain1);
            S1_chain1 = fma(k1_1.w, q_1w, S1_chain1);
            let S0 = (S0_chain0 + S0_chain1) * params.x_scale;
            let S1 = (S1_chain0 + S1_chain1) * params.x_scale;
            let d_o_0x = subgroupBroadcast(d_o_own0_0.x, 0u);
            var dP0_chain0 = v0_0.x * d_o_0x;
            var dP1_chain0 = v1_0.x * d_o_0x;
            let d_o_0y = subgroupBroadcast(d_o_own0_0.y, 0u);
            var dP0_chain1 = v0_0.y * d_o_0y;
            var dP1_chain1 = v1_0.y * d_o_0y;
            let d_o_0z = subgroupBroadcast(d_o_own0_0.z, 0u);
            dP0_chain0 = fma(v0_0.z, d_o_0z, dP0_chain0);
            dP1_chain0 = fma(v1_0.z, d_o_0z, dP1_chain0);
            let d_o_0w = subgroupBroadcast(d_o_own0_0.w, 0u);
            dP0_chain1 = fma(v0_0.w, d_o_0w, dP0_chain1);
            dP1_chain1 = fma(v1_0.w, d_o_0w, dP1_chain1);
            let d_o_1x = subgroupBroadcast(d_o_own0_0.x, 1u);
            dP0_chain0 = fma(v0_1.x, d_o_1x, dP0_chain0);
            dP1_chain0 = fma(v1_1.x, d_o_1x, dP1_chain0);
            let d_o_1y = subgroupBroadcast(d_o_own0_0.y, 1u);
            dP0_chain1 = fma(v0_1.y, d_o_1y, dP0_chain1);
            dP1_chain1 = fma(v1_1.y, d_o_1y, dP1_chain1);
            let d_o_1z = subgroupBroadcast(d_o_own0_0.z, 1u);
            dP0_chain0 = fma(v0_1.z, d_o_1z, dP0_chain0);
            dP1_chain0 = fma(v1_1.z, d_o_1z, dP1_chain0);
            let d_o_1w = subgroupBroadcast(d_o_own0_0.w, 1u);
            dP0_chain1 = fma(v0_1.w, d_o_1w, dP0_chain1);
            dP1_chain1 = fma(v1_1.w, d_o_1w, dP1_chain1);
            let dP0 = (dP0_chain0 + dP0_chain1);
            let dP1 = (dP1_chain0 + dP1_chain1);

            // Which of the lane's pairs are visible; with a bias, also the terms of their logits.
            let lo = lists[spans + 2u * at];
            let hi = lists[spans + 2u * at + 1u];
            let vis0 = lo <= pos0 && pos0 < hi;
            let vis1 = lo <= pos1 && pos1 < hi;
            // P and dS.
            let P0 = select(0.0f, share_of(capped(S0), stats_at.x, stats_at.y), vis0);
            let dS0 = select(0.0f, P0 * (dP0 - stats_at.z) * slope_of(S0), vis0);
            let P1 = select(0.0f, share_of(capped(S1), stats_at.x, stats_at.y), vis1);
            let dS1 = select(0.0f, P1 * (dP1 - stats_at.z) * slope_of(S1), vis1);
            dk0_0x = fma(select(0.0f, q_0x, vis0), dS0, dk0_0x);
            dk1_0x = fma(select(0.0f, q_0x, vis1), dS1, dk1_0x);
            dk0_0y = fma(select(0.0f, q_0y, vis0), dS0, dk0_0y);
            dk1_0y = fma(select(0.0f, q_0y, vis1), dS1, dk1_0y);
            dk0_0z = fma(select(0.0f, q_0z, vis0), dS0, dk0_0z);
            dk1_0z = fma(select(0.0f, q_0z, vis1), dS1, dk1_0z);
            dk0_0w = fma(select(0.0f, q_0w, vis0), dS0, dk0_0w);
            dk1_0w = fma(select(0.0f, q_0w, vis1), dS1, dk1_0w);
            dk0_1x = fma(select(0.0f, q_1x, vis0), dS0, dk0_1x);
            dk1_1x = fma(select(0.0f, q_1x, vis1), dS1, dk1_1x);
            dk0_1y = fma(select(0.0f, q_1y, vis0), dS0, dk0_1y);
            dk1_1y = fma(select(0.0f, q_1y, vis1), dS1, dk1_1y);
            dk0_1z = fma(select(0.0f, q_1z, vis0), dS0, dk0_1z);
            dk1_1z = fma(select(0.0f, q_1z, vis1), dS1, dk1_1z);
            dk0_1w = fma(select(0.0f, q_1w, vis0), dS0, dk0_1w);
            dk1_1w = fma(select(0.0f, q_1w, vis1), dS1, dk1_1w);
            dv0_0x = fma(select(0.0f, d_o_0x, vis0), P0, dv0_0x);
            dv1_0x = fma(select(0.0f, d_o_0x, vis1), P1, dv1_0x);
            dv0_0y = fma(select(0.0f, d_o_0y, vis0), P0, dv0_0y);
            dv1_0y = fma(select(0.0f, d_o_0y, vis1), P1, dv1_0y);
            dv0_0z = fma(select(0.0f, d_o_0z, vis0), P0, dv0_0z);
            dv1_0z = fma(select(0.0f, d_o_0z, vis1), P1, dv1_0z);
            dv0_0w = fma(select(0.0f, d_o_0w, vis0), P0, dv0_0w);
            dv1_0w = fma(select(0.0f, d_o_0w, vis1), P1, dv1_0w);
            dv0_1x = fma(select(0.0f, d_o_1x, vis0), P0, dv0_1x);
            dv1_1x = fma(select(0.0f, d_o_1x, vis1), P1, dv1_1x);
            dv0_1y = fma(select(0.0f, d_o_1y, vis0), P0, dv0_1y);
            dv1_1y = fma(select(0.0f, d_o_1y, vis1), P1, dv1_1y);
            dv0_1z = fma(select(0.0f, d_o_1z, vis0), P0, dv0_1z);
            dv1_1z = fma(select(0.0f, d_o_1z, vis1), P1, dv1_1z);
            dv0_1w = fma(select(0.0f, d_o_1w, vis0), P0, dv0_1w);
            dv1_1w = fma(select(0.0f, d_o_1w, vis1), P1, dv1_1w);

        }

    }

    }
    // The sums are added to those in memory. Of dK, the factor on q is in the sum.
    if (in0) {
        dk[sum_at0 + 0u] = dk[sum_at0 + 0u]
            + vec4<f32>(dk0_0x, dk0_0y, dk0_0z, dk0_0w) * params.unscale;
        dk[sum_at0 + 1u] = dk[sum_at0 + 1u]
            + vec4<f32>(dk0_1x, dk0_1y, dk0_1z, dk0_1w) * params.unscale;
        dv[sum_at0 + 0u] = dv[sum_at0 + 0u]
            + vec4<f32>(dv0_0x, dv0_0y, dv0_0z, dv0_0w);
        dv[sum_at0 + 1u] = dv[sum_at0 + 1u]
            + vec4<f32>(dv0_1x, dv0_1y, dv0_1z, dv0_1w);
    }
    if (in1) {
        dk[sum_at1 + 0u] = dk[sum_at1 + 0u]
            + vec4<f32>(dk1_0x, dk1_0y, dk1_0z, dk1_0w) * params.unscale;
        dk[sum_at1 + 1u] = dk[sum_at1 + 1u]
            + vec4<f32>(dk1_1x, dk1_1y, dk1_1z, dk1_1w) * params.unscale;
        dv[sum_at1 + 0u] = dv[sum_at1 + 0u]
            + vec4<f32>(dv1_0x, dv1_0y, dv1_0z, dv1_0w);
        dv[sum_at1 + 1u] = dv[sum_at1 + 1u]
            + vec4<f32>(dv1_1x, dv1_1y, dv1_1z, dv1_1w);
    }
}
