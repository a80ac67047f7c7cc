// attend, subgroup broadcast, f32, head dim 16: subgroups of 4, 2 query rows in each lane
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
    pad: u32,
}
@group(0) @binding(0) var<uniform> params: AttendParams;
@group(0) @binding(1) var<storage, read> q: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> k: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> v: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> state_a: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read_write> state_ml: array<vec2<f32>>;
@group(0) @binding(6) var<storage, read> positions: array<u32>;
@group(0) @binding(7) var<storage, read> work: array<u32>;

const EMPTY_M: f32 = -2.3819763e38f;

fn chunk_0(unit: vec4<f32>) -> vec4<f32> { return unit; }

// m is kept in natural-log units outside and in base-2 units inside; EMPTY_M is the same in both.
fn base2_of(m: f32) -> f32 { return select(m * 1.442695f, m, m == EMPTY_M); }
fn natural_of(m: f32) -> f32 { return select(m * 0.6931472f, m, m == EMPTY_M); }
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
    let k_base = params.k_offset + batch * params.k_batch + kv_head * params.k_head;
    let v_base = params.v_offset + batch * params.v_batch + kv_head * params.v_head;
    let unit0 = min(lane + 0u, 3u);
    let row0 = tile * 8u + 0u + lane;
    let in0 = row0 < params.rows;
    let safe0 = min(row0, params.rows - 1u);
    let lo0 = positions[spans + 2u * safe0];
    let hi0 = positions[spans + 2u * safe0 + 1u];
    let q_at0 = params.q_offset + batch * params.q_batch + safe0 * params.q_row + head * params.q_head;
    let a_at0 = params.a_offset + ((batch * params.rows + safe0) * params.heads + head) * 4u;
    let ml_at0 = params.ml_offset + (batch * params.heads + head) * params.rows + safe0;
    let ml0 = state_ml[ml_at0];
    var m0 = base2_of(ml0.x);
    var l0 = ml0.y;
    var seen0 = full_runs < partial_runs;
    let q_unit0_0 = q[q_at0 + 0u];
    let q0_0 = chunk_0(q_unit0_0) * params.q_scale;
    let q_unit0_1 = q[q_at0 + 1u];
    let q0_1 = chunk_0(q_unit0_1) * params.q_scale;
    let q_unit0_2 = q[q_at0 + 2u];
    let q0_2 = chunk_0(q_unit0_2) * params.q_scale;
    let q_unit0_3 = q[q_at0 + 3u];
    let q0_3 = chunk_0(q_unit0_3) * params.q_scale;
    var a0_0 = state_a[a_at0 + 0u];
    var a0_1 = state_a[a_at0 + 1u];
    var a0_2 = state_a[a_at0 + 2u];
    var a0_3 = state_a[a_at0 + 3u];
    let row1 = tile * 8u + 4u + lane;
    let in1 = row1 < params.rows;
    let safe1 = min(row1, params.rows - 1u);
    let lo1 = positions[spans + 2u * safe1];
    let hi1 = positions[spans + 2u * safe1 + 1u];
    let q_at1 = params.q_offset + batch * params.q_batch + safe1 * params.q_row + head * params.q_head;
    let a_at1 = params.a_offset + ((batch * params.rows + safe1) * params.heads + head) * 4u;
    let ml_at1 = params.ml_offset + (batch * params.heads + head) * params.rows + safe1;
    let ml1 = state_ml[ml_at1];
    var m1 = base2_of(ml1.x);
    var l1 = ml1.y;
    var seen1 = full_runs < partial_runs;
    let q_unit1_0 = q[q_at1 + 0u];
    let q1_0 = chunk_0(q_unit1_0) * params.q_scale;
    let q_unit1_1 = q[q_at1 + 1u];
    let q1_1 = chunk_0(q_unit1_1) * params.q_scale;
    let q_unit1_2 = q[q_at1 + 2u];
    let q1_2 = chunk_0(q_unit1_2) * params.q_scale;
    let q_unit1_3 = q[q_at1 + 3u];
    let q1_3 = chunk_0(q_unit1_3) * params.q_scale;
    var a1_0 = state_a[a_at1 + 0u];
    var a1_1 = state_a[a_at1 + 1u];
    var a1_2 = state_a[a_at1 + 2u];
    var a1_3 = state_a[a_at1 + 3u];
    for (var run = full_runs; run < partial_runs; run++) {
        let first = max(work[params.runs_at + 2u * run], params.key_begin);
        let end = min(work[params.runs_at + 2u * run + 1u], params.key_end);
        var k_at = k_base + first * params.k_row;
        var v_at = v_base + first * params.v_row;
        for (var key = first; key < end; key++) {
            let k_unit0 = k[k_at + unit0];
            let k_own0_0 = chunk_0(k_unit0);
            let kb0 = subgroupBroadcast(k_own0_0, 0u);
            var s0 = q0_0 * kb0;
            var s1 = q1_0 * kb0;
            let kb1 = subgroupBroadcast(k_own0_0, 1u);
            s0 = fma(q0_1, kb1, s0);
            s1 = fma(q1_1, kb1, s1);
            let kb2 = subgroupBroadcast(k_own0_0, 2u);
            s0 = fma(q0_2, kb2, s0);
            s1 = fma(q1_2, kb2, s1);
            let kb3 = subgroupBroadcast(k_own0_0, 3u);
            s0 = fma(q0_3, kb3, s0);
            s1 = fma(q1_3, kb3, s1);
            let dot0 = (s0.x + s0.y) + (s0.z + s0.w);
            let x0 = dot0;
            let n0 = max(m0, x0);
            let corr0 = exp2(m0 - n0);
            let p0 = exp2(x0 - n0);
            m0 = n0;
            l0 = fma(l0, corr0, p0);
            let dot1 = (s1.x + s1.y) + (s1.z + s1.w);
            let x1 = dot1;
            let n1 = max(m1, x1);
            let corr1 = exp2(m1 - n1);
            let p1 = exp2(x1 - n1);
            m1 = n1;
            l1 = fma(l1, corr1, p1);
            let v_unit0 = v[v_at + unit0];
            let v_own0_0 = chunk_0(v_unit0);
            let vb0 = subgroupBroadcast(v_own0_0, 0u);
            a0_0 = fma(vb0, vec4<f32>(p0), a0_0 * corr0);
            a1_0 = fma(vb0, vec4<f32>(p1), a1_0 * corr1);
            let vb1 = subgroupBroadcast(v_own0_0, 1u);
            a0_1 = fma(vb1, vec4<f32>(p0), a0_1 * corr0);
            a1_1 = fma(vb1, vec4<f32>(p1), a1_1 * corr1);
            let vb2 = subgroupBroadcast(v_own0_0, 2u);
            a0_2 = fma(vb2, vec4<f32>(p0), a0_2 * corr0);
            a1_2 = fma(vb2, vec4<f32>(p1), a1_2 * corr1);
            let vb3 = subgroupBroadcast(v_own0_0, 3u);
            a0_3 = fma(vb3, vec4<f32>(p0), a0_3 * corr0);
            a1_3 = fma(vb3, vec4<f32>(p1), a1_3 * corr1);
            k_at += params.k_row;
            v_at += params.v_row;
        }
    }
    for (var run = partial_runs; run < runs_end; run++) {
        let first = max(work[params.runs_at + 2u * run], params.key_begin);
        let end = min(work[params.runs_at + 2u * run + 1u], params.key_end);
        var k_at = k_base + first * params.k_row;
        var v_at = v_base + first * params.v_row;
        for (var key = first; key < end; key++) {
            let k_unit0 = k[k_at + unit0];
            let k_own0_0 = chunk_0(k_unit0);
            let kb0 = subgroupBroadcast(k_own0_0, 0u);
            var s0 = q0_0 * kb0;
            var s1 = q1_0 * kb0;
            let kb1 = subgroupBroadcast(k_own0_0, 1u);
            s0 = fma(q0_1, kb1, s0);
            s1 = fma(q1_1, kb1, s1);
            let kb2 = subgroupBroadcast(k_own0_0, 2u);
            s0 = fma(q0_2, kb2, s0);
            s1 = fma(q1_2, kb2, s1);
            let kb3 = subgroupBroadcast(k_own0_0, 3u);
            s0 = fma(q0_3, kb3, s0);
            s1 = fma(q1_3, kb3, s1);
            let position = positions[params.keys_at + key];
            let dot0 = (s0.x + s0.y) + (s0.z + s0.w);
            let vis0 = lo0 <= position && position < hi0;
            let x0 = select(EMPTY_M, dot0, vis0);
            seen0 = seen0 || vis0;
            let n0 = max(m0, x0);
            let corr0 = exp2(m0 - n0);
            let p0 = select(0.0f, exp2(x0 - n0), vis0);
            m0 = n0;
            l0 = fma(l0, corr0, p0);
            let dot1 = (s1.x + s1.y) + (s1.z + s1.w);
            let vis1 = lo1 <= position && position < hi1;
            let x1 = select(EMPTY_M, dot1, vis1);
            seen1 = seen1 || vis1;
            let n1 = max(m1, x1);
            let corr1 = exp2(m1 - n1);
            let p1 = select(0.0f, exp2(x1 - n1), vis1);
            m1 = n1;
            l1 = fma(l1, corr1, p1);
            let v_unit0 = v[v_at + unit0];
            let v_own0_0 = chunk_0(v_unit0);
            let vb0 = subgroupBroadcast(v_own0_0, 0u);
            a0_0 = fma(select(vec4<f32>(), vb0, vis0), vec4<f32>(p0), a0_0 * corr0);
            a1_0 = fma(select(vec4<f32>(), vb0, vis1), vec4<f32>(p1), a1_0 * corr1);
            let vb1 = subgroupBroadcast(v_own0_0, 1u);
            a0_1 = fma(select(vec4<f32>(), vb1, vis0), vec4<f32>(p0), a0_1 * corr0);
            a1_1 = fma(select(vec4<f32>(), vb1, vis1), vec4<f32>(p1), a1_1 * corr1);
            let vb2 = subgroupBroadcast(v_own0_0, 2u);
            a0_2 = fma(select(vec4<f32>(), vb2, vis0), vec4<f32>(p0), a0_2 * corr0);
            a1_2 = fma(select(vec4<f32>(), vb2, vis1), vec4<f32>(p1), a1_2 * corr1);
            let vb3 = subgroupBroadcast(v_own0_0, 3u);
            a0_3 = fma(select(vec4<f32>(), vb3, vis0), vec4<f32>(p0), a0_3 * corr0);
            a1_3 = fma(select(vec4<f32>(), vb3, vis1), vec4<f32>(p1), a1_3 * corr1);
            k_at += params.k_row;
            v_at += params.v_row;
        }
    }
    if (in0 && seen0) {
        state_a[a_at0 + 0u] = a0_0;
        state_a[a_at0 + 1u] = a0_1;
        state_a[a_at0 + 2u] = a0_2;
        state_a[a_at0 + 3u] = a0_3;
        let m = select(natural_of(m0), ml0.x, m0 == base2_of(ml0.x));
        state_ml[ml_at0] = vec2<f32>(m, l0);
    }
    if (in1 && seen1) {
        state_a[a_at1 + 0u] = a1_0;
        state_a[a_at1 + 1u] = a1_1;
        state_a[a_at1 + 2u] = a1_2;
        state_a[a_at1 + 3u] = a1_3;
        let m = select(natural_of(m1), ml1.x, m1 == base2_of(ml1.x));
        state_ml[ml_at1] = vec2<f32>(m, l1);
    }
}
