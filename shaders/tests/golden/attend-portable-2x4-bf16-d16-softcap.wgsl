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
// A workgroup has a tile of rows of one batch entry and head. It starts from an empty (m, l, O) in registers, goes through
// its keys tile by tile, and merges with the state at the end. m' is n in the code, e^(m - m') is corr. The factor `scale`
// is split: q_scale, at most 1, is on q; x_scale, the rest, is on the product, because q times it may be out of range.
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
// Work list. A run is a range of keys first..end, two words from runs_at on; first is a multiple of Bc. For tile t of class
// c, at = c · starts_class + 2t: the runs with the numbers work[at] up to work[at + 1] are full, every row of the tile sees
// every key; those up to work[at + 2] are partial. A run whose end is not a multiple of Bc is partial. Keys in no run cost
// nothing. In a tested run each pair tests lo <= position < hi; tested are partial runs, and with a bias all runs.
//
// NaN and infinity pass through to the rows that see them. The logit of a hidden pair is replaced by BELOW_EMPTY, so that
// its P is exactly 0. In a tested run, NaN and infinities of V are zero in workgroup memory, because 0 · NaN is NaN; at
// the end they are added to the rows that see them. A row that saw no key in the whole call is not written.
//
// Tile: Br = 16 query rows x Bc = 32 keys; 8192 bytes of workgroup memory.
//
// 64 threads are a grid of 8 x 8. Of the tile's S, thread (tr, tc) holds 2 x 4: rows tr, tr + 8, ..., keys tc, tc + 8,
// ..., as vectors of 4 keys (S0_0: row 0, first 32 keys of the tile; then P0_0).
// S = q k^T goes in passes of 32 elements of the head. P V goes by 32 keys, and in passes of 64 elements: a thread holds 2
// chunks of each pass for its rows (O0_0, O0_1: row 0, pass 0), or 1 chunk of a last pass with at most 32 elements. The 8
// threads of a row agree on its m by workgroup memory, and keep their own part of l until the end.
//
// Workgroup memory. K and V lie there as they are stored: 16-bit elements take half the room and half the reads.
//   tile_q   a pass of q · q_scale, chunk-major; at the end whether each thread took NaN or infinity out of V
//   tile_kv  a pass of K, unit-major; then a pass of V, key-major
//   tile_p   P of 32 keys, slot-major: slot s has the keys s, s + 8, s + 16 and s + 24 as one vector. Also row maxima,
//            the vote on skipping a tile, and at the end l
// Rows and keys are swizzled (x ^ slot): neighbouring threads write to different banks.
//
// Barriers stand where a tile is replaced (everyone has read the old one) and where it is read
// (everyone has written the new one). workgroupUniformLoad is one too.
//
// No compiler can know the bounds of the inner loops, so none unrolls them. Their bodies have 64 and more multiply-adds for
// each row of a thread; copies of them would spill registers and leave the instruction cache.
// attend-portable-2x4-bf16-d16-softcap
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

// The logit of a hidden pair: finite, and so far below EMPTY_M that its weight is 0.
const BELOW_EMPTY: f32 = -3e38f;

var<workgroup> tile_q: array<vec4<f32>, 128>;
var<workgroup> tile_kv: array<vec4<u32>, 256>;
var<workgroup> tile_p: array<vec4<f32>, 128>;

