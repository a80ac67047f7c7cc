// backward, lanes, dbias, bf16, head dim 16: subgroups of 4, 3 rows in each lane
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
    pairs_offset: u32,
    pairs_batch: u32,
    pairs_row: u32,
    pairs_head: u32,
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
    cap: f32,
    scale: f32,
    unscale: f32,
    moving_texels: u32,
    head_first: u32,
}
@group(0) @binding(0) var<uniform> params: BackwardParams;
@group(0) @binding(1) var<storage, read> q: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> d_o: array<vec4<u32>>;
@group(0) @binding(3) var k: texture_storage_2d<rgba32uint, read>;
@group(0) @binding(4) var v: texture_storage_2d<rgba32uint, read>;
@group(0) @binding(5) var<storage, read> stats: array<vec2<f32>>;
@group(0) @binding(6) var<storage, read_write> d_bias: array<f32>;
@group(0) @binding(7) var<storage, read> lists: array<u32>;
@group(0) @binding(8) var<storage, read> pairs: array<u32>;

const EMPTY_M: f32 = -2.3819763e38f;

fn pair(word: u32) -> vec2<f32> {
    return vec2<f32>(bitcast<f32>(word << 16u), bitcast<f32>(word & 0xffff0000u));
}
fn chunk_0(unit: vec4<u32>) -> vec4<f32> { return vec4<f32>(pair(unit.x), pair(unit.y)); }
fn chunk_1(unit: vec4<u32>) -> vec4<f32> { return vec4<f32>(pair(unit.z), pair(unit.w)); }

fn weight_of(below: f32) -> f32 {
    let power = exp2(max(below, -150.0f) * 1.442695f);
    return select(power, below, (bitcast<u32>(below) & 0x7fffffffu) > 0x7f800000u);
}

fn capped(t: f32) -> f32 {
    let size = min(abs(t), 16.0f);
    let large = 1.0f - 2.0f / (exp2(size * 2.8853900f) + 1.0f);
    let z = size * size;
    let tail = (((-5.7049887e-3f * z + 2.0639088e-2f) * z - 5.3739715e-2f) * z + 1.3331442e-1f) * z - 3.3333282e-1f;
    let value = params.cap * select(large, size + size * z * tail, size < 0.625f);
    let result = select(value, -value, t < 0.0f);
    return select(result, t, (bitcast<u32>(t) & 0x7fffffffu) > 0x7f800000u);
}

const HIDDEN: f32 = -3e38f;
// By bits, so that NaN is shown: SPIR-V from naga has `!=` false for NaN.
fn shows(term: f32) -> bool { return bitcast<u32>(term) != 0xff61b1e6u; }
fn pair_term(row: u32, position: u32) -> f32 {
    let word = pairs[(row + position) >> 1u];
    let bits = (word >> (((row + position) & 1u) * 16u)) << 16u;
    let bias = bitcast<f32>(bits);
    let hidden = bits == 0xff800000u;
    // `max` may drop a NaN, so NaN goes around; logits stay above that of a row that saw no key.
    let is_nan = (bitcast<u32>(bias) & 0x7fffffffu) > 0x7f800000u;
    let kept = select(max(bias, -1e38f), bias, is_nan);
    return select(kept, HIDDEN, hidden);
}

