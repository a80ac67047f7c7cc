// The backward pass in f32, without tensor cores because their products have fewer bits; slow. A warp has one query row, or one
// key, and 32 of the other side at a time: one per lane for the logits, one element per lane for the sums.
#pragma once
#include "attend_f32.h"
#include "backward/common.h"

struct BackwardF32 {
    // FIXED: query rows or keys of a block. MOVING: of the other side, at a time.
    static constexpr u32 FIXED = 8, MOVING = 32, THREADS = FIXED * 32;
    static constexpr int MOST_DIM = AttentionF32::MOST_DIM;

    // P and dS of a pair, and the gradient of the bias: dS without the slope of the softcap.
    struct Pair {
        float p, ds, of_bias;
        bool seen;
    };

    // All rows have `dim` elements. The logit has exactly the rounding of the forward pass: P is relative to a log-sum-exp of
    // such logits.
    DEVICE static Pair pair(const BackwardArguments &args, u32 batch, TileRow at, const RowNumbers<F32> &row, const float *q,
                            const float *d_o, const float *k, const float *v, u32 position) {
        const AttendArguments &attend = args.attend;
        const float add = term<F32>(attend, batch, at, row.span, position);
        if (add == -INFINITE) return {0.0f, 0.0f, 0.0f, false};
        const float x = AttentionF32::scaled_dot(attend, q, k);
        const float bent = attend.cap != 0.0f ? tanh_exact(x) : 0.0f;
        const float logit = (attend.cap != 0.0f ? product(attend.cap, bent) : x) + add;
        const float p = share<F32>(logit, row.lse, row.lift);
        const float dp = AttentionF32::dot(attend.dim, d_o, v, 1.0f);
        const float of_bias = p * (dp - row.delta);
        return {p, of_bias * fused(-bent, bent, 1.0f), of_bias, true};
    }

    DEVICE static void queries(const BackwardArguments &args) {
        const AttendArguments &attend = args.attend;
        const u32 lane = thread_x() % 32;
        // The last tiles come first: under a causal mask they have the most keys.
        const u32 first = (attend.first_tile + grid_x() - 1 - block_x()) * FIXED;
        const Place at(attend, first / BACKWARD_TILE, attend.first_head + block_y(), attend.first_batch + block_z());
        const TileRow here{first + thread_x() / 32, at.head};
        if (here.row >= attend.rows) return;
        const RowNumbers<F32> row(args, at.batch, at.mask_class, here);
        const float *q = head_of<float>(attend.q, at.batch, here.head) + here.row * attend.q.row_stride;
        const float *d_o = head_of<float>(args.d_o, at.batch, here.head) + here.row * args.d_o.row_stride;
        const float *k = head_of<float>(attend.k, at.batch, at.kv_head);
        const float *v = head_of<float>(attend.v, at.batch, at.kv_head);
        float acc[MOST_DIM / 32];
        UNROLL for (int i = 0; i < MOST_DIM / 32; i++) acc[i] = 0.0f;
        for (Tiles tiles = at.tiles(attend); !tiles.done(); tiles.advance()) {
            const u32 first_key = tiles.tile() * MOVING, key = first_key + lane;
            const Pair mine = pair(args, at.batch, here, row, q, d_o, k + key * attend.k.row_stride,
                                   v + key * attend.v.row_stride, position_of(attend, key));
            const u32 seen = vote(mine.seen);
            for (u32 c = 0; c < MOVING; c++) {
                const float ds = shuffle(mine.ds, c);
                // Skipped instead of multiplied by 0: a hidden key may be NaN.
                if (!(seen >> c & 1)) continue;
                const float *from = k + (first_key + c) * attend.k.row_stride;
                UNROLL for (int i = 0; i < MOST_DIM / 32; i++)
                    if (lane + 32 * i < attend.dim) acc[i] = fused(ds, from[lane + 32 * i], acc[i]);
            }
        }
        float *dq = args.dq + ((u64(at.batch) * attend.rows + here.row) * attend.heads + here.head) * attend.dim;
        UNROLL for (int i = 0; i < MOST_DIM / 32; i++)
            if (lane + 32 * i < attend.dim) dq[lane + 32 * i] = fused(acc[i], args.scale, dq[lane + 32 * i]);
    }

