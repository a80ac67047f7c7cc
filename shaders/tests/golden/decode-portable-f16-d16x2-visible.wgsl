// Attention of few query rows against many keys, within WebGPU's default limits: no feature, 64
// threads, less than 16 KiB of workgroup memory. attend/portable.wgsl says what is computed.
//
// A workgroup has one KV head, the rows of all query heads that read it, and one split of the keys.
// It writes a part: the state of those rows over this split alone. decode/merge_parts.wgsl merges
// all parts of a row into its running state. A slot is one (query row, query head) pair of a
// workgroup: slot = row · group_heads + head - first head; here 2. All slots read the same keys, so
// each key is loaded once for all of them.
//
// Bindings are those of attend/portable.wgsl without the state:
//   part_a   O: f32 [item, slot, dim], dense
//   part_ml  m and l: f32 [item, slot, 2], dense. Where l is UNSEEN the slot saw no key of the split,
//            and its m and O mean nothing.
// The runs of the work list only say which keys to skip; each pair is tested against its row's
// span, which costs little with one key for each thread. All rows are in tile 0.
//
// 64 keys at a time, in three phases. Each thread takes one key, and computes its logits for all
// slots (S0, S1, ...), from the queries in workgroup memory. Then m of each slot is found, by
// 8 threads for each. Then each thread takes a column of V, one unit, with O in registers (O0_0_0: first slot,
// first column, first chunk): for every 32-th key; at the end these slices are added up.
//
// Workgroup memory, 2768 bytes
//   queries  q times its factor
//   weights  logits, then P, at the end each thread's part of l. A hidden pair has weight -1; others are never negative.
//   tops     the maxima that the finders found
//   maxima   m of each slot, and by what its sums shrink
//   sums     O of the slices
// decode-portable-f16-d16x2-visible
struct DecodeParams {
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
    rows: u32,
    group_heads: u32,
    groups: u32,
    key_begin: u32,
    key_end: u32,
    splits: u32,
    split_keys: u32,
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
    pad: u32,
}
@group(0) @binding(0) var<uniform> params: DecodeParams;
@group(0) @binding(1) var<storage, read> q: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> k: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> v: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read_write> part_a: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read_write> part_ml: array<vec2<f32>>;
@group(0) @binding(6) var<storage, read> positions: array<u32>;
@group(0) @binding(7) var<storage, read> work: array<u32>;
@group(0) @binding(8) var<storage, read> bias: array<u32>;

// m of a row that saw no key: finite, because WGSL promises nothing about infinities.
const EMPTY_M: f32 = -2.3819763e38f;

fn chunk_0(unit: vec4<u32>) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(unit.x), unpack2x16float(unit.y));
}
fn chunk_1(unit: vec4<u32>) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(unit.z), unpack2x16float(unit.w));
}

// e^below, the weight of a key whose logit is `below` the largest one of its row. Below -150 the
// power is 0 in f32, and the product with log2 e cannot overflow. NaN is handled by bits: WGSL
// promises nothing about the exp2 of a NaN, and `max` may drop it.
fn weight_of(below: f32) -> f32 {
    let power = exp2(max(below, -150.0f) * 1.442695f);
    return select(power, below, (bitcast<u32>(below) & 0x7fffffffu) > 0x7f800000u);
}

// A hidden pair: below every logit with a bias, and finite. It must never be added.
const HIDDEN: f32 = -3e38f;
// By bits, so that NaN is shown: SPIR-V from naga has `!=` false for NaN.
fn shows(term: f32) -> bool { return bitcast<u32>(term) != 0xff61b1e6u; }
// What the row that starts at `row` of the binding adds to its logit of the key at `position`; or
// HIDDEN.
fn bias_term(row: u32, position: u32) -> f32 {
    let bit = (bias[row + (position >> 5u)] >> (position & 31u)) & 1u;
    return select(HIDDEN, 0.0f, bit == 1u);
}

// l of a slot that saw no key of its split; no sum of weights is negative. Its m and O mean nothing.
const UNSEEN: f32 = -1.0f;
// By bits, so that NaN counts as seen.
fn is_unseen(l: f32) -> bool { return bitcast<u32>(l) == 0xbf800000u; }

