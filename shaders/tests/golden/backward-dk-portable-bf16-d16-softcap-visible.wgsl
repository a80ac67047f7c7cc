// backward, portable, dk, bf16, head dim 16: 32 x 32, 16384 bytes of workgroup memory
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
@group(0) @binding(3) var<storage, read> k: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> v: array<vec4<u32>>;
@group(0) @binding(5) var<storage, read> stats: array<vec2<f32>>;
@group(0) @binding(6) var<storage, read_write> dk: array<vec4<f32>>;
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
    let bit = (pairs[row + (position >> 5u)] >> (position & 31u)) & 1u;
    return select(HIDDEN, 0.0f, bit == 1u);
}

// By bits, so that a row of NaN counts: SPIR-V from naga has `!=` false for NaN.
fn saw_keys(lse: f32) -> bool { return bitcast<u32>(lse) != 0x7f333332u; }
// P. Rounded, a logit may be above the log-sum-exp.
fn share_of(logit: f32, lse: f32) -> f32 {
    let below = logit - lse;
    return weight_of(select(below, 0.0f, below > 0.0f));
}

fn slope_of(t: f32) -> f32 {
    let u = exp2(min(abs(t), 80.0f) * -2.8853900f);
    let below = 1.0f + u;
    return 4.0f * u / (below * below);
}
// A hidden pair in P or dS: a number that no product gives, which its sum skips.
const SKIPPED: f32 = -3.0e38f;
fn load_q(at: u32, chunk: u32) -> vec4<f32> {
    let unit = q[at + (min(chunk, 3u) >> 1u)];
    let value = select(chunk_0(unit), chunk_1(unit), (chunk & 1u) == 1u);
    return select(vec4<f32>(), value, chunk < 4u);
}
fn load_k(at: u32, chunk: u32) -> vec4<f32> {
    let unit = k[at + (min(chunk, 3u) >> 1u)];
    let value = select(chunk_0(unit), chunk_1(unit), (chunk & 1u) == 1u);
    return select(vec4<f32>(), value, chunk < 4u);
}
fn load_d_o(at: u32, chunk: u32) -> vec4<f32> {
    let unit = d_o[at + (min(chunk, 3u) >> 1u)];
    let value = select(chunk_0(unit), chunk_1(unit), (chunk & 1u) == 1u);
    return select(vec4<f32>(), value, chunk < 4u);
}
fn load_v(at: u32, chunk: u32) -> vec4<f32> {
    let unit = v[at + (min(chunk, 3u) >> 1u)];
    let value = select(chunk_0(unit), chunk_1(unit), (chunk & 1u) == 1u);
    return select(vec4<f32>(), value, chunk < 4u);
}
var<workgroup> fixed0: array<vec4<f32>, 256>;
var<workgroup> moving0: array<vec4<f32>, 256>;
var<workgroup> fixed1: array<vec4<f32>, 256>;
var<workgroup> moving1: array<vec4<f32>, 256>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group_id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let group = group_id.x + group_id.y * params.grid_width;
    if (group >= params.items) { return; }
    let item = params.first_item + group;
    let tile = params.tile_first + item % params.tile_count;
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
    let tr = thread >> 3u;
    let tc = thread & 7u;
    let row0 = tile * 32u + 0u + tr;
    let in0 = row0 < params.fixed_end;
    let safe0 = min(row0, params.fixed_end - 1u);
    let k_at0 = params.k_offset + batch * params.k_batch + safe0 * params.k_row + own_head * params.k_head;
    let v_at0 = params.v_offset + batch * params.v_batch + safe0 * params.v_row + own_head * params.v_head;
    let sum_at0 = params.sum_offset + batch * params.sum_batch + safe0 * params.sum_row + own_head * params.sum_head;
    let pos0 = lists[params.keys_at + safe0];
    var a0_0 = vec4<f32>();
    let row1 = tile * 32u + 8u + tr;
    let in1 = row1 < params.fixed_end;
    let safe1 = min(row1, params.fixed_end - 1u);
    let k_at1 = params.k_offset + batch * params.k_batch + safe1 * params.k_row + own_head * params.k_head;
    let v_at1 = params.v_offset + batch * params.v_batch + safe1 * params.v_row + own_head * params.v_head;
    let sum_at1 = params.sum_offset + batch * params.sum_batch + safe1 * params.sum_row + own_head * params.sum_head;
    let pos1 = lists[params.keys_at + safe1];
    var a1_0 = vec4<f32>();
    let row2 = tile * 32u + 16u + tr;
    let in2 = row2 < params.fixed_end;
    let safe2 = min(row2, params.fixed_end - 1u);
    let k_at2 = params.k_offset + batch * params.k_batch + safe2 * params.k_row + own_head * params.k_head;
    let v_at2 = params.v_offset + batch * params.v_batch + safe2 * params.v_row + own_head * params.v_head;
    let sum_at2 = params.sum_offset + batch * params.sum_batch + safe2 * params.sum_row + own_head * params.sum_head;
    let pos2 = lists[params.keys_at + safe2];
    var a2_0 = vec4<f32>();
    let row3 = tile * 32u + 24u + tr;
    let in3 = row3 < params.fixed_end;
    let safe3 = min(row3, params.fixed_end - 1u);
    let k_at3 = params.k_offset + batch * params.k_batch + safe3 * params.k_row + own_head * params.k_head;
    let v_at3 = params.v_offset + batch * params.v_batch + safe3 * params.v_row + own_head * params.v_head;
    let sum_at3 = params.sum_offset + batch * params.sum_batch + safe3 * params.sum_row + own_head * params.sum_head;
    let pos3 = lists[params.keys_at + safe3];
    var a3_0 = vec4<f32>();
    let load0 = (tr & 3u) * 8u + (tr >> 2u) + 0u;
    let load1 = (tr & 3u) * 8u + (tr >> 2u) + 2u;
    let load2 = (tr & 3u) * 8u + (tr >> 2u) + 4u;
    let load3 = (tr & 3u) * 8u + (tr >> 2u) + 6u;
    for (var head = lists[params.heads_at + own_head]; head < lists[params.heads_at + own_head + 1u]; head++) {
        let q_base = params.q_offset + batch * params.q_batch + head * params.q_head;
        let d_o_base = params.d_o_offset + batch * params.d_o_batch + head * params.d_o_head;
        let stats_base = params.stats_offset + batch * params.stats_batch + head * params.stats_head;
        for (var run = full_runs; run < runs_end; run++) {
            let first = max(lists[params.runs_at + 2u * run], params.moving_begin);
            let end = min(lists[params.runs_at + 2u * run + 1u], params.moving_end);
            for (var col = first; col < end; col += 32u) {
                let cols = vec4<u32>(col + 0u + tc, col + 8u + tc, col + 16u + tc, col + 24u + tc);
                let there = min(cols, vec4<u32>(end - 1u));
                let stats_x = stats[stats_base + there.x * params.stats_row];
                let stats_y = stats[stats_base + there.y * params.stats_row];
                let stats_z = stats[stats_base + there.z * params.stats_row];
                let stats_w = stats[stats_base + there.w * params.stats_row];
                let lse = vec4<f32>(stats_x.x, stats_y.x, stats_z.x, stats_w.x);
                let delta = vec4<f32>(stats_x.y, stats_y.y, stats_z.y, stats_w.y);
                let live0 = col + load0 < end && saw_keys(stats[stats_base + min(col + load0, end - 1u) * params.stats_row].x);
                let live1 = col + load1 < end && saw_keys(stats[stats_base + min(col + load1, end - 1u) * params.stats_row].x);
                let live2 = col + load2 < end && saw_keys(stats[stats_base + min(col + load2, end - 1u) * params.stats_row].x);
                let live3 = col + load3 < end && saw_keys(stats[stats_base + min(col + load3, end - 1u) * params.stats_row].x);
                let inside = cols < vec4<u32>(end);
                let lo = vec4<u32>(lists[spans + 2u * there.x], lists[spans + 2u * there.y], lists[spans + 2u * there.z], lists[spans + 2u * there.w]);
                let hi = vec4<u32>(lists[spans + 2u * there.x + 1u], lists[spans + 2u * there.y + 1u], lists[spans + 2u * there.z + 1u], lists[spans + 2u * there.w + 1u]);
                let pair_rows = vec4<u32>(params.pairs_offset + batch * params.pairs_batch + head * params.pairs_head) + there * params.pairs_row;
                let term0 = vec4<f32>(pair_term(pair_rows.x, pos0), pair_term(pair_rows.y, pos0), pair_term(pair_rows.z, pos0), pair_term(pair_rows.w, pos0));
                let vis0 = (lo <= vec4<u32>(pos0)) & (vec4<u32>(pos0) < hi) & inside & vec4<bool>(shows(term0.x), shows(term0.y), shows(term0.z), shows(term0.w));
                let term1 = vec4<f32>(pair_term(pair_rows.x, pos1), pair_term(pair_rows.y, pos1), pair_term(pair_rows.z, pos1), pair_term(pair_rows.w, pos1));
                let vis1 = (lo <= vec4<u32>(pos1)) & (vec4<u32>(pos1) < hi) & inside & vec4<bool>(shows(term1.x), shows(term1.y), shows(term1.z), shows(term1.w));
                let term2 = vec4<f32>(pair_term(pair_rows.x, pos2), pair_term(pair_rows.y, pos2), pair_term(pair_rows.z, pos2), pair_term(pair_rows.w, pos2));
                let vis2 = (lo <= vec4<u32>(pos2)) & (vec4<u32>(pos2) < hi) & inside & vec4<bool>(shows(term2.x), shows(term2.y), shows(term2.z), shows(term2.w));
                let term3 = vec4<f32>(pair_term(pair_rows.x, pos3), pair_term(pair_rows.y, pos3), pair_term(pair_rows.z, pos3), pair_term(pair_rows.w, pos3));
                let vis3 = (lo <= vec4<u32>(pos3)) & (vec4<u32>(pos3) < hi) & inside & vec4<bool>(shows(term3.x), shows(term3.y), shows(term3.z), shows(term3.w));
                var x0 = vec4<f32>();
                var x1 = vec4<f32>();
                var x2 = vec4<f32>();
                var x3 = vec4<f32>();
                var d0 = vec4<f32>();
                var d1 = vec4<f32>();
                var d2 = vec4<f32>();
                var d3 = vec4<f32>();
                for (var g = 0u; g < 1u; g++) {
                    workgroupBarrier();
                    fixed0[tc * 32u + 0u + tr] = load_k(k_at0, g * 8u + tc);
                    fixed0[tc * 32u + 8u + tr] = load_k(k_at1, g * 8u + tc);
                    fixed0[tc * 32u + 16u + tr] = load_k(k_at2, g * 8u + tc);
                    fixed0[tc * 32u + 24u + tr] = load_k(k_at3, g * 8u + tc);
                    moving0[tc * 32u + load0] = select(vec4<f32>(), load_q(q_base + min(col + load0, end - 1u) * params.q_row, g * 8u + tc), live0) * params.q_scale;
                    moving0[tc * 32u + load1] = select(vec4<f32>(), load_q(q_base + min(col + load1, end - 1u) * params.q_row, g * 8u + tc), live1) * params.q_scale;
                    moving0[tc * 32u + load2] = select(vec4<f32>(), load_q(q_base + min(col + load2, end - 1u) * params.q_row, g * 8u + tc), live2) * params.q_scale;
                    moving0[tc * 32u + load3] = select(vec4<f32>(), load_q(q_base + min(col + load3, end - 1u) * params.q_row, g * 8u + tc), live3) * params.q_scale;
                    fixed1[tc * 32u + 0u + tr] = load_v(v_at0, g * 8u + tc);
                    fixed1[tc * 32u + 8u + tr] = load_v(v_at1, g * 8u + tc);
                    fixed1[tc * 32u + 16u + tr] = load_v(v_at2, g * 8u + tc);
                    fixed1[tc * 32u + 24u + tr] = load_v(v_at3, g * 8u + tc);
                    moving1[tc * 32u + load0] = select(vec4<f32>(), load_d_o(d_o_base + min(col + load0, end - 1u) * params.d_o_row, g * 8u + tc), live0);
                    moving1[tc * 32u + load1] = select(vec4<f32>(), load_d_o(d_o_base + min(col + load1, end - 1u) * params.d_o_row, g * 8u + tc), live1);
                    moving1[tc * 32u + load2] = select(vec4<f32>(), load_d_o(d_o_base + min(col + load2, end - 1u) * params.d_o_row, g * 8u + tc), live2);
                    moving1[tc * 32u + load3] = select(vec4<f32>(), load_d_o(d_o_base + min(col + load3, end - 1u) * params.d_o_row, g * 8u + tc), live3);
                    workgroupBarrier();
                    for (var c = 0u; c < 8u; c++) {
                        let xm0 = moving0[c * 32u + 0u + tc];
                        let xm1 = moving0[c * 32u + 8u + tc];
                        let xm2 = moving0[c * 32u + 16u + tc];
                        let xm3 = moving0[c * 32u + 24u + tc];
                        let xf0 = fixed0[c * 32u + 0u + tr];
                        x0 += vec4<f32>(dot(xf0, xm0), dot(xf0, xm1), dot(xf0, xm2), dot(xf0, xm3));
                        let xf1 = fixed0[c * 32u + 8u + tr];
                        x1 += vec4<f32>(dot(xf1, xm0), dot(xf1, xm1), dot(xf1, xm2), dot(xf1, xm3));
                        let xf2 = fixed0[c * 32u + 16u + tr];
                        x2 += vec4<f32>(dot(xf2, xm0), dot(xf2, xm1), dot(xf2, xm2), dot(xf2, xm3));
                        let xf3 = fixed0[c * 32u + 24u + tr];
                        x3 += vec4<f32>(dot(xf3, xm0), dot(xf3, xm1), dot(xf3, xm2), dot(xf3, xm3));
                        let dm0 = moving1[c * 32u + 0u + tc];
                        let dm1 = moving1[c * 32u + 8u + tc];
                        let dm2 = moving1[c * 32u + 16u + tc];
                        let dm3 = moving1[c * 32u + 24u + tc];
                        let df0 = fixed1[c * 32u + 0u + tr];
                        d0 += vec4<f32>(dot(df0, dm0), dot(df0, dm1), dot(df0, dm2), dot(df0, dm3));
                        let df1 = fixed1[c * 32u + 8u + tr];
                        d1 += vec4<f32>(dot(df1, dm0), dot(df1, dm1), dot(df1, dm2), dot(df1, dm3));
                        let df2 = fixed1[c * 32u + 16u + tr];
                        d2 += vec4<f32>(dot(df2, dm0), dot(df2, dm1), dot(df2, dm2), dot(df2, dm3));
                        let df3 = fixed1[c * 32u + 24u + tr];
                        d3 += vec4<f32>(dot(df3, dm0), dot(df3, dm1), dot(df3, dm2), dot(df3, dm3));
                    }
                }
                let slope0 = vec4<f32>(slope_of(x0.x), slope_of(x0.y), slope_of(x0.z), slope_of(x0.w));
                x0 = vec4<f32>(capped(x0.x), capped(x0.y), capped(x0.z), capped(x0.w));
                x0 += term0;
                let p0 = select(vec4<f32>(), vec4<f32>(share_of(x0.x, lse.x), share_of(x0.y, lse.y), share_of(x0.z, lse.z), share_of(x0.w, lse.w)), vis0);
                let s0 = p0 * (d0 - delta) * slope0;
                let slope1 = vec4<f32>(slope_of(x1.x), slope_of(x1.y), slope_of(x1.z), slope_of(x1.w));
                x1 = vec4<f32>(capped(x1.x), capped(x1.y), capped(x1.z), capped(x1.w));
                x1 += term1;
                let p1 = select(vec4<f32>(), vec4<f32>(share_of(x1.x, lse.x), share_of(x1.y, lse.y), share_of(x1.z, lse.z), share_of(x1.w, lse.w)), vis1);
                let s1 = p1 * (d1 - delta) * slope1;
                let slope2 = vec4<f32>(slope_of(x2.x), slope_of(x2.y), slope_of(x2.z), slope_of(x2.w));
                x2 = vec4<f32>(capped(x2.x), capped(x2.y), capped(x2.z), capped(x2.w));
                x2 += term2;
                let p2 = select(vec4<f32>(), vec4<f32>(share_of(x2.x, lse.x), share_of(x2.y, lse.y), share_of(x2.z, lse.z), share_of(x2.w, lse.w)), vis2);
                let s2 = p2 * (d2 - delta) * slope2;
                let slope3 = vec4<f32>(slope_of(x3.x), slope_of(x3.y), slope_of(x3.z), slope_of(x3.w));
                x3 = vec4<f32>(capped(x3.x), capped(x3.y), capped(x3.z), capped(x3.w));
                x3 += term3;
                let p3 = select(vec4<f32>(), vec4<f32>(share_of(x3.x, lse.x), share_of(x3.y, lse.y), share_of(x3.z, lse.z), share_of(x3.w, lse.w)), vis3);
                let s3 = p3 * (d3 - delta) * slope3;
                workgroupBarrier();
                fixed1[tc * 32u + 0u + tr] = select(vec4<f32>(SKIPPED), s0, vis0);
                fixed1[tc * 32u + 8u + tr] = select(vec4<f32>(SKIPPED), s1, vis1);
                fixed1[tc * 32u + 16u + tr] = select(vec4<f32>(SKIPPED), s2, vis2);
                fixed1[tc * 32u + 24u + tr] = select(vec4<f32>(SKIPPED), s3, vis3);
                moving0[(0u + tr) * 8u + tc] = select(vec4<f32>(), load_q(q_base + min(col + load0, end - 1u) * params.q_row, 0u + tc), live0);
                moving0[(8u + tr) * 8u + tc] = select(vec4<f32>(), load_q(q_base + min(col + load1, end - 1u) * params.q_row, 0u + tc), live1);
                moving0[(16u + tr) * 8u + tc] = select(vec4<f32>(), load_q(q_base + min(col + load2, end - 1u) * params.q_row, 0u + tc), live2);
                moving0[(24u + tr) * 8u + tc] = select(vec4<f32>(), load_q(q_base + min(col + load3, end - 1u) * params.q_row, 0u + tc), live3);
                workgroupBarrier();
                for (var s = 0u; s < 8u; s++) {
                    let am0 = moving0[(s * 4u + 0u) * 8u + tc];
                    let am1 = moving0[(s * 4u + 1u) * 8u + tc];
                    let am2 = moving0[(s * 4u + 2u) * 8u + tc];
                    let am3 = moving0[(s * 4u + 3u) * 8u + tc];
                    let aw0 = fixed1[s * 32u + 0u + tr];
                    a0_0 += (select(am0 * aw0.x, vec4<f32>(), aw0.x == SKIPPED) + select(am1 * aw0.y, vec4<f32>(), aw0.y == SKIPPED)) + (select(am2 * aw0.z, vec4<f32>(), aw0.z == SKIPPED) + select(am3 * aw0.w, vec4<f32>(), aw0.w == SKIPPED));
                    let aw1 = fixed1[s * 32u + 8u + tr];
                    a1_0 += (select(am0 * aw1.x, vec4<f32>(), aw1.x == SKIPPED) + select(am1 * aw1.y, vec4<f32>(), aw1.y == SKIPPED)) + (select(am2 * aw1.z, vec4<f32>(), aw1.z == SKIPPED) + select(am3 * aw1.w, vec4<f32>(), aw1.w == SKIPPED));
                    let aw2 = fixed1[s * 32u + 16u + tr];
                    a2_0 += (select(am0 * aw2.x, vec4<f32>(), aw2.x == SKIPPED) + select(am1 * aw2.y, vec4<f32>(), aw2.y == SKIPPED)) + (select(am2 * aw2.z, vec4<f32>(), aw2.z == SKIPPED) + select(am3 * aw2.w, vec4<f32>(), aw2.w == SKIPPED));
                    let aw3 = fixed1[s * 32u + 24u + tr];
                    a3_0 += (select(am0 * aw3.x, vec4<f32>(), aw3.x == SKIPPED) + select(am1 * aw3.y, vec4<f32>(), aw3.y == SKIPPED)) + (select(am2 * aw3.z, vec4<f32>(), aw3.z == SKIPPED) + select(am3 * aw3.w, vec4<f32>(), aw3.w == SKIPPED));
                }
            }
        }
    }
    if (in0) {
        if (0u + tc < 4u) {
            dk[sum_at0 + 0u + tc] = dk[sum_at0 + 0u + tc] + a0_0 * params.scale;
        }
    }
    if (in1) {
        if (0u + tc < 4u) {
            dk[sum_at1 + 0u + tc] = dk[sum_at1 + 0u + tc] + a1_0 * params.scale;
        }
    }
    if (in2) {
        if (0u + tc < 4u) {
            dk[sum_at2 + 0u + tc] = dk[sum_at2 + 0u + tc] + a2_0 * params.scale;
        }
    }
    if (in3) {
        if (0u + tc < 4u) {
            dk[sum_at3 + 0u + tc] = dk[sum_at3 + 0u + tc] + a3_0 * params.scale;
        }
    }
}
