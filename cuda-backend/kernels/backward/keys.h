// dK and dV on tensor cores: a block has keys and iterates over the query heads that read them, and over their rows.
#pragma once
#include "backward/tiles.h"

// Query rows that a block multiplies at a time: what fits into registers, and into 99 KiB of shared memory twice.
DEVICE constexpr int moving_rows(int dim) { return dim <= 64 ? 64 : dim <= 192 ? 32 : 16; }

// A block with keys, and moving query rows with what pairs need of them.
template <typename T, int DIM, int ROWS_, int WARPS> struct KeyTiles : BackwardTiles<T, DIM, ROWS_, WARPS> {
    using Base = BackwardTiles<T, DIM, ROWS_, WARPS>;
    static constexpr int ROWS = ROWS_;
    static constexpr u32 MOVING_BYTES = Base::MOVING_BYTES;
    // Of a stage: q, d_o, and five numbers for each row.
    static constexpr u32 STAGE_BYTES = 2 * MOVING_BYTES + 5 * ROWS * 4;
    using Base::args;
    using Base::attend;

    DEVICE explicit KeyTiles(const BackwardArguments &args) : Base(args) {}

    // Starts the copy of a tile of rows into a stage, and writes the numbers of a row. Returns whether this row counts for no key.
    DEVICE bool copy_rows(u32 into, const KeyPlace &at, const HeadTiles &tile) const {
        const u32 first_row = tile.now.tile() * ROWS;
        const u16 *q = head_of<u16>(attend.q, at.batch, tile.head), *d_o = head_of<u16>(args.d_o, at.batch, tile.head);
        this->template copy<ROWS>(into, q, attend.q.row_stride, first_row, attend.rows);
        this->template copy<ROWS>(into + MOVING_BYTES, d_o, args.d_o.row_stride, first_row, attend.rows);
        if (thread_x() >= ROWS) return false;
        const RowNumbers<T> row(args, at.batch, at.mask_class, {first_row + thread_x(), tile.head});
        const u32 words[5] = {bits_of(row.lse), bits_of(row.lift), bits_of(row.delta), row.span.lo, row.span.hi};
        UNROLL for (int n = 0; n < 5; n++)
            store_shared(into + 2 * MOVING_BYTES + (n * ROWS + thread_x()) * 4, words[n]);
        return row.span.lo >= row.span.hi;
    }

    // Number `which` of row `n` of a stage.
    DEVICE static u32 number(u32 stage, int which, u32 n) {
        return load_shared(stage + 2 * MOVING_BYTES + (which * ROWS + n) * 4);
    }
};