var<workgroup> queries: array<vec4<f32>, 8>;
var<workgroup> weights: array<f32, 128>;
var<workgroup> tops: array<f32, 16>;
var<workgroup> maxima: array<vec2<f32>, 2>;
var<workgroup> sums: array<vec4<f32>, 128>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group_id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let group = group_id.x + group_id.y * params.grid_width;
    if (group >= params.items) { return; }
    let item = params.first_item + group;
    let batch_group = item / params.splits;
    let batch = params.batch_first + batch_group / params.groups;
    let first_head = (batch_group % params.groups) * params.group_heads;
    let kv_head = positions[first_head];
    let split_begin = params.key_begin + (item % params.splits) * params.split_keys;
    let split_end = min(split_begin + params.split_keys, params.key_end);
    let class_index = min(batch, params.last_class);
    let starts = class_index * params.starts_class;
    let spans = params.spans_at + 2u * class_index * params.rows;
    let row0 = 0u / params.group_heads;
    let lo0 = positions[spans + 2u * row0];
    let hi0 = positions[spans + 2u * row0 + 1u];
    let bias_row0 = params.bias_offset + batch * params.bias_batch + (0u / params.group_heads) * params.bias_row
        + (first_head + 0u % params.group_heads) * params.bias_head;
    let row1 = 1u / params.group_heads;
    let lo1 = positions[spans + 2u * row1];
    let hi1 = positions[spans + 2u * row1 + 1u];
    let bias_row1 = params.bias_offset + batch * params.bias_batch + (1u / params.group_heads) * params.bias_row
        + (first_head + 1u % params.group_heads) * params.bias_head;
    let k_base = params.k_offset + batch * params.k_batch + kv_head * params.k_head;
    let v_base = params.v_offset + batch * params.v_batch + kv_head * params.v_head;
    let column = thread % 2u;
    let slice = thread / 2u;
    for (var i = thread; i < 4u; i += 64u) {
        let slot = i / 2u;
        let q_row = (slot / params.group_heads) * params.q_row;
        let q_head = (first_head + slot % params.group_heads) * params.q_head;
        let unit = q[params.q_offset + batch * params.q_batch + q_row + q_head + i % 2u];
        queries[i * 2u + 0u] = chunk_0(unit) * params.q_scale;
        queries[i * 2u + 1u] = chunk_1(unit) * params.q_scale;
    }
    if (thread < 2u) { maxima[thread] = vec2<f32>(EMPTY_M, 1.0f); }
    // A bit for each slot that saw a key of this thread.
    var seen = 0u;
    var l0 = 0.0f;
    var l1 = 0.0f;
    var O0_0_0 = vec4<f32>();
    var O0_0_1 = vec4<f32>();
    var O1_0_0 = vec4<f32>();
    var O1_0_1 = vec4<f32>();
    workgroupBarrier();
    for (var run = work[starts]; run < work[starts + 2u]; run++) {
        let first = max(work[params.runs_at + 2u * run], split_begin);
        let end = min(work[params.runs_at + 2u * run + 1u], split_end);
        for (var key = first; key < end; key += 64u) {
            // S of the thread's key.
            let own = min(key + thread, end - 1u);
            let inside = key + thread < end;
            let position = positions[params.keys_at + own];
            let k_at = k_base + own * params.k_row;
            var S0 = 0.0f;
            var S1 = 0.0f;
            let term0 = bias_term(bias_row0, position);
            let vis0 = inside && lo0 <= position && position < hi0 && shows(term0);
            let term1 = bias_term(bias_row1, position);
            let vis1 = inside && lo1 <= position && position < hi1 && shows(term1);
            // Neighbouring threads together skip keys that a tensor hides from all slots. Spans
            // leave few such keys.
            if (vis0 || vis1) {
                for (var u = 0u; u < 2u; u++) {
                    let unit = k[k_at + u];
                    // A bound that compilers see: no test of each index.
                    let q_at = min(u, 1u) * 2u;
                    let k_0 = chunk_0(unit);
                    S0 += dot(queries[0u + q_at], k_0);
                    S1 += dot(queries[4u + q_at], k_0);
                    let k_1 = chunk_1(unit);
                    S0 += dot(queries[1u + q_at], k_1);
                    S1 += dot(queries[5u + q_at], k_1);
                }

            }
            // The weights of the keys before these have been read.
            workgroupBarrier();
            var slots_here = 0u;
            S0 *= params.x_scale;
            S0 = S0 + term0;
            slots_here |= select(0u, 1u, vis0);
            weights[0u + thread] = select(EMPTY_M, S0, vis0);
            S1 *= params.x_scale;
            S1 = S1 + term1;
            slots_here |= select(0u, 2u, vis1);
            weights[64u + thread] = select(EMPTY_M, S1, vis1);
            seen |= slots_here;
            workgroupBarrier();
            // m of each slot.
            if (thread < 16u) {
                var top = EMPTY_M;
                for (var i = thread % 8u; i < 64u; i += 8u) {
                    top = max(top, weights[(thread / 8u) * 64u + i]);
                }
                tops[thread] = top;
            }
            workgroupBarrier();
            if (thread < 2u) {
                let before = maxima[thread].x;
                var top = before;
                for (var i = 0u; i < 8u; i++) { top = max(top, tops[thread * 8u + i]); }
                maxima[thread] = vec2<f32>(top, weight_of(before - top));
            }
            workgroupBarrier();
            // P, and this thread's part of l.
            let all0 = weight_of(weights[0u + thread] - maxima[0].x);
            let P0 = select(0.0f, all0, (slots_here & 1u) != 0u);
            l0 = l0 * maxima[0].y + P0;
            weights[0u + thread] = select(-1.0f, P0, (slots_here & 1u) != 0u);
            let all1 = weight_of(weights[64u + thread] - maxima[1].x);
            let P1 = select(0.0f, all1, (slots_here & 2u) != 0u);
            l1 = l1 * maxima[1].y + P1;
            weights[64u + thread] = select(-1.0f, P1, (slots_here & 2u) != 0u);
            workgroupBarrier();
            // O of this thread's columns over its slice of the keys.
            O0_0_0 *= maxima[0u].y;
            O0_0_1 *= maxima[0u].y;
            O1_0_0 *= maxima[1u].y;
            O1_0_1 *= maxima[1u].y;
            // Threads without a column have nothing to do.
            let first_own = select(64u, slice, slice < 32u);
            let here = min(end - key, 64u);
            for (var i = first_own; i < here; i += 32u) {
                let v_at = v_base + (key + i) * params.v_row + column;
                let w0 = weights[0u * 64u + (i & 63u)];
                let w1 = weights[1u * 64u + (i & 63u)];
                if (w0 < 0.0f && w1 < 0.0f) { continue; }
                
                let unit0 = v[v_at + 0u];
                let v0_0 = chunk_0(unit0);
                O0_0_0 += select(v0_0 * w0, vec4<f32>(), w0 < 0.0f);
                O1_0_0 += select(v0_0 * w1, vec4<f32>(), w1 < 0.0f);
                let v0_1 = chunk_1(unit0);
                O0_0_1 += select(v0_1 * w0, vec4<f32>(), w0 < 0.0f);
                O1_0_1 += select(v0_1 * w1, vec4<f32>(), w1 < 0.0f);
                
            }

        }
    }
    // The part: l of each slot from all threads, O from all slices.
    workgroupBarrier();
    weights[0u + thread] = select(UNSEEN, l0, (seen & 1u) != 0u);
    weights[64u + thread] = select(UNSEEN, l1, (seen & 2u) != 0u);
    workgroupBarrier();
    if (thread < 2u) {
        var l = 0.0f;
        var seen = false;
        for (var i = 0u; i < 64u; i++) {
            let own_l = weights[thread * 64u + i];
            if (!is_unseen(own_l)) {
                l += own_l;
                seen = true;
            }
        }
        part_ml[item * 2u + thread] = vec2<f32>(maxima[thread].x, select(UNSEEN, l, seen));
    }
    if (slice < 32u) {
        sums[slice * 4u + column * 2u + 0u] = O0_0_0;
        sums[slice * 4u + column * 2u + 1u] = O0_0_1;
    }
    workgroupBarrier();
    if (thread < 4u) {
        var sum0 = vec4<f32>();
        for (var i = 0u; i < 32u; i++) { sum0 += sums[i * 4u + thread]; }
        part_a[(item * 2u + 0u) * 4u + thread] = sum0;
    }
    workgroupBarrier();
    if (slice < 32u) {
        sums[slice * 4u + column * 2u + 0u] = O1_0_0;
        sums[slice * 4u + column * 2u + 1u] = O1_0_1;
    }
    workgroupBarrier();
    if (thread < 4u) {
        var sum1 = vec4<f32>();
        for (var i = 0u; i < 32u; i++) { sum1 += sums[i * 4u + thread]; }
        part_a[(item * 2u + 1u) * 4u + thread] = sum1;
    }
    workgroupBarrier();
}
