// Attention of one block of queries against one block of keys, into a running state, within
// WebGPU's default limits: no feature, 64 threads, at most 16 KiB of workgroup memory.
//
// For a query row with (m, l, O), and for each key j that it sees (Milakov & Gimelshein 2018, 3.1):
//
//     S  = scale · q·k_j             (softcap c: c · tanh(S / c)), plus the bias
//     m' = max(m, S)
//     P  = e^(S - m')
//     l' = l · e^(m - m') + P
//     O' = O · e^(m - m') + P · v_j
//
// A workgroup has a tile of rows of one batch entry and head. It starts from an empty (m, l, O) in
// registers, goes through its keys tile by tile, and merges with the state at the end. m' is n in
// the code, e^(m - m') is corr. The factor `scale` is split: q_scale, at most 1, is on q; x_scale, the
// rest, is on the product, because q times it may be out of range.
//
// Bindings. A unit is 16 bytes: 4 elements of f32, 8 of a 16-bit type. A chunk is 4 elements.
//   params     strides and offsets in units, of ml in 8 bytes, of the bias in words or elements
//   q          [batch, rows, heads, dim], strided
//   k, v       the same, with KV heads
//   state_a    O, not divided by l: f32 [batch, rows, heads, dim], dense
//   state_ml   m and l: f32 [batch, heads, rows, 2], dense
//   positions  for each query head its KV head; from keys_at the position of each key; from
//              spans_at, for each class and each query row, the positions lo..hi that it sees, as two
//              words. A class is batch entries that share a mask.
//   work       which keys a tile of rows needs, as runs of keys; see below
//   bias       [batch, rows, heads, columns], strided; columns are positions. A mask in bits, or
//              numbers that are added to logits, -inf for a hidden pair
//
// Work list. A run is a range of keys first..end, two words from runs_at on; first is a multiple of
// Bc. For tile t of class c, at = c · starts_class + 2t: the runs with the numbers work[at] up to
// work[at + 1] are full, every row of the tile sees every key; those up to work[at + 2] are partial.
// A run whose end is not a multiple of Bc is partial. Keys in no run cost nothing. In a tested run
// each pair tests lo <= position < hi; tested are partial runs, and with a bias all runs.
//
// NaN and infinity pass through to the rows that see them. What a row does not see is replaced by
// selection before it enters a sum: its logit by EMPTY_M, its P in l by 0, its P · v by 0, because 0
// · NaN is NaN. A row that saw no key in the whole call is not written.
//
// Tile: Br = 32 query rows x Bc = 32 keys; 12288 bytes of workgroup memory.
//
// 64 threads are a grid of 8 x 8. Of the tile's S, thread (tr, tc) holds 4 x 4: rows tr, tr + 8,
// ..., keys tc, tc + 8, ... (S0, S1, ..., one vector of 4 keys for each row; then P0, P1, ...).
// O goes in passes over the head, 8 chunks each: thread (tr, tc) holds chunk tc of each pass for its
// rows (O0_1: row 0, pass 1). The 8 threads of a row agree on its m through workgroup memory, and
// keep their own part of l until the end.
//
// Workgroup memory
//   tile_q   q · q_scale, chunk-major: whole heads if they fit, otherwise 8 chunks at a time
//   tile_kv  8 chunks of K, chunk-major, so that neighbouring threads read neighbouring vectors;
//            then 8 chunks of V, slot-major
//   tile_p   the row maxima of 8 threads, then P. Slot 4 tc + j is key 8 j + tc: the four weights
//            of a thread are one vector, and V lies in the same order. A hidden pair has weight -1;
//            others are never negative. Also the vote on skipping a tile, and at the end l.
//
// Barriers stand where a tile is replaced (everyone has read the old one) and where it is read
// (everyone has written the new one). workgroupUniformLoad is one too.
// attend-portable-4-bf16-d16-softcap
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
    x_scale: f32,
    cap: f32,
    bias_offset: u32,
    bias_batch: u32,
    bias_row: u32,
    bias_head: u32,
}
@group(0) @binding(0) var<uniform> params: AttendParams;
@group(0) @binding(1) var<storage, read> q: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> k: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> v: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read_write> state_a: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read_write> state_ml: array<vec2<f32>>;
@group(0) @binding(6) var<storage, read> positions: array<u32>;
@group(0) @binding(7) var<storage, read> work: array<u32>;

