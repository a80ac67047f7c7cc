// Attention in f32, without tensor cores because their products have fewer bits; slow. A warp has one query row and 32 keys at
// a time: one key per lane for the scores, one element per lane for the sum of values.
#pragma once
#include "convert.h"

struct AttentionF32 {
    static constexpr int Br = 8, Bc = 32, THREADS = Br * 32, MOST_DIM = 256;

    DEVICE static void run(const AttendArguments &args) {
        const Place at(args);
        attend(args, at, at.row(Br, thread_x() / 32));
    }

    // Computes one row with one warp. Warps do not wait for each other.
    template <typename At> DEVICE static void attend(const AttendArguments &args, const At &at, TileRow here) {
        if (here.row >= args.rows) return;
        const u32 lane = thread_x() % 32;
        const RowSpan span = at.span(args, here.row);
        const float *q = head_of<float>(args.q, at.batch, here.head) + here.row * args.q.row_stride;
        const float *k = head_of<float>(args.k, at.batch, at.kv_head);
        const float *v = head_of<float>(args.v, at.batch, at.kv_head);
        float O[MOST_DIM / 32], m = -INFINITE, l = 0.0f;
        UNROLL for (int i = 0; i < MOST_DIM / 32; i++) O[i] = 0.0f;
        for (Tiles tiles = at.tiles(args); !tiles.done(); tiles.advance()) {
            const u32 first_key = tiles.tile() * Bc;
            const float score = logit(args, at.batch, here, span, q, k, first_key + lane);
            const u32 seen = vote(score != -INFINITE);
            float most = score;
            for (u32 apart = 16; apart; apart /= 2) most = larger(most, shuffle_xor(most, apart));
            most = larger(m, most);
            const float base = most == -INFINITE ? 0.0f : most;
            const float corr = exp_fast(m - base), weight = exp_fast(score - base);
            m = most;
            l = fused(l, corr, weight);
            UNROLL for (int i = 0; i < MOST_DIM / 32; i++) O[i] *= corr;
            for (u32 c = 0; c < Bc; c++) {
                const float w = shuffle(weight, c);
                // Skipped instead of multiplied by 0: the value of a hidden key may be NaN.
                if (!(seen >> c & 1)) continue;
                const float *value = v + (first_key + c) * args.v.row_stride;
                UNROLL for (int i = 0; i < MOST_DIM / 32; i++)
                    if (lane + 32 * i < args.dim) O[i] = fused(w, value[lane + 32 * i], O[i]);
            }
        }
        for (u32 apart = 16; apart; apart /= 2) l += shuffle_xor(l, apart);
        float *ml = at.ml(args, here), *a = at.a(args, here);
        // The memory of a fresh state is not read.
        const bool fresh = At::PARTS || args.fresh;
        const Entry entry(m, l, 0.0f, fresh ? EMPTY_M : ml[0], fresh ? 0.0f : ml[1]);
        warp_sync();
        if (entry.nothing && !fresh) return;
        if (lane == 0) {
            ml[0] = entry.m;
            ml[1] = entry.l;
        }
        if (entry.nothing && At::PARTS) return;
        UNROLL for (int i = 0; i < MOST_DIM / 32; i++)
            if (lane + 32 * i < args.dim)
                a[lane + 32 * i] = fresh ? O[i] * entry.found : entry.of(a[lane + 32 * i], O[i]);
    }

    // The logit of a (row, key); -inf if the row does not see the key.
    DEVICE static float logit(const AttendArguments &args, u32 batch, TileRow at, RowSpan span, const float *q,
                              const float *k, u32 key) {
        const float add = term<F32>(args, batch, at, span, position_of(args, key));
        if (add == -INFINITE) return add;
        const float x = scaled_dot(args, q, k + key * args.k.row_stride);
        return (args.cap != 0.0f ? product(args.cap, tanh_exact(x)) : x) + add;
    }

    // scale · (q·k), with the same rounding in both passes. A factor of up to 1 is on q: q·k alone may leave the range of f32.
    DEVICE static float scaled_dot(const AttendArguments &args, const float *q, const float *k) {
        const bool shrinks = magnitude(args.scale) < 1.0f;
        return product(dot(args.dim, q, k, shrinks ? args.scale : 1.0f), shrinks ? 1.0f : args.scale);
    }

    // The sum of products of two rows of `dim` elements, those of the first times a factor.
    DEVICE static float dot(u32 dim, const float *a, const float *b, float factor) {
        float sum = 0.0f;
        // Unrolled, this would take registers that the values need.
        ROLLED for (u32 n = 0; n < dim / 4; n++) {
            const Unit x = reinterpret_cast<const Unit *>(a)[n], y = reinterpret_cast<const Unit *>(b)[n];
            UNROLL for (int i = 0; i < 4; i++) sum = fused(product(float_of(x.words[i]), factor), float_of(y.words[i]), sum);
        }
        return sum;
    }
};
