// The gradient of an additive bias on tensor cores: a block has keys and iterates over the rows of one query head. It makes two
// products, S and dP, and has no sums of heads.
#pragma once
#include "backward/keys.h"

// Query rows that a block multiplies at a time: the addresses of the gradient of 64 do not fit into registers.
DEVICE constexpr int bias_rows(int dim) { return dim <= 192 ? 32 : 16; }

template <typename T, int DIM> struct BackwardBias : KeyTiles<T, DIM, bias_rows(DIM), 4> {
    using Base = KeyTiles<T, DIM, bias_rows(DIM), 4>;
    using typename Base::Products;
    static constexpr int FIXED = Base::FIXED, ROWS = Base::ROWS;
    static constexpr u32 FIXED_BYTES = Base::FIXED_BYTES, MOVING_BYTES = Base::MOVING_BYTES;
    static constexpr u32 STAGE_BYTES = Base::STAGE_BYTES;
    using Base::args;
    using Base::attend;
    using Base::lane;

    DEVICE explicit BackwardBias(const BackwardArguments &args) : Base(args) {}

    DEVICE void run() const {
        const BiasPlace at(args, FIXED);
        const HeadTiles tiles(tiles_of(attend, at.mask_class, at.first / BACKWARD_TILE), at.head, at.head + 1);
        if (tiles.done()) return;
        const u32 k_from = shared_base(), v_from = k_from + FIXED_BYTES, stages = v_from + FIXED_BYTES;
        const u16 *k = head_of<u16>(attend.k, at.batch, at.kv_head), *v = head_of<u16>(attend.v, at.batch, at.kv_head);
        this->template copy<FIXED>(k_from, k, attend.k.row_stride, at.first, attend.keys);
        this->template copy<FIXED>(v_from, v, attend.v.row_stride, at.first, attend.keys);

        const u32 first_key = at.first + this->mine + lane / 4;
        const u32 positions[2] = {position_of(attend, first_key), position_of(attend, first_key + 8)};
        // Warps past the last key only copy.
        const bool keys_here = at.first + this->mine < attend.keys;
        // Where all queries share a row: the sums over this lane's rows.
        const bool shared = args.bias_sum.row_stride == 0;
        float sums[2] = {0.0f, 0.0f};

        const auto copy_moving = [&](u32 stage, const HeadTiles &tile) {
            this->copy_rows(stages + stage * STAGE_BYTES, at, tile);
        };
        // Pairs are selected one by one: there is no product with a row or key.
        const auto odd_here = [&](u32, const HeadTiles &) { return false; };
        const auto step = [&](u32 stage, const HeadTiles &tile, bool) {
            if (!keys_here) return;
            const u32 q_from = stages + stage * STAGE_BYTES, first_row = tile.now.tile() * ROWS;
            Products p, d;
            this->multiply(p, k_from, q_from);
            this->multiply(d, v_from, q_from + MOVING_BYTES);
            UNROLL for (int group = 0; group < ROWS / 8; group++)
                UNROLL for (int column = 0; column < 2; column++) {
                    const u32 n = 8 * group + lane % 4 * 2 + column;
                    const auto number = [&](int which) { return Base::number(q_from, which, n); };
                    const float lse = float_of(number(0)), lift = float_of(number(1)), delta = float_of(number(2));
                    const RowSpan span{number(3), number(4)};
                    UNROLL for (int half = 0; half < 2; half++) {
                        const int i = 2 * half + column;
                        const float add = term<T>(attend, at.batch, {first_row + n, at.head}, span, positions[half]);
                        this->template weigh<true>(p[group][i], d[group][i], lse, lift, delta, add);
                        const float value = d[group][i] * Lift<T>::BACK;
                        sums[half] += value;
                        if (shared || add == -INFINITE) continue;
                        at.into[(first_row + n) * args.bias_sum.row_stride + positions[half]] += value;
                    }
                }
        };
        Base::iterate(tiles, copy_moving, odd_here, step);

        if (!shared) return;
        UNROLL for (int half = 0; half < 2; half++) {
            // Four lanes have the same keys.
            sums[half] += shuffle_xor(sums[half], 1);
            sums[half] += shuffle_xor(sums[half], 2);
            if (lane % 4 == 0 && first_key + 8 * half < attend.keys) at.into[positions[half]] += sums[half];
        }
    }
};