// m of a row that saw no key: finite, because WGSL promises nothing about infinities.
const EMPTY_M: f32 = -2.3819763e38f;

fn pair(word: u32) -> vec2<f32> {
    return vec2<f32>(bitcast<f32>(word << 16u), bitcast<f32>(word & 0xffff0000u));
}
fn chunk_0(unit: vec4<u32>) -> vec4<f32> { return vec4<f32>(pair(unit.x), pair(unit.y)); }
fn chunk_1(unit: vec4<u32>) -> vec4<f32> { return vec4<f32>(pair(unit.z), pair(unit.w)); }

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

fn load_v(at: u32, chunk: u32) -> vec4<f32> {
    let unit = v[at + (min(chunk, 3u) >> 1u)];
    let value = select(chunk_0(unit), chunk_1(unit), (chunk & 1u) == 1u);
    return select(vec4<f32>(), value, chunk < 4u);
}

var<workgroup> tile_q: array<vec4<f32>, 256>;
var<workgroup> tile_kv: array<vec4<f32>, 256>;
var<workgroup> tile_p: array<vec4<f32>, 256>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group_id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
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
    let tr = thread >> 3u;
    let tc = thread & 7u;
    let k_base = params.k_offset + batch * params.k_batch + kv_head * params.k_head;
    let v_base = params.v_offset + batch * params.v_batch + kv_head * params.v_head;
    let row0 = tile * 32u + 0u + tr;
    let in0 = row0 < params.rows;
    let safe0 = min(row0, params.rows - 1u);
    let lo0 = positions[spans + 2u * safe0];
    let hi0 = positions[spans + 2u * safe0 + 1u];
    let q_at0 = params.q_offset + batch * params.q_batch + safe0 * params.q_row + head * params.q_head;
    let a_at0 = params.a_offset + ((batch * params.rows + safe0) * params.heads + head) * 4u;
    let ml_at0 = params.ml_offset + (batch * params.heads + head) * params.rows + safe0;
    var m0 = EMPTY_M;
    var l0 = 0.0f;
    var seen0 = full_runs < partial_runs;
    var O0_0 = vec4<f32>();
    let row1 = tile * 32u + 8u + tr;
    let in1 = row1 < params.rows;
    let safe1 = min(row1, params.rows - 1u);
    let lo1 = positions[spans + 2u * safe1];
    let hi1 = positions[spans + 2u * safe1 + 1u];
    let q_at1 = params.q_offset + batch * params.q_batch + safe1 * params.q_row + head * params.q_head;
    let a_at1 = params.a_offset + ((batch * params.rows + safe1) * params.heads + head) * 4u;
    let ml_at1 = params.ml_offset + (batch * params.heads + head) * params.rows + safe1;
    var m1 = EMPTY_M;
    var l1 = 0.0f;
    var seen1 = full_runs < partial_runs;
    var O1_0 = vec4<f32>();
    let row2 = tile * 32u + 16u + tr;
    let in2 = row2 < params.rows;
    let safe2 = min(row2, params.rows - 1u);
    let lo2 = positions[spans + 2u * safe2];
    let hi2 = positions[spans + 2u * safe2 + 1u];
    let q_at2 = params.q_offset + batch * params.q_batch + safe2 * params.q_row + head * params.q_head;
    let a_at2 = params.a_offset + ((batch * params.rows + safe2) * params.heads + head) * 4u;
    let ml_at2 = params.ml_offset + (batch * params.heads + head) * params.rows + safe2;
    var m2 = EMPTY_M;
    var l2 = 0.0f;
    var seen2 = full_runs < partial_runs;
    var O2_0 = vec4<f32>();
    let row3 = tile * 32u + 24u + tr;
    let in3 = row3 < params.rows;
    let safe3 = min(row3, params.rows - 1u);
    let lo3 = positions[spans + 2u * safe3];
    let hi3 = positions[spans + 2u * safe3 + 1u];
    let q_at3 = params.q_offset + batch * params.q_batch + safe3 * params.q_row + head * params.q_head;
    let a_at3 = params.a_offset + ((batch * params.rows + safe3) * params.heads + head) * 4u;
    let ml_at3 = params.ml_offset + (batch * params.heads + head) * params.rows + safe3;
    var m3 = EMPTY_M;
    var l3 = 0.0f;
    var seen3 = full_runs < partial_runs;
    var O3_0 = vec4<f32>();
    for (var g = 0u; g < 1u; g++) {
        tile_q[(g * 8u + tc) * 32u + 0u + tr] = load_q(q_at0, g * 8u + tc) * params.q_scale;
        tile_q[(g * 8u + tc) * 32u + 8u + tr] = load_q(q_at1, g * 8u + tc) * params.q_scale;
        tile_q[(g * 8u + tc) * 32u + 16u + tr] = load_q(q_at2, g * 8u + tc) * params.q_scale;
        tile_q[(g * 8u + tc) * 32u + 24u + tr] = load_q(q_at3, g * 8u + tc) * params.q_scale;
    }
    for (var run = full_runs; run < partial_runs; run++) {
        let first = max(work[params.runs_at + 2u * run], params.key_begin);
        let end = min(work[params.runs_at + 2u * run + 1u], params.key_end);
        for (var key = first; key < end; key += 32u) {
            // S = q k^T, 8 chunks of the head at a time.
            var S0 = vec4<f32>();
            var S1 = vec4<f32>();
            var S2 = vec4<f32>();
            var S3 = vec4<f32>();
            for (var g = 0u; g < 1u; g++) {
                workgroupBarrier();
                tile_kv[tc * 32u + 0u + tr] = load_k(k_base + (key + 0u + tr) * params.k_row, g * 8u + tc);
                tile_kv[tc * 32u + 8u + tr] = load_k(k_base + (key + 8u + tr) * params.k_row, g * 8u + tc);
                tile_kv[tc * 32u + 16u + tr] = load_k(k_base + (key + 16u + tr) * params.k_row, g * 8u + tc);
                tile_kv[tc * 32u + 24u + tr] = load_k(k_base + (key + 24u + tr) * params.k_row, g * 8u + tc);
                workgroupBarrier();
                for (var c = 0u; c < 8u; c++) {
                    let k0 = tile_kv[c * 32u + 0u + tc];
                    let k1 = tile_kv[c * 32u + 8u + tc];
                    let k2 = tile_kv[c * 32u + 16u + tc];
                    let k3 = tile_kv[c * 32u + 24u + tc];
                    let q0 = tile_q[(g * 8u + c) * 32u + 0u + tr];
                    S0 += vec4<f32>(dot(q0, k0), dot(q0, k1), dot(q0, k2), dot(q0, k3));
                    let q1 = tile_q[(g * 8u + c) * 32u + 8u + tr];
                    S1 += vec4<f32>(dot(q1, k0), dot(q1, k1), dot(q1, k2), dot(q1, k3));
                    let q2 = tile_q[(g * 8u + c) * 32u + 16u + tr];
                    S2 += vec4<f32>(dot(q2, k0), dot(q2, k1), dot(q2, k2), dot(q2, k3));
                    let q3 = tile_q[(g * 8u + c) * 32u + 24u + tr];
                    S3 += vec4<f32>(dot(q3, k0), dot(q3, k1), dot(q3, k2), dot(q3, k3));
                }
            }
            S0 *= params.x_scale;
            S1 *= params.x_scale;
            S2 *= params.x_scale;
            S3 *= params.x_scale;
            S0 = vec4<f32>(capped(S0.x), capped(S0.y), capped(S0.z), capped(S0.w));
            S1 = vec4<f32>(capped(S1.x), capped(S1.y), capped(S1.z), capped(S1.w));
            S2 = vec4<f32>(capped(S2.x), capped(S2.y), capped(S2.z), capped(S2.w));
            S3 = vec4<f32>(capped(S3.x), capped(S3.y), capped(S3.z), capped(S3.w));
            // The new maximum n of each row, from the maxima of its 8 threads.
            tile_p[tc * 32u + 0u + tr] = vec4<f32>(max(max(S0.x, S0.y), max(S0.z, S0.w)));
            tile_p[tc * 32u + 8u + tr] = vec4<f32>(max(max(S1.x, S1.y), max(S1.z, S1.w)));
            tile_p[tc * 32u + 16u + tr] = vec4<f32>(max(max(S2.x, S2.y), max(S2.z, S2.w)));
            tile_p[tc * 32u + 24u + tr] = vec4<f32>(max(max(S3.x, S3.y), max(S3.z, S3.w)));
            workgroupBarrier();
            var n0 = m0;
            var n1 = m1;
            var n2 = m2;
            var n3 = m3;
            for (var c = 0u; c < 8u; c++) {
                n0 = max(n0, tile_p[c * 32u + 0u + tr].x);
                n1 = max(n1, tile_p[c * 32u + 8u + tr].x);
                n2 = max(n2, tile_p[c * 32u + 16u + tr].x);
                n3 = max(n3, tile_p[c * 32u + 24u + tr].x);
            }
            workgroupBarrier();
            // P = e^(S - n), by what l and O so far shrink, and this thread's part of l.
            let corr0 = weight_of(m0 - n0);
            m0 = n0;
            let P0 = vec4<f32>(
                weight_of(S0.x - n0), weight_of(S0.y - n0),
                weight_of(S0.z - n0), weight_of(S0.w - n0));
            let kept0 = P0;
            tile_p[tc * 32u + 0u + tr] = P0;
            l0 = l0 * corr0 + ((kept0.x + kept0.y) + (kept0.z + kept0.w));
            let corr1 = weight_of(m1 - n1);
            m1 = n1;
            let P1 = vec4<f32>(
                weight_of(S1.x - n1), weight_of(S1.y - n1),
                weight_of(S1.z - n1), weight_of(S1.w - n1));
            let kept1 = P1;
            tile_p[tc * 32u + 8u + tr] = P1;
            l1 = l1 * corr1 + ((kept1.x + kept1.y) + (kept1.z + kept1.w));
            let corr2 = weight_of(m2 - n2);
            m2 = n2;
            let P2 = vec4<f32>(
                weight_of(S2.x - n2), weight_of(S2.y - n2),
                weight_of(S2.z - n2), weight_of(S2.w - n2));
            let kept2 = P2;
            tile_p[tc * 32u + 16u + tr] = P2;
            l2 = l2 * corr2 + ((kept2.x + kept2.y) + (kept2.z + kept2.w));
            let corr3 = weight_of(m3 - n3);
            m3 = n3;
            let P3 = vec4<f32>(
                weight_of(S3.x - n3), weight_of(S3.y - n3),
                weight_of(S3.z - n3), weight_of(S3.w - n3));
            let kept3 = P3;
            tile_p[tc * 32u + 24u + tr] = P3;
            l3 = l3 * corr3 + ((kept3.x + kept3.y) + (kept3.z + kept3.w));
            // O = O corr + P V. The first pass needs no barrier: those of the maxima are between K and V.
            // Slot s holds key 8 (s % 4) + s / 4.
            let slot0_0 = 0u + tr;
            tile_kv[slot0_0 * 8u + tc] = load_v(v_base + (key + (slot0_0 & 3u) * 8u + (slot0_0 >> 2u)) * params.v_row, 0u + tc);
            // Slot s holds key 8 (s % 4) + s / 4.
            let slot0_1 = 8u + tr;
            tile_kv[slot0_1 * 8u + tc] = load_v(v_base + (key + (slot0_1 & 3u) * 8u + (slot0_1 >> 2u)) * params.v_row, 0u + tc);
            // Slot s holds key 8 (s % 4) + s / 4.
            let slot0_2 = 16u + tr;
            tile_kv[slot0_2 * 8u + tc] = load_v(v_base + (key + (slot0_2 & 3u) * 8u + (slot0_2 >> 2u)) * params.v_row, 0u + tc);
            // Slot s holds key 8 (s % 4) + s / 4.
            let slot0_3 = 24u + tr;
            tile_kv[slot0_3 * 8u + tc] = load_v(v_base + (key + (slot0_3 & 3u) * 8u + (slot0_3 >> 2u)) * params.v_row, 0u + tc);
            workgroupBarrier();
            O0_0 *= corr0;
            O1_0 *= corr1;
            O2_0 *= corr2;
            O3_0 *= corr3;
            for (var s = 0u; s < 8u; s++) {
                let v0 = tile_kv[(s * 4u + 0u) * 8u + tc];
                let v1 = tile_kv[(s * 4u + 1u) * 8u + tc];
                let v2 = tile_kv[(s * 4u + 2u) * 8u + tc];
                let v3 = tile_kv[(s * 4u + 3u) * 8u + tc];
                let w0 = tile_p[s * 32u + 0u + tr];
                O0_0 += (v0 * w0.x + v1 * w0.y) + (v2 * w0.z + v3 * w0.w);
                let w1 = tile_p[s * 32u + 8u + tr];
                O1_0 += (v0 * w1.x + v1 * w1.y) + (v2 * w1.z + v3 * w1.w);
                let w2 = tile_p[s * 32u + 16u + tr];
                O2_0 += (v0 * w2.x + v1 * w2.y) + (v2 * w2.z + v3 * w2.w);
                let w3 = tile_p[s * 32u + 24u + tr];
                O3_0 += (v0 * w3.x + v1 * w3.y) + (v2 * w3.z + v3 * w3.w);
            }
        }

    }
    for (var run = partial_runs; run < runs_end; run++) {
        let first = max(work[params.runs_at + 2u * run], params.key_begin);
        let end = min(work[params.runs_at + 2u * run + 1u], params.key_end);
        for (var key = first; key < end; key += 32u) {
            // S = q k^T, 8 chunks of the head at a time.
            var S0 = vec4<f32>();
            var S1 = vec4<f32>();
            var S2 = vec4<f32>();
            var S3 = vec4<f32>();
            for (var g = 0u; g < 1u; g++) {
                workgroupBarrier();
                tile_kv[tc * 32u + 0u + tr] = select(vec4<f32>(), load_k(k_base + min(key + 0u + tr, end - 1u) * params.k_row, g * 8u + tc), key + 0u + tr < end);
                tile_kv[tc * 32u + 8u + tr] = select(vec4<f32>(), load_k(k_base + min(key + 8u + tr, end - 1u) * params.k_row, g * 8u + tc), key + 8u + tr < end);
                tile_kv[tc * 32u + 16u + tr] = select(vec4<f32>(), load_k(k_base + min(key + 16u + tr, end - 1u) * params.k_row, g * 8u + tc), key + 16u + tr < end);
                tile_kv[tc * 32u + 24u + tr] = select(vec4<f32>(), load_k(k_base + min(key + 24u + tr, end - 1u) * params.k_row, g * 8u + tc), key + 24u + tr < end);
                workgroupBarrier();
                for (var c = 0u; c < 8u; c++) {
                    let k0 = tile_kv[c * 32u + 0u + tc];
                    let k1 = tile_kv[c * 32u + 8u + tc];
                    let k2 = tile_kv[c * 32u + 16u + tc];
                    let k3 = tile_kv[c * 32u + 24u + tc];
                    let q0 = tile_q[(g * 8u + c) * 32u + 0u + tr];
                    S0 += vec4<f32>(dot(q0, k0), dot(q0, k1), dot(q0, k2), dot(q0, k3));
                    let q1 = tile_q[(g * 8u + c) * 32u + 8u + tr];
                    S1 += vec4<f32>(dot(q1, k0), dot(q1, k1), dot(q1, k2), dot(q1, k3));
                    let q2 = tile_q[(g * 8u + c) * 32u + 16u + tr];
                    S2 += vec4<f32>(dot(q2, k0), dot(q2, k1), dot(q2, k2), dot(q2, k3));
                    let q3 = tile_q[(g * 8u + c) * 32u + 24u + tr];
                    S3 += vec4<f32>(dot(q3, k0), dot(q3, k1), dot(q3, k2), dot(q3, k3));
                }
            }
            S0 *= params.x_scale;
            S1 *= params.x_scale;
            S2 *= params.x_scale;
            S3 *= params.x_scale;
            S0 = vec4<f32>(capped(S0.x), capped(S0.y), capped(S0.z), capped(S0.w));
            S1 = vec4<f32>(capped(S1.x), capped(S1.y), capped(S1.z), capped(S1.w));
            S2 = vec4<f32>(capped(S2.x), capped(S2.y), capped(S2.z), capped(S2.w));
            S3 = vec4<f32>(capped(S3.x), capped(S3.y), capped(S3.z), capped(S3.w));
            let keys = vec4<u32>(key + 0u + tc, key + 8u + tc, key + 16u + tc, key + 24u + tc);
            let at = vec4<u32>(params.keys_at) + min(keys, vec4<u32>(end - 1u));
            let pos = vec4<u32>(positions[at.x], positions[at.y], positions[at.z], positions[at.w]);
            let inside = keys < vec4<u32>(end);
            let vis0 = (vec4<u32>(lo0) <= pos) & (pos < vec4<u32>(hi0)) & inside;
            let vis1 = (vec4<u32>(lo1) <= pos) & (pos < vec4<u32>(hi1)) & inside;
            let vis2 = (vec4<u32>(lo2) <= pos) & (pos < vec4<u32>(hi2)) & inside;
            let vis3 = (vec4<u32>(lo3) <= pos) & (pos < vec4<u32>(hi3)) & inside;

            S0 = select(vec4<f32>(EMPTY_M), S0, vis0);
            seen0 = seen0 || any(vis0);
            S1 = select(vec4<f32>(EMPTY_M), S1, vis1);
            seen1 = seen1 || any(vis1);
            S2 = select(vec4<f32>(EMPTY_M), S2, vis2);
            seen2 = seen2 || any(vis2);
            S3 = select(vec4<f32>(EMPTY_M), S3, vis3);
            seen3 = seen3 || any(vis3);
            // The new maximum n of each row, from the maxima of its 8 threads.
            tile_p[tc * 32u + 0u + tr] = vec4<f32>(max(max(S0.x, S0.y), max(S0.z, S0.w)));
            tile_p[tc * 32u + 8u + tr] = vec4<f32>(max(max(S1.x, S1.y), max(S1.z, S1.w)));
            tile_p[tc * 32u + 16u + tr] = vec4<f32>(max(max(S2.x, S2.y), max(S2.z, S2.w)));
            tile_p[tc * 32u + 24u + tr] = vec4<f32>(max(max(S3.x, S3.y), max(S3.z, S3.w)));
            workgroupBarrier();
            var n0 = m0;
            var n1 = m1;
            var n2 = m2;
            var n3 = m3;
            for (var c = 0u; c < 8u; c++) {
                n0 = max(n0, tile_p[c * 32u + 0u + tr].x);
                n1 = max(n1, tile_p[c * 32u + 8u + tr].x);
                n2 = max(n2, tile_p[c * 32u + 16u + tr].x);
                n3 = max(n3, tile_p[c * 32u + 24u + tr].x);
            }
            workgroupBarrier();
            // P = e^(S - n), by what l and O so far shrink, and this thread's part of l.
            let corr0 = weight_of(m0 - n0);
            m0 = n0;
            let P0 = vec4<f32>(
                weight_of(S0.x - n0), weight_of(S0.y - n0),
                weight_of(S0.z - n0), weight_of(S0.w - n0));
            let kept0 = select(vec4<f32>(), P0, vis0);
            tile_p[tc * 32u + 0u + tr] = select(vec4<f32>(-1.0f), P0, vis0);
            l0 = l0 * corr0 + ((kept0.x + kept0.y) + (kept0.z + kept0.w));
            let corr1 = weight_of(m1 - n1);
            m1 = n1;
            let P1 = vec4<f32>(
                weight_of(S1.x - n1), weight_of(S1.y - n1),
                weight_of(S1.z - n1), weight_of(S1.w - n1));
            let kept1 = select(vec4<f32>(), P1, vis1);
            tile_p[tc * 32u + 8u + tr] = select(vec4<f32>(-1.0f), P1, vis1);
            l1 = l1 * corr1 + ((kept1.x + kept1.y) + (kept1.z + kept1.w));
            let corr2 = weight_of(m2 - n2);
            m2 = n2;
            let P2 = vec4<f32>(
                weight_of(S2.x - n2), weight_of(S2.y - n2),
                weight_of(S2.z - n2), weight_of(S2.w - n2));
            let kept2 = select(vec4<f32>(), P2, vis2);
            tile_p[tc * 32u + 16u + tr] = select(vec4<f32>(-1.0f), P2, vis2);
            l2 = l2 * corr2 + ((kept2.x + kept2.y) + (kept2.z + kept2.w));
            let corr3 = weight_of(m3 - n3);
            m3 = n3;
            let P3 = vec4<f32>(
                weight_of(S3.x - n3), weight_of(S3.y - n3),
                weight_of(S3.z - n3), weight_of(S3.w - n3));
            let kept3 = select(vec4<f32>(), P3, vis3);
            tile_p[tc * 32u + 24u + tr] = select(vec4<f32>(-1.0f), P3, vis3);
            l3 = l3 * corr3 + ((kept3.x + kept3.y) + (kept3.z + kept3.w));
            // O = O corr + P V. The first pass needs no barrier: those of the maxima are between K and V.
            // Slot s holds key 8 (s % 4) + s / 4.
            let slot0_0 = 0u + tr;
            tile_kv[slot0_0 * 8u + tc] = select(vec4<f32>(), load_v(v_base + min(key + (slot0_0 & 3u) * 8u + (slot0_0 >> 2u), end - 1u) * params.v_row, 0u + tc), key + (slot0_0 & 3u) * 8u + (slot0_0 >> 2u) < end);
            // Slot s holds key 8 (s % 4) + s / 4.
            let slot0_1 = 8u + tr;
            tile_kv[slot0_1 * 8u + tc] = select(vec4<f32>(), load_v(v_base + min(key + (slot0_1 & 3u) * 8u + (slot0_1 >> 2u), end - 1u) * params.v_row, 0u + tc), key + (slot0_1 & 3u) * 8u + (slot0_1 >> 2u) < end);
            // Slot s holds key 8 (s % 4) + s / 4.
            let slot0_2 = 16u + tr;
            tile_kv[slot0_2 * 8u + tc] = select(vec4<f32>(), load_v(v_base + min(key + (slot0_2 & 3u) * 8u + (slot0_2 >> 2u), end - 1u) * params.v_row, 0u + tc), key + (slot0_2 & 3u) * 8u + (slot0_2 >> 2u) < end);
            // Slot s holds key 8 (s % 4) + s / 4.
            let slot0_3 = 24u + tr;
            tile_kv[slot0_3 * 8u + tc] = select(vec4<f32>(), load_v(v_base + min(key + (slot0_3 & 3u) * 8u + (slot0_3 >> 2u), end - 1u) * params.v_row, 0u + tc), key + (slot0_3 & 3u) * 8u + (slot0_3 >> 2u) < end);
            workgroupBarrier();
            O0_0 *= corr0;
            O1_0 *= corr1;
            O2_0 *= corr2;
            O3_0 *= corr3;
            for (var s = 0u; s < 8u; s++) {
                let v0 = tile_kv[(s * 4u + 0u) * 8u + tc];
                let v1 = tile_kv[(s * 4u + 1u) * 8u + tc];
                let v2 = tile_kv[(s * 4u + 2u) * 8u + tc];
                let v3 = tile_kv[(s * 4u + 3u) * 8u + tc];
                let w0 = tile_p[s * 32u + 0u + tr];
                // Selected once more: neither the weight -1 nor the value of a hidden element may
                // enter the sum.
                O0_0 += (select(v0 * w0.x, vec4<f32>(), w0.x < 0.0f)
                    + select(v1 * w0.y, vec4<f32>(), w0.y < 0.0f))
                    + (select(v2 * w0.z, vec4<f32>(), w0.z < 0.0f)
                    + select(v3 * w0.w, vec4<f32>(), w0.w < 0.0f));
                let w1 = tile_p[s * 32u + 8u + tr];
                // Selected once more: neither the weight -1 nor the value of a hidden element may
                // enter the sum.
                O1_0 += (select(v0 * w1.x, vec4<f32>(), w1.x < 0.0f)
                    + select(v1 * w1.y, vec4<f32>(), w1.y < 0.0f))
                    + (select(v2 * w1.z, vec4<f32>(), w1.z < 0.0f)
                    + select(v3 * w1.w, vec4<f32>(), w1.w < 0.0f));
                let w2 = tile_p[s * 32u + 16u + tr];
                // Selected once more: neither the weight -1 nor the value of a hidden element may
                // enter the sum.
                O2_0 += (select(v0 * w2.x, vec4<f32>(), w2.x < 0.0f)
                    + select(v1 * w2.y, vec4<f32>(), w2.y < 0.0f))
                    + (select(v2 * w2.z, vec4<f32>(), w2.z < 0.0f)
                    + select(v3 * w2.w, vec4<f32>(), w2.w < 0.0f));
                let w3 = tile_p[s * 32u + 24u + tr];
                // Selected once more: neither the weight -1 nor the value of a hidden element may
                // enter the sum.
                O3_0 += (select(v0 * w3.x, vec4<f32>(), w3.x < 0.0f)
                    + select(v1 * w3.y, vec4<f32>(), w3.y < 0.0f))
                    + (select(v2 * w3.z, vec4<f32>(), w3.z < 0.0f)
                    + select(v3 * w3.w, vec4<f32>(), w3.w < 0.0f));
            }
        }

    }
    // l of a row, from its 8 threads: part of l, whether it saw a key, and (m, l) of the state, which one of them reads.
    workgroupBarrier();
    var ml0 = vec2<f32>();
    if (tc == 0u) {
        ml0 = state_ml[ml_at0];
    }
    tile_p[tc * 32u + 0u + tr] = vec4<f32>(l0, select(0.0f, 1.0f, seen0), ml0);
    var ml1 = vec2<f32>();
    if (tc == 0u) {
        ml1 = state_ml[ml_at1];
    }
    tile_p[tc * 32u + 8u + tr] = vec4<f32>(l1, select(0.0f, 1.0f, seen1), ml1);
    var ml2 = vec2<f32>();
    if (tc == 0u) {
        ml2 = state_ml[ml_at2];
    }
    tile_p[tc * 32u + 16u + tr] = vec4<f32>(l2, select(0.0f, 1.0f, seen2), ml2);
    var ml3 = vec2<f32>();
    if (tc == 0u) {
        ml3 = state_ml[ml_at3];
    }
    tile_p[tc * 32u + 24u + tr] = vec4<f32>(l3, select(0.0f, 1.0f, seen3), ml3);
    workgroupBarrier();
    var sum0 = vec4<f32>();
    var sum1 = vec4<f32>();
    var sum2 = vec4<f32>();
    var sum3 = vec4<f32>();
    for (var c = 0u; c < 8u; c++) {
        sum0 += tile_p[c * 32u + 0u + tr];
        sum1 += tile_p[c * 32u + 8u + tr];
        sum2 += tile_p[c * 32u + 16u + tr];
        sum3 += tile_p[c * 32u + 24u + tr];
    }
    // Merged into the state. A row that saw no key is not written.
    if (in0 && sum0.y > 0.0f) {
        let top = max(sum0.z, m0);
        let keep = weight_of(sum0.z - top);
        let found = weight_of(m0 - top);
        if (0u + tc < 4u) {
            state_a[a_at0 + 0u + tc] = state_a[a_at0 + 0u + tc] * keep + O0_0 * found;
        }
        if (tc == 0u) {
            state_ml[ml_at0] = vec2<f32>(top, sum0.w * keep + sum0.x * found);
        }
    }
    if (in1 && sum1.y > 0.0f) {
        let top = max(sum1.z, m1);
        let keep = weight_of(sum1.z - top);
        let found = weight_of(m1 - top);
        if (0u + tc < 4u) {
            state_a[a_at1 + 0u + tc] = state_a[a_at1 + 0u + tc] * keep + O1_0 * found;
        }
        if (tc == 0u) {
            state_ml[ml_at1] = vec2<f32>(top, sum1.w * keep + sum1.x * found);
        }
    }
    if (in2 && sum2.y > 0.0f) {
        let top = max(sum2.z, m2);
        let keep = weight_of(sum2.z - top);
        let found = weight_of(m2 - top);
        if (0u + tc < 4u) {
            state_a[a_at2 + 0u + tc] = state_a[a_at2 + 0u + tc] * keep + O2_0 * found;
        }
        if (tc == 0u) {
            state_ml[ml_at2] = vec2<f32>(top, sum2.w * keep + sum2.x * found);
        }
    }
    if (in3 && sum3.y > 0.0f) {
        let top = max(sum3.z, m3);
        let keep = weight_of(sum3.z - top);
        let found = weight_of(m3 - top);
        if (0u + tc < 4u) {
            state_a[a_at3 + 0u + tc] = state_a[a_at3 + 0u + tc] * keep + O3_0 * found;
        }
        if (tc == 0u) {
            state_ml[ml_at3] = vec2<f32>(top, sum3.w * keep + sum3.x * found);
        }
    }
}