// By bits, so that a row of NaN counts: SPIR-V from naga has `!=` false for NaN.
fn saw_keys(lse: f32) -> bool { return bitcast<u32>(lse) != 0x7f333332u; }
// P. Rounded, a logit may be above the log-sum-exp.
fn share_of(logit: f32, lse: f32) -> f32 {
    let below = logit - lse;
    return weight_of(select(below, 0.0f, below > 0.0f));
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
    let own_head = params.head_first + batch_head % params.heads;
    let class_index = min(batch, params.last_class);
    let starts = params.starts_at + class_index * params.starts_class + 2u * (tile / 1u);
    let full_runs = lists[starts];
    let tested_runs = lists[starts + 1u];
    let runs_end = lists[starts + 2u];
    if (full_runs == runs_end) { return; }
    let spans = params.spans_at + 2u * class_index * params.rows;
    let head = own_head;
    let kv_head = lists[params.heads_at + own_head];
    let moving_y = (batch - params.batch_first) * params.moving_texels - params.moving_begin;
    let row0 = tile * 12u + 0u + lane;
    let in0 = row0 < params.fixed_end;
    let safe0 = min(row0, params.fixed_end - 1u);
    let sum_at0 = params.sum_offset + batch * params.sum_batch + safe0 * params.sum_row + own_head * params.sum_head;
    let lo0 = lists[spans + 2u * safe0];
    let hi0 = lists[spans + 2u * safe0 + 1u];
    let stats0 = stats[params.stats_offset + batch * params.stats_batch + safe0 * params.stats_row + own_head * params.stats_head];
    let delta0 = stats0.y;
    let pair_row0 = params.pairs_offset + batch * params.pairs_batch + safe0 * params.pairs_row + own_head * params.pairs_head;
    let q_at0 = params.q_offset + batch * params.q_batch + safe0 * params.q_row + own_head * params.q_head;
    let q_unit0_0 = q[q_at0 + 0u];
    let q0_0 = chunk_0(q_unit0_0) * params.q_scale;
    let q0_1 = chunk_1(q_unit0_0) * params.q_scale;
    let q_unit0_1 = q[q_at0 + 1u];
    let q0_2 = chunk_0(q_unit0_1) * params.q_scale;
    let q0_3 = chunk_1(q_unit0_1) * params.q_scale;
    let d_o_at0 = params.d_o_offset + batch * params.d_o_batch + safe0 * params.d_o_row + own_head * params.d_o_head;
    let d_o_unit0_0 = d_o[d_o_at0 + 0u];
    let d_o0_0 = chunk_0(d_o_unit0_0);
    let d_o0_1 = chunk_1(d_o_unit0_0);
    let d_o_unit0_1 = d_o[d_o_at0 + 1u];
    let d_o0_2 = chunk_0(d_o_unit0_1);
    let d_o0_3 = chunk_1(d_o_unit0_1);
    let adds0 = in0 && saw_keys(stats0.x);
    let row1 = tile * 12u + 4u + lane;
    let in1 = row1 < params.fixed_end;
    let safe1 = min(row1, params.fixed_end - 1u);
    let sum_at1 = params.sum_offset + batch * params.sum_batch + safe1 * params.sum_row + own_head * params.sum_head;
    let lo1 = lists[spans + 2u * safe1];
    let hi1 = lists[spans + 2u * safe1 + 1u];
    let stats1 = stats[params.stats_offset + batch * params.stats_batch + safe1 * params.stats_row + own_head * params.stats_head];
    let delta1 = stats1.y;
    let pair_row1 = params.pairs_offset + batch * params.pairs_batch + safe1 * params.pairs_row + own_head * params.pairs_head;
    let q_at1 = params.q_offset + batch * params.q_batch + safe1 * params.q_row + own_head * params.q_head;
    let q_unit1_0 = q[q_at1 + 0u];
    let q1_0 = chunk_0(q_unit1_0) * params.q_scale;
    let q1_1 = chunk_1(q_unit1_0) * params.q_scale;
    let q_unit1_1 = q[q_at1 + 1u];
    let q1_2 = chunk_0(q_unit1_1) * params.q_scale;
    let q1_3 = chunk_1(q_unit1_1) * params.q_scale;
    let d_o_at1 = params.d_o_offset + batch * params.d_o_batch + safe1 * params.d_o_row + own_head * params.d_o_head;
    let d_o_unit1_0 = d_o[d_o_at1 + 0u];
    let d_o1_0 = chunk_0(d_o_unit1_0);
    let d_o1_1 = chunk_1(d_o_unit1_0);
    let d_o_unit1_1 = d_o[d_o_at1 + 1u];
    let d_o1_2 = chunk_0(d_o_unit1_1);
    let d_o1_3 = chunk_1(d_o_unit1_1);
    let adds1 = in1 && saw_keys(stats1.x);
    let row2 = tile * 12u + 8u + lane;
    let in2 = row2 < params.fixed_end;
    let safe2 = min(row2, params.fixed_end - 1u);
    let sum_at2 = params.sum_offset + batch * params.sum_batch + safe2 * params.sum_row + own_head * params.sum_head;
    let lo2 = lists[spans + 2u * safe2];
    let hi2 = lists[spans + 2u * safe2 + 1u];
    let stats2 = stats[params.stats_offset + batch * params.stats_batch + safe2 * params.stats_row + own_head * params.stats_head];
    let delta2 = stats2.y;
    let pair_row2 = params.pairs_offset + batch * params.pairs_batch + safe2 * params.pairs_row + own_head * params.pairs_head;
    let q_at2 = params.q_offset + batch * params.q_batch + safe2 * params.q_row + own_head * params.q_head;
    let q_unit2_0 = q[q_at2 + 0u];
    let q2_0 = chunk_0(q_unit2_0) * params.q_scale;
    let q2_1 = chunk_1(q_unit2_0) * params.q_scale;
    let q_unit2_1 = q[q_at2 + 1u];
    let q2_2 = chunk_0(q_unit2_1) * params.q_scale;
    let q2_3 = chunk_1(q_unit2_1) * params.q_scale;
    let d_o_at2 = params.d_o_offset + batch * params.d_o_batch + safe2 * params.d_o_row + own_head * params.d_o_head;
    let d_o_unit2_0 = d_o[d_o_at2 + 0u];
    let d_o2_0 = chunk_0(d_o_unit2_0);
    let d_o2_1 = chunk_1(d_o_unit2_0);
    let d_o_unit2_1 = d_o[d_o_at2 + 1u];
    let d_o2_2 = chunk_0(d_o_unit2_1);
    let d_o2_3 = chunk_1(d_o_unit2_1);
    let adds2 = in2 && saw_keys(stats2.x);
    let unit0 = kv_head * 2u + min(lane + 0u, 1u);
    for (var run = full_runs; run < runs_end; run++) {
        let first = max(lists[params.runs_at + 2u * run], params.moving_begin);
        let end = min(lists[params.runs_at + 2u * run + 1u], params.moving_end);
        for (var at = first; at < end; at++) {
            let k_texel0 = textureLoad(k, vec2<i32>(vec2<u32>(unit0, moving_y + at)));
            let k_own0_0 = texel_0(k_texel0);
            let k_own0_1 = texel_1(k_texel0);
            let v_texel0 = textureLoad(v, vec2<i32>(vec2<u32>(unit0, moving_y + at)));
            let v_own0_0 = texel_0(v_texel0);
            let v_own0_1 = texel_1(v_texel0);
            let k_0x = subgroupBroadcast(k_own0_0.x, 0u);
            var x0_chain0 = q0_0.x * k_0x;
            var x1_chain0 = q1_0.x * k_0x;
            var x2_chain0 = q2_0.x * k_0x;
            let k_0y = subgroupBroadcast(k_own0_0.y, 0u);
            var x0_chain1 = q0_0.y * k_0y;
            var x1_chain1 = q1_0.y * k_0y;
            var x2_chain1 = q2_0.y * k_0y;
            let k_0z = subgroupBroadcast(k_own0_0.z, 0u);
            x0_chain0 = fma(q0_0.z, k_0z, x0_chain0);
            x1_chain0 = fma(q1_0.z, k_0z, x1_chain0);
            x2_chain0 = fma(q2_0.z, k_0z, x2_chain0);
            let k_0w = subgroupBroadcast(k_own0_0.w, 0u);
            x0_chain1 = fma(q0_0.w, k_0w, x0_chain1);
            x1_chain1 = fma(q1_0.w, k_0w, x1_chain1);
            x2_chain1 = fma(q2_0.w, k_0w, x2_chain1);
            let k_1x = subgroupBroadcast(k_own0_1.x, 0u);
            x0_chain0 = fma(q0_1.x, k_1x, x0_chain0);
            x1_chain0 = fma(q1_1.x, k_1x, x1_chain0);
            x2_chain0 = fma(q2_1.x, k_1x, x2_chain0);
            let k_1y = subgroupBroadcast(k_own0_1.y, 0u);
            x0_chain1 = fma(q0_1.y, k_1y, x0_chain1);
            x1_chain1 = fma(q1_1.y, k_1y, x1_chain1);
            x2_chain1 = fma(q2_1.y, k_1y, x2_chain1);
            let k_1z = subgroupBroadcast(k_own0_1.z, 0u);
            x0_chain0 = fma(q0_1.z, k_1z, x0_chain0);
            x1_chain0 = fma(q1_1.z, k_1z, x1_chain0);
            x2_chain0 = fma(q2_1.z, k_1z, x2_chain0);
            let k_1w = subgroupBroadcast(k_own0_1.w, 0u);
            x0_chain1 = fma(q0_1.w, k_1w, x0_chain1);
            x1_chain1 = fma(q1_1.w, k_1w, x1_chain1);
            x2_chain1 = fma(q2_1.w, k_1w, x2_chain1);
            let k_2x = subgroupBroadcast(k_own0_0.x, 1u);
            x0_chain0 = fma(q0_2.x, k_2x, x0_chain0);
            x1_chain0 = fma(q1_2.x, k_2x, x1_chain0);
            x2_chain0 = fma(q2_2.x, k_2x, x2_chain0);
            let k_2y = subgroupBroadcast(k_own0_0.y, 1u);
            x0_chain1 = fma(q0_2.y, k_2y, x0_chain1);
            x1_chain1 = fma(q1_2.y, k_2y, x1_chain1);
            x2_chain1 = fma(q2_2.y, k_2y, x2_chain1);
            let k_2z = subgroupBroadcast(k_own0_0.z, 1u);
            x0_chain0 = fma(q0_2.z, k_2z, x0_chain0);
            x1_chain0 = fma(q1_2.z, k_2z, x1_chain0);
            x2_chain0 = fma(q2_2.z, k_2z, x2_chain0);
            let k_2w = subgroupBroadcast(k_own0_0.w, 1u);
            x0_chain1 = fma(q0_2.w, k_2w, x0_chain1);
            x1_chain1 = fma(q1_2.w, k_2w, x1_chain1);
            x2_chain1 = fma(q2_2.w, k_2w, x2_chain1);
            let k_3x = subgroupBroadcast(k_own0_1.x, 1u);
            x0_chain0 = fma(q0_3.x, k_3x, x0_chain0);
            x1_chain0 = fma(q1_3.x, k_3x, x1_chain0);
            x2_chain0 = fma(q2_3.x, k_3x, x2_chain0);
            let k_3y = subgroupBroadcast(k_own0_1.y, 1u);
            x0_chain1 = fma(q0_3.y, k_3y, x0_chain1);
            x1_chain1 = fma(q1_3.y, k_3y, x1_chain1);
            x2_chain1 = fma(q2_3.y, k_3y, x2_chain1);
            let k_3z = subgroupBroadcast(k_own0_1.z, 1u);
            x0_chain0 = fma(q0_3.z, k_3z, x0_chain0);
            x1_chain0 = fma(q1_3.z, k_3z, x1_chain0);
            x2_chain0 = fma(q2_3.z, k_3z, x2_chain0);
            let k_3w = subgroupBroadcast(k_own0_1.w, 1u);
            x0_chain1 = fma(q0_3.w, k_3w, x0_chain1);
            x1_chain1 = fma(q1_3.w, k_3w, x1_chain1);
            x2_chain1 = fma(q2_3.w, k_3w, x2_chain1);
            let x0 = x0_chain0 + x0_chain1;
            let x1 = x1_chain0 + x1_chain1;
            let x2 = x2_chain0 + x2_chain1;
            let v_0x = subgroupBroadcast(v_own0_0.x, 0u);
            var d0_chain0 = d_o0_0.x * v_0x;
            var d1_chain0 = d_o1_0.x * v_0x;
            var d2_chain0 = d_o2_0.x * v_0x;
            let v_0y = subgroupBroadcast(v_own0_0.y, 0u);
            var d0_chain1 = d_o0_0.y * v_0y;
            var d1_chain1 = d_o1_0.y * v_0y;
            var d2_chain1 = d_o2_0.y * v_0y;
            let v_0z = subgroupBroadcast(v_own0_0.z, 0u);
            d0_chain0 = fma(d_o0_0.z, v_0z, d0_chain0);
            d1_chain0 = fma(d_o1_0.z, v_0z, d1_chain0);
            d2_chain0 = fma(d_o2_0.z, v_0z, d2_chain0);
            let v_0w = subgroupBroadcast(v_own0_0.w, 0u);
            d0_chain1 = fma(d_o0_0.w, v_0w, d0_chain1);
            d1_chain1 = fma(d_o1_0.w, v_0w, d1_chain1);
            d2_chain1 = fma(d_o2_0.w, v_0w, d2_chain1);
            let v_1x = subgroupBroadcast(v_own0_1.x, 0u);
            d0_chain0 = fma(d_o0_1.x, v_1x, d0_chain0);
            d1_chain0 = fma(d_o1_1.x, v_1x, d1_chain0);
            d2_chain0 = fma(d_o2_1.x, v_1x, d2_chain0);
            let v_1y = subgroupBroadcast(v_own0_1.y, 0u);
            d0_chain1 = fma(d_o0_1.y, v_1y, d0_chain1);
            d1_chain1 = fma(d_o1_1.y, v_1y, d1_chain1);
            d2_chain1 = fma(d_o2_1.y, v_1y, d2_chain1);
            let v_1z = subgroupBroadcast(v_own0_1.z, 0u);
            d0_chain0 = fma(d_o0_1.z, v_1z, d0_chain0);
            d1_chain0 = fma(d_o1_1.z, v_1z, d1_chain0);
            d2_chain0 = fma(d_o2_1.z, v_1z, d2_chain0);
            let v_1w = subgroupBroadcast(v_own0_1.w, 0u);
            d0_chain1 = fma(d_o0_1.w, v_1w, d0_chain1);
            d1_chain1 = fma(d_o1_1.w, v_1w, d1_chain1);
            d2_chain1 = fma(d_o2_1.w, v_1w, d2_chain1);
            let v_2x = subgroupBroadcast(v_own0_0.x, 1u);
            d0_chain0 = fma(d_o0_2.x, v_2x, d0_chain0);
            d1_chain0 = fma(d_o1_2.x, v_2x, d1_chain0);
            d2_chain0 = fma(d_o2_2.x, v_2x, d2_chain0);
            let v_2y = subgroupBroadcast(v_own0_0.y, 1u);
            d0_chain1 = fma(d_o0_2.y, v_2y, d0_chain1);
            d1_chain1 = fma(d_o1_2.y, v_2y, d1_chain1);
            d2_chain1 = fma(d_o2_2.y, v_2y, d2_chain1);
            let v_2z = subgroupBroadcast(v_own0_0.z, 1u);
            d0_chain0 = fma(d_o0_2.z, v_2z, d0_chain0);
            d1_chain0 = fma(d_o1_2.z, v_2z, d1_chain0);
            d2_chain0 = fma(d_o2_2.z, v_2z, d2_chain0);
            let v_2w = subgroupBroadcast(v_own0_0.w, 1u);
            d0_chain1 = fma(d_o0_2.w, v_2w, d0_chain1);
            d1_chain1 = fma(d_o1_2.w, v_2w, d1_chain1);
            d2_chain1 = fma(d_o2_2.w, v_2w, d2_chain1);
            let v_3x = subgroupBroadcast(v_own0_1.x, 1u);
            d0_chain0 = fma(d_o0_3.x, v_3x, d0_chain0);
            d1_chain0 = fma(d_o1_3.x, v_3x, d1_chain0);
            d2_chain0 = fma(d_o2_3.x, v_3x, d2_chain0);
            let v_3y = subgroupBroadcast(v_own0_1.y, 1u);
            d0_chain1 = fma(d_o0_3.y, v_3y, d0_chain1);
            d1_chain1 = fma(d_o1_3.y, v_3y, d1_chain1);
            d2_chain1 = fma(d_o2_3.y, v_3y, d2_chain1);
            let v_3z = subgroupBroadcast(v_own0_1.z, 1u);
            d0_chain0 = fma(d_o0_3.z, v_3z, d0_chain0);
            d1_chain0 = fma(d_o1_3.z, v_3z, d1_chain0);
            d2_chain0 = fma(d_o2_3.z, v_3z, d2_chain0);
            let v_3w = subgroupBroadcast(v_own0_1.w, 1u);
            d0_chain1 = fma(d_o0_3.w, v_3w, d0_chain1);
            d1_chain1 = fma(d_o1_3.w, v_3w, d1_chain1);
            d2_chain1 = fma(d_o2_3.w, v_3w, d2_chain1);
            let d0 = d0_chain0 + d0_chain1;
            let d1 = d1_chain0 + d1_chain1;
            let d2 = d2_chain0 + d2_chain1;
            let position = lists[params.keys_at + at];
            let term0 = pair_term(pair_row0, position);
            let vis0 = lo0 <= position && position < hi0 && shows(term0);
            let term1 = pair_term(pair_row1, position);
            let vis1 = lo1 <= position && position < hi1 && shows(term1);
            let term2 = pair_term(pair_row2, position);
            let vis2 = lo2 <= position && position < hi2 && shows(term2);
            let p0 = select(0.0f, share_of(capped(x0) + term0, stats0.x), vis0);
            let s0 = select(0.0f, p0 * (d0 - delta0), vis0);
            let p1 = select(0.0f, share_of(capped(x1) + term1, stats1.x), vis1);
            let s1 = select(0.0f, p1 * (d1 - delta1), vis1);
            let p2 = select(0.0f, share_of(capped(x2) + term2, stats2.x), vis2);
            let s2 = select(0.0f, p2 * (d2 - delta2), vis2);
            if (adds0 && vis0) {
                let element = sum_at0 + position;
                d_bias[element] = d_bias[element] + s0;
            }
            if (adds1 && vis1) {
                let element = sum_at1 + position;
                d_bias[element] = d_bias[element] + s1;
            }
            if (adds2 && vis2) {
                let element = sum_at2 + position;
                d_bias[element] = d_bias[element] + s2;
            }
        }
    }
}
