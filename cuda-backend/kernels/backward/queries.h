// dQ on tensor cores: a block has query rows and iterates over keys.
#pragma once
#include "backward/tiles.h"

// Keys that a block multiplies at a time: what fits into registers, and into 99 KiB of shared memory twice.
DEVICE constexpr int moving_keys(int dim) { return dim <= 64 ? 32 : dim <= 128 ? 64 : dim <= 192 ? 32 : 16; }

template <typename T, int DIM> struct BackwardQueries : BackwardTiles<T, DIM, moving_keys(DIM), 4> {
    using Base = BackwardTiles<T, DIM, moving_keys(DIM), 4>;
    using typename Base::Products;
    static constexpr int FIXED = Base::FIXED, KEYS = Base::MOVING;
    static constexpr u32 FIXED_BYTES = Base::FIXED_BYTES, MOVING_BYTES = Base::MOVING_BYTES;
    // Blocks of a multiprocessor; 0: the compiler chooses. In f16 it would spill for a third one.
    static constexpr int BLOCKS = DIM == 96 && Lift<T>::NARROW ? 2 : 0;
    using Base::args;
    using Base::attend;
    using Base::lane;

    DEVICE explicit BackwardQueries(const BackwardArguments &args) : Base(args) {}

    DEVICE void run() const {
        // The last tiles come first: under a causal mask they have the most keys.
        const u32 first = (attend.first_tile + grid_x() - 1 - block_x()) * FIXED;
        const Place at(attend, first / BACKWARD_TILE, attend.first_head + block_y(), attend.first_batch + block_z());
        const HeadTiles tiles(at.tiles(attend), at.head, at.head + 1);
        if (tiles.done()) return;
        const u32 q_from = shared_base(), d_o_from = q_from + FIXED_BYTES, stages = d_o_from + FIXED_BYTES;
        const u16 *q = head_of<u16>(attend.q, at.batch, at.head), *d_o = head_of<u16>(args.d_o, at.batch, at.head);
        const u16 *k = head_of<u16>(attend.k, at.batch, at.kv_head), *v = head_of<u16>(attend.v, at.batch, at.kv_head);
        this->template copy<FIXED>(q_from, q, attend.q.row_stride, first, attend.rows);
        this->template copy<FIXED>(d_o_from, d_o, args.d_o.row_stride, first, attend.rows);

        TileRow rows[2];
        RowNumbers<T> numbers[2];
        UNROLL for (int half = 0; half < 2; half++) {
            rows[half] = {first + this->mine + lane / 4 + 8 * half, at.head};
            numbers[half] = RowNumbers<T>(args, at.batch, at.mask_class, rows[half]);
        }
        // Warps behind the last row only copy.
        const bool rows_here = first + this->mine < attend.rows;
        float acc[DIM / 8][4], shrink[2] = {1.0f, 1.0f};
        UNROLL for (int j = 0; j < DIM / 8; j++)
            UNROLL for (int i = 0; i < 4; i++) acc[j][i] = 0.0f;

        const auto tested_in = [&](const HeadTiles &tile) {
            return !tile.now.full() || (tile.now.tile() + 1) * KEYS > attend.keys || attend.bias_kind != NO_BIAS;
        };
        const auto copy_moving = [&](u32 stage, const HeadTiles &tile) {
            const u32 into = stages + stage * 2 * MOVING_BYTES, first_key = tile.now.tile() * KEYS;
            this->template copy<KEYS>(into, k, attend.k.row_stride, first_key, attend.keys);
            this->template copy<KEYS>(into + MOVING_BYTES, v, attend.v.row_stride, first_key, attend.keys);
        };
        const auto odd_here = [&](u32 stage, const HeadTiles &tile) {
            return tested_in(tile) && Base::copied_odd(stages + stage * 2 * MOVING_BYTES);
        };
        const auto step = [&](u32 stage, const HeadTiles &tile, bool odd) {
            if (!rows_here) return;
            const u32 k_from = stages + stage * 2 * MOVING_BYTES, first_key = tile.now.tile() * KEYS;
            const bool tested = tested_in(tile);
            const auto term_of = [&](int half, u32 position) {
                return term<T>(attend, at.batch, rows[half], numbers[half].span, position);
            };
            Products scores, ds;
            this->multiply(scores, q_from, k_from);
            this->multiply(ds, d_o_from, k_from + MOVING_BYTES);
            UNROLL for (int n = 0; n < KEYS / 8; n++)
                UNROLL for (int column = 0; column < 2; column++) {
                    const u32 position = tested ? position_of(attend, first_key + 8 * n + lane % 4 * 2 + column) : 0;
                    UNROLL for (int half = 0; half < 2; half++) {
                        const int i = 2 * half + column;
                        const float add = tested ? term_of(half, position) : 0.0f;
                        const RowNumbers<T> &row = numbers[half];
                        this->weigh(scores[n][i], ds[n][i], row.lse, row.lift, row.delta, add);
                    }
                }
            this->template fit<DIM>(ds, acc, shrink);
            this->template add<DIM>(acc, ds, k_from, 0, odd);
            if (odd) {
                this->template add_odd<DIM>(acc, ds, this->pairs_of(k_from, 0), [&](u32 n, int half) {
                    return term_of(half, position_of(attend, first_key + n)) != -INFINITE;
                });
            }
        };
        Base::iterate(tiles, copy_moving, odd_here, step);

        UNROLL for (int half = 0; half < 2; half++) {
            // Rows behind the last, and rows without visible keys: their sums may be anything.
            if (numbers[half].span.lo >= numbers[half].span.hi) continue;
            float *dq = args.dq + ((u64(at.batch) * attend.rows + rows[half].row) * attend.heads + at.head) * attend.dim;
            this->template write<DIM>(dq, acc, half, 0, Lift<T>::BACK / shrink[half], args.scale);
        }
    }
};