// Which elements are NaN or infinite.
fn odd_in(chunk: vec4<f32>) -> vec4<bool> {
    return (bitcast<vec4<u32>>(chunk) & vec4<u32>(0x7f800000u)) == vec4<u32>(0x7f800000u);
}
// `unit` with 0 for these elements.
fn finite_part(unit: vec4<u32>) -> vec4<u32> {
    let low = vec4<u32>(0x7f80u);
    let high = vec4<u32>(0x7f80u << 16u);
    return select(unit & vec4<u32>(0xffffu), vec4<u32>(), (unit & low) == low)
        | select(unit & vec4<u32>(0xffff0000u), vec4<u32>(), (unit & high) == high);
}

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32
) {
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
    let q_base = params.q_offset + batch * params.q_batch + head * params.q_head;
    let k_base = params.k_offset + batch * params.k_batch + kv_head * params.k_head;
    let v_base = params.v_offset + batch * params.v_batch + kv_head * params.v_head;
    // Whether this thread took NaN or infinity out of V.
    var odd = false;
    var m0 = EMPTY_M;
    var l0 = 0.0f;
    var seen0 = full_runs < partial_runs;
    var O0_0 = vec4<f32>();
    var m1 = EMPTY_M;
    var l1 = 0.0f;
    var seen1 = full_runs < partial_runs;
    var O1_0 = vec4<f32>();
    for (var run = full_runs; run < runs_end; run++) {
        let first = max(work[params.runs_at + 2u * run], params.key_begin);
        let end = min(work[params.runs_at + 2u * run + 1u], params.key_end);
        let tested = run >= partial_runs;
        for (var key = first; key < end; key += 32u) {
            // 1, which only key < end says.
            let one = min(end - key, 1u);
            // S = q k^T.
            var S0_0 = vec4<f32>();
            var S1_0 = vec4<f32>();
            for (var g = 0u; g < 1u * one; g++) {
                workgroupBarrier();
                tile_q[tc * 16u + 0u + (tr ^ tc)] = load_q(q_base + min(tile * 16u + 0u + tr, params.rows - 1u) * params.q_row, g * 8u + tc) * params.q_scale;
                tile_q[tc * 16u + 8u + (tr ^ tc)] = load_q(q_base + min(tile * 16u + 8u + tr, params.rows - 1u) * params.q_row, g * 8u + tc) * params.q_scale;
                let k_unit = thread & 3u;
                let k_key = thread >> 2u;
                let k_at = k_base + min(g * 4u + k_unit, 1u);
                let k_slot = k_unit * 32u + (k_key ^ (k_unit * 2u));
                tile_kv[k_slot + 0u] = k[k_at + min(key + k_key + 0u, end - 1u) * params.k_row];
                tile_kv[k_slot + 16u] = k[k_at + min(key + k_key + 16u, end - 1u) * params.k_row];
                workgroupBarrier();
                let units_here = min(2u - g * 4u, 4u * one);
                for (var n = 0u; n < units_here; n++) {
                    let u = n & 3u;
                    let c0 = u * 2u + 0u;
                    let q0_0 = tile_q[c0 * 16u + 0u + (tr ^ c0)];
                    let q1_0 = tile_q[c0 * 16u + 8u + (tr ^ c0)];
                    let c1 = u * 2u + 1u;
                    let q0_1 = tile_q[c1 * 16u + 0u + (tr ^ c1)];
                    let q1_1 = tile_q[c1 * 16u + 8u + (tr ^ c1)];
                    let k_column = u * 32u + (tc ^ (u * 2u));
                    let k0_0 = tile_kv[k_column + 0u];
                    let k0_0_0 = chunk_0(k0_0);
                    S0_0.x += dot(q0_0, k0_0_0);
                    S1_0.x += dot(q1_0, k0_0_0);
                    let k0_0_1 = chunk_1(k0_0);
                    S0_0.x += dot(q0_1, k0_0_1);
                    S1_0.x += dot(q1_1, k0_0_1);
                    let k0_1 = tile_kv[k_column + 8u];
                    let k0_1_0 = chunk_0(k0_1);
                    S0_0.y += dot(q0_0, k0_1_0);
                    S1_0.y += dot(q1_0, k0_1_0);
                    let k0_1_1 = chunk_1(k0_1);
                    S0_0.y += dot(q0_1, k0_1_1);
                    S1_0.y += dot(q1_1, k0_1_1);
                    let k0_2 = tile_kv[k_column + 16u];
                    let k0_2_0 = chunk_0(k0_2);
                    S0_0.z += dot(q0_0, k0_2_0);
                    S1_0.z += dot(q1_0, k0_2_0);
                    let k0_2_1 = chunk_1(k0_2);
                    S0_0.z += dot(q0_1, k0_2_1);
                    S1_0.z += dot(q1_1, k0_2_1);
                    let k0_3 = tile_kv[k_column + 24u];
                    let k0_3_0 = chunk_0(k0_3);
                    S0_0.w += dot(q0_0, k0_3_0);
                    S1_0.w += dot(q1_0, k0_3_0);
                    let k0_3_1 = chunk_1(k0_3);
                    S0_0.w += dot(q0_1, k0_3_1);
                    S1_0.w += dot(q1_1, k0_3_1);
                }
            }
            S0_0 *= params.x_scale;
            S0_0 = vec4<f32>(capped(S0_0.x), capped(S0_0.y), capped(S0_0.z), capped(S0_0.w));
            S1_0 *= params.x_scale;
            S1_0 = vec4<f32>(capped(S1_0.x), capped(S1_0.y), capped(S1_0.z), capped(S1_0.w));
            if (tested) {
                {
                let keys = vec4<u32>(key + 0u + tc) + vec4<u32>(0u, 8u, 16u, 24u);
                let at = vec4<u32>(params.keys_at) + min(keys, vec4<u32>(end - 1u));
                let pos = vec4<u32>(positions[at.x], positions[at.y], positions[at.z], positions[at.w]);
                let inside = keys < vec4<u32>(end);
                let span0 = spans + 2u * min(tile * 16u + 0u + tr, params.rows - 1u);
                let in_span0 = (vec4<u32>(positions[span0]) <= pos) & (pos < vec4<u32>(positions[span0 + 1u])) & inside;
                let vis0 = in_span0;
                let span1 = spans + 2u * min(tile * 16u + 8u + tr, params.rows - 1u);
                let in_span1 = (vec4<u32>(positions[span1]) <= pos) & (pos < vec4<u32>(positions[span1 + 1u])) & inside;
                let vis1 = in_span1;

                    S0_0 = select(vec4<f32>(BELOW_EMPTY), S0_0, vis0);
                    seen0 = seen0 || any(vis0);
                    S1_0 = select(vec4<f32>(BELOW_EMPTY), S1_0, vis1);
                    seen1 = seen1 || any(vis1);
                }
            }
            // The new maximum n of each row, from those of its 8 threads.
            let most0 = S0_0;
            var n0 = max(m0, max(max(most0.x, most0.y), max(most0.z, most0.w)));
            tile_p[tc * 16u + 0u + (tr ^ tc)] = vec4<f32>(n0);
            let most1 = S1_0;
            var n1 = max(m1, max(max(most1.x, most1.y), max(most1.z, most1.w)));
            tile_p[tc * 16u + 8u + (tr ^ tc)] = vec4<f32>(n1);
            workgroupBarrier();
            for (var c = 0u; c < 8u; c++) {
                n0 = max(n0, tile_p[c * 16u + 0u + (tr ^ c)].x);
                n1 = max(n1, tile_p[c * 16u + 8u + (tr ^ c)].x);
            }
            // P = e^(S - n), by what l and O so far shrink, and this thread's part of l.
            let corr0 = weight_of(m0 - n0);
            m0 = n0;
            let P0_0 = vec4<f32>(
                weight_of(S0_0.x - n0), weight_of(S0_0.y - n0),
                weight_of(S0_0.z - n0), weight_of(S0_0.w - n0));
            let sum0 = P0_0;
            l0 = l0 * corr0 + ((sum0.x + sum0.y) + (sum0.z + sum0.w));
            O0_0 *= corr0;
            let corr1 = weight_of(m1 - n1);
            m1 = n1;
            let P1_0 = vec4<f32>(
                weight_of(S1_0.x - n1), weight_of(S1_0.y - n1),
                weight_of(S1_0.z - n1), weight_of(S1_0.w - n1));
            let sum1 = P1_0;
            l1 = l1 * corr1 + ((sum1.x + sum1.y) + (sum1.z + sum1.w));
            O1_0 *= corr1;
            // O += P V.
            let v_unit = thread & 7u;
            let v_key = thread >> 3u;
            let slots0 = min(8u, max(end, key + 0u) - (key + 0u));
            workgroupBarrier();
            tile_p[tc * 16u + 0u + (tr ^ tc)] = P0_0;
            tile_p[tc * 16u + 8u + (tr ^ tc)] = P1_0;
            {
                let v_at = v_base + min(0u + v_unit, 1u);
                var unit0_0 = v[v_at + min(key + v_key + 0u, end - 1u) * params.v_row];
                var unit0_1 = v[v_at + min(key + v_key + 8u, end - 1u) * params.v_row];
                var unit0_2 = v[v_at + min(key + v_key + 16u, end - 1u) * params.v_row];
                var unit0_3 = v[v_at + min(key + v_key + 24u, end - 1u) * params.v_row];
                if (tested) {
                    let finite0 = finite_part(unit0_0);
                    odd = odd || any(bitcast<vec4<u32>>(finite0) != bitcast<vec4<u32>>(unit0_0));
                    unit0_0 = finite0;
                    let finite1 = finite_part(unit0_1);
                    odd = odd || any(bitcast<vec4<u32>>(finite1) != bitcast<vec4<u32>>(unit0_1));
                    unit0_1 = finite1;
                    let finite2 = finite_part(unit0_2);
                    odd = odd || any(bitcast<vec4<u32>>(finite2) != bitcast<vec4<u32>>(unit0_2));
                    unit0_2 = finite2;
                    let finite3 = finite_part(unit0_3);
                    odd = odd || any(bitcast<vec4<u32>>(finite3) != bitcast<vec4<u32>>(unit0_3));
                    unit0_3 = finite3;
                }
                tile_kv[thread + 0u] = unit0_0;
                tile_kv[thread + 64u] = unit0_1;
                tile_kv[thread + 128u] = unit0_2;
                tile_kv[thread + 192u] = unit0_3;
            }
            workgroupBarrier();
            for (var n = 0u; n < slots0; n++) {
                let s = n & 7u;
                let w0 = tile_p[s * 16u + 0u + (tr ^ s)];
                let w1 = tile_p[s * 16u + 8u + (tr ^ s)];
                let v0 = tile_kv[s * 8u + (tc >> 1u) + 0u];
                let v0_0 = select(chunk_0(v0), chunk_1(v0), (tc & 1u) == 1u);
                O0_0 += v0_0 * w0.x;
                O1_0 += v0_0 * w1.x;
                let v1 = tile_kv[s * 8u + (tc >> 1u) + 64u];
                let v1_0 = select(chunk_0(v1), chunk_1(v1), (tc & 1u) == 1u);
                O0_0 += v1_0 * w0.y;
                O1_0 += v1_0 * w1.y;
                let v2 = tile_kv[s * 8u + (tc >> 1u) + 128u];
                let v2_0 = select(chunk_0(v2), chunk_1(v2), (tc & 1u) == 1u);
                O0_0 += v2_0 * w0.z;
                O1_0 += v2_0 * w1.z;
                let v3 = tile_kv[s * 8u + (tc >> 1u) + 192u];
                let v3_0 = select(chunk_0(v3), chunk_1(v3), (tc & 1u) == 1u);
                O0_0 += v3_0 * w0.w;
                O1_0 += v3_0 * w1.w;
            }
        }
    }
    // NaN and infinity of V: where one is in a column of this thread, the keys of tested runs are gone through once more.
    // Their weight is left out: it is more than 0, and changes neither.
    workgroupBarrier();
    tile_q[thread] = vec4<f32>(select(0.0f, 1.0f, odd));
    workgroupBarrier();
    var odds = 0.0f;
    for (var r = 0u; r < 8u; r++) { odds += tile_q[r * 8u + tc].x + tile_q[r * 8u + (tc >> 1u)].x; }
    if (odds > 0.0f) {
        for (var run = partial_runs; run < runs_end; run++) {
        let first = max(work[params.runs_at + 2u * run], params.key_begin);
        let end = min(work[params.runs_at + 2u * run + 1u], params.key_end);
            for (var key = first; key < end; key++) {
                let pos = positions[params.keys_at + key];
                let span0 = spans + 2u * min(tile * 16u + 0u + tr, params.rows - 1u);
                let vis0 = positions[span0] <= pos && pos < positions[span0 + 1u]
                    ;
                let span1 = spans + 2u * min(tile * 16u + 8u + tr, params.rows - 1u);
                let vis1 = positions[span1] <= pos && pos < positions[span1 + 1u]
                    ;
                {
                    let unit = v[v_base + key * params.v_row + min(0u + (tc >> 1u), 1u)];
                    let chunk = select(chunk_0(unit), chunk_1(unit), (tc & 1u) == 1u);
                    let odd_part = select(vec4<f32>(), chunk, odd_in(chunk));
                    O0_0 += select(vec4<f32>(), odd_part, vis0);
                    O1_0 += select(vec4<f32>(), odd_part, vis1);
                }
            }
        }
    }
    // l of a row, from its 8 threads: part of l, whether it saw a key, and (m, l) of the state, which one of them reads.
    workgroupBarrier();
    let state0 = params.ml_offset + (batch * params.heads + head) * params.rows + min(tile * 16u + 0u + tr, params.rows - 1u);
    var ml0 = vec2<f32>();
    if (tc == 0u) {
        ml0 = state_ml[state0];
    }
    tile_p[tc * 16u + 0u + (tr ^ tc)] = vec4<f32>(l0, select(0.0f, 1.0f, seen0), ml0);
    let state1 = params.ml_offset + (batch * params.heads + head) * params.rows + min(tile * 16u + 8u + tr, params.rows - 1u);
    var ml1 = vec2<f32>();
    if (tc == 0u) {
        ml1 = state_ml[state1];
    }
    tile_p[tc * 16u + 8u + (tr ^ tc)] = vec4<f32>(l1, select(0.0f, 1.0f, seen1), ml1);
    workgroupBarrier();
    var sum0 = vec4<f32>();
    var sum1 = vec4<f32>();
    for (var c = 0u; c < 8u; c++) {
        sum0 += tile_p[c * 16u + 0u + (tr ^ c)];
        sum1 += tile_p[c * 16u + 8u + (tr ^ c)];
    }
    // Merged into the state. A row that saw no key is not written.
    if (tile * 16u + 0u + tr < params.rows && sum0.y > 0.0f) {
        let top = max(sum0.z, m0);
        let keep = weight_of(sum0.z - top);
        let found = weight_of(m0 - top);
        let a_at = params.a_offset + ((batch * params.rows + tile * 16u + 0u + tr) * params.heads + head) * 4u;
        if (0u + tc < 4u) {
            state_a[a_at + 0u + tc] = state_a[a_at + 0u + tc] * keep + O0_0 * found;
        }
        if (tc == 0u) {
            state_ml[state0] = vec2<f32>(top, sum0.w * keep + sum0.x * found);
        }
    }
    if (tile * 16u + 8u + tr < params.rows && sum1.y > 0.0f) {
        let top = max(sum1.z, m1);
        let keep = weight_of(sum1.z - top);
        let found = weight_of(m1 - top);
        let a_at = params.a_offset + ((batch * params.rows + tile * 16u + 8u + tr) * params.heads + head) * 4u;
        if (0u + tc < 4u) {
            state_a[a_at + 0u + tc] = state_a[a_at + 0u + tc] * keep + O1_0 * found;
        }
        if (tc == 0u) {
            state_ml[state1] = vec2<f32>(top, sum1.w * keep + sum1.x * found);
        }
    }
}