// Above a head dim of 128 the sums of 16 keys do not fit into the registers of a warp: two warps have the same keys, compute the
// same P and dS, and each has half of the elements.
template <typename T, int DIM> struct BackwardKeys : KeyTiles<T, DIM, moving_rows(DIM), DIM <= 128 ? 4 : 8> {
    using Base = KeyTiles<T, DIM, moving_rows(DIM), DIM <= 128 ? 4 : 8>;
    using typename Base::Products;
    static constexpr int FIXED = Base::FIXED, ROWS = Base::ROWS, OUT = DIM <= 128 ? DIM : DIM / 2;
    static constexpr u32 FIXED_BYTES = Base::FIXED_BYTES, MOVING_BYTES = Base::MOVING_BYTES;
    static constexpr u32 STAGE_BYTES = Base::STAGE_BYTES;
    using Base::args;
    using Base::attend;
    using Base::lane;

    DEVICE explicit BackwardKeys(const BackwardArguments &args) : Base(args) {}

    DEVICE void run() const {
        const KeyPlace at(attend, FIXED);
        const HeadTiles tiles(tiles_of(attend, at.mask_class, at.first / BACKWARD_TILE), args.readers[at.kv_head],
                              args.readers[at.kv_head + 1]);
        if (tiles.done()) return;
        const u32 k_from = shared_base(), v_from = k_from + FIXED_BYTES, stages = v_from + FIXED_BYTES;
        const u16 *k = head_of<u16>(attend.k, at.batch, at.kv_head), *v = head_of<u16>(attend.v, at.batch, at.kv_head);
        this->template copy<FIXED>(k_from, k, attend.k.row_stride, at.first, attend.keys);
        this->template copy<FIXED>(v_from, v, attend.v.row_stride, at.first, attend.keys);

        const u32 first_key = at.first + this->mine + lane / 4;
        const u32 positions[2] = {position_of(attend, first_key), position_of(attend, first_key + 8)};
        // Warps past the last key only copy.
        const bool keys_here = at.first + this->mine < attend.keys;
        // The first element of a head that this warp sums.
        const u32 out_from = thread_x() / 128 * OUT;
        float dk[OUT / 8][4], dv[OUT / 8][4], shrink[2] = {1.0f, 1.0f};
        UNROLL for (int j = 0; j < OUT / 8; j++)
            UNROLL for (int i = 0; i < 4; i++) dk[j][i] = dv[j][i] = 0.0f;

        // Of the tile that was copied last: whether the row whose numbers this thread wrote counts for no key.
        bool blind = false;
        const auto tested_in = [&](const HeadTiles &tile) {
            return !tile.now.full() || (tile.now.tile() + 1) * ROWS > attend.rows || attend.bias_kind != NO_BIAS;
        };
        const auto copy_moving = [&](u32 stage, const HeadTiles &tile) {
            blind = this->copy_rows(stages + stage * STAGE_BYTES, at, tile);
        };
        const auto odd_here = [&](u32 stage, const HeadTiles &tile) {
            // In a tile without tests, a row that counts for no key has only logits of -inf; its d_o may be NaN.
            if (!tested_in(tile)) return blind;
            const u32 from = stages + stage * STAGE_BYTES;
            return Base::copied_odd(from) || Base::copied_odd(from + MOVING_BYTES);
        };
        const auto step = [&](u32 stage, const HeadTiles &tile, bool odd) {
            if (!keys_here) return;
            const u32 q_from = stages + stage * STAGE_BYTES, d_o_from = q_from + MOVING_BYTES;
            const u32 first_row = tile.now.tile() * ROWS;
            const bool tested = tested_in(tile) || odd;
            const auto number = [&](int which, u32 n) { return Base::number(q_from, which, n); };
            const auto term_of = [&](u32 n, int half) {
                const RowSpan span{number(3, n), number(4, n)};
                return term<T>(attend, at.batch, {first_row + n, tile.head}, span, positions[half]);
            };
            Products p, ds;
            this->multiply(p, k_from, q_from);
            this->multiply(ds, v_from, d_o_from);
            UNROLL for (int group = 0; group < ROWS / 8; group++)
                UNROLL for (int column = 0; column < 2; column++) {
                    const u32 n = 8 * group + lane % 4 * 2 + column;
                    const float lse = float_of(number(0, n)), lift = float_of(number(1, n)), delta = float_of(number(2, n));
                    UNROLL for (int half = 0; half < 2; half++) {
                        const int i = 2 * half + column;
                        const float add = tested ? term_of(n, half) : 0.0f;
                        this->weigh(p[group][i], ds[group][i], lse, lift, delta, add);
                    }
                }
            const auto seen = [&](u32 n, int half) { return term_of(n, half) != -INFINITE; };
            this->template add<OUT>(dv, p, d_o_from, out_from / 8, odd);
            if (odd) this->template add_odd<OUT>(dv, p, this->pairs_of(d_o_from, out_from / 8), seen);
            this->template fit<OUT>(ds, dk, shrink);
            this->template add<OUT>(dk, ds, q_from, out_from / 8, odd);
            if (odd) this->template add_odd<OUT>(dk, ds, this->pairs_of(q_from, out_from / 8), seen);
        };
        Base::iterate(tiles, copy_moving, odd_here, step);

        UNROLL for (int half = 0; half < 2; half++) {
            const u32 key = first_key + 8 * half;
            if (key >= attend.keys) continue;
            const u64 into = at.batch * args.d_kv.batch_stride + key * args.d_kv.row_stride + at.kv_head * args.d_kv.head_stride;
            this->template write<OUT>(args.dk + into, dk, half, out_from, Lift<T>::BACK / shrink[half], args.scale);
            this->template write<OUT>(args.dv + into, dv, half, out_from, Lift<T>::BACK, 1.0f);
        }
    }
};