    DEVICE static void keys(const BackwardArguments &args) {
        const AttendArguments &attend = args.attend;
        const u32 lane = thread_x() % 32;
        const KeyPlace at(attend, FIXED);
        const u32 key = at.first + thread_x() / 32;
        if (key >= attend.keys) return;
        const u32 position = attend.positions[key];
        const float *k = head_of<float>(attend.k, at.batch, at.kv_head) + key * attend.k.row_stride;
        const float *v = head_of<float>(attend.v, at.batch, at.kv_head) + key * attend.v.row_stride;
        float dk[MOST_DIM / 32], dv[MOST_DIM / 32];
        UNROLL for (int i = 0; i < MOST_DIM / 32; i++) dk[i] = dv[i] = 0.0f;
        for (u32 head = args.readers[at.kv_head]; head < args.readers[at.kv_head + 1]; head++) {
            const float *q = head_of<float>(attend.q, at.batch, head);
            const float *d_o = head_of<float>(args.d_o, at.batch, head);
            Tiles tiles = tiles_of(attend, at.mask_class, at.first / BACKWARD_TILE);
            for (; !tiles.done(); tiles.advance()) {
                const u32 first_row = tiles.tile() * MOVING, row = first_row + lane;
                const RowNumbers<F32> numbers(args, at.batch, at.mask_class, {row, head});
                const Pair mine = pair(args, at.batch, {row, head}, numbers, q + row * attend.q.row_stride,
                                       d_o + row * args.d_o.row_stride, k, v, position);
                const u32 seen = vote(mine.seen);
                for (u32 c = 0; c < MOVING; c++) {
                    const float p = shuffle(mine.p, c), ds = shuffle(mine.ds, c);
                    // As above: hidden rows of q and d_o may be NaN.
                    if (!(seen >> c & 1)) continue;
                    const float *of_q = q + (first_row + c) * attend.q.row_stride;
                    const float *of_d_o = d_o + (first_row + c) * args.d_o.row_stride;
                    UNROLL for (int i = 0; i < MOST_DIM / 32; i++) {
                        if (lane + 32 * i >= attend.dim) continue;
                        dk[i] = fused(ds, of_q[lane + 32 * i], dk[i]);
                        dv[i] = fused(p, of_d_o[lane + 32 * i], dv[i]);
                    }
                }
            }
        }
        const u64 into = at.batch * args.d_kv.batch_stride + key * args.d_kv.row_stride + at.kv_head * args.d_kv.head_stride;
        UNROLL for (int i = 0; i < MOST_DIM / 32; i++) {
            if (lane + 32 * i >= attend.dim) continue;
            float &of_dk = args.dk[into + lane + 32 * i], &of_dv = args.dv[into + lane + 32 * i];
            of_dk = fused(dk[i], args.scale, of_dk);
            of_dv += dv[i];
        }
    }

    // The gradient of a bias: a warp has one key, and 32 rows of one query head at a time.
    DEVICE static void bias(const BackwardArguments &args) {
        const AttendArguments &attend = args.attend;
        const u32 lane = thread_x() % 32;
        const BiasPlace at(args, FIXED);
        const u32 key = at.first + thread_x() / 32;
        if (key >= attend.keys) return;
        const u32 position = attend.positions[key];
        const float *k = head_of<float>(attend.k, at.batch, at.kv_head) + key * attend.k.row_stride;
        const float *v = head_of<float>(attend.v, at.batch, at.kv_head) + key * attend.v.row_stride;
        const float *q = head_of<float>(attend.q, at.batch, at.head);
        const float *d_o = head_of<float>(args.d_o, at.batch, at.head);
        // Where all queries share a row: the sum over this lane's rows.
        const bool shared = args.bias_sum.row_stride == 0;
        float sum = 0.0f;
        Tiles tiles = tiles_of(attend, at.mask_class, at.first / BACKWARD_TILE);
        for (; !tiles.done(); tiles.advance()) {
            const u32 row = tiles.tile() * MOVING + lane;
            const RowNumbers<F32> numbers(args, at.batch, at.mask_class, {row, at.head});
            const Pair mine = pair(args, at.batch, {row, at.head}, numbers, q + row * attend.q.row_stride,
                                   d_o + row * args.d_o.row_stride, k, v, position);
            sum += mine.of_bias;
            if (mine.seen && !shared) at.into[row * args.bias_sum.row_stride + position] += mine.of_bias;
        }
        if (!shared) return;
        for (u32 apart = 16; apart; apart /= 2) sum += shuffle_xor(sum, apart);
        if (lane == 0) at.into[position] += sum;
    }
};
