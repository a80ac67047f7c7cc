// Attention on tensor cores by mma.sync, for sm_80 and later: a block of warps with 16 query rows each iterates over tiles of
// keys.
//
// - cp.async copies K and V into two stages: while one tile is multiplied, the next one is copied. One barrier per tile.
// - Scores, weights, sums and the accumulator stay in registers (`rows.h`). They start empty and are merged into the state in
//   memory at the end, so a state is read and written once.
#pragma once
#include "rows.h"

// `At` defines the rows and the keys of a block (`Place`, `PackedPlace`).
template <typename T, int DIM, typename At = Place, int WARPS = DIM <= 192 ? 8 : 4> struct Attention {
    static constexpr int THREADS = WARPS * 32;
    static constexpr int Br = WARPS * 16;
    static constexpr int Bc = DIM <= 128 ? 64 : 32;
    // 16-byte columns of a row in shared memory.
    static constexpr int COLUMNS = DIM / 8;
    static constexpr u32 TILE_BYTES = Bc * DIM * 2;
    static constexpr u32 SHARED_BYTES = Br * DIM * 2 + 4 * TILE_BYTES;
    // Above this the accumulator leaves no registers for the queries: they are read from shared memory for every tile.
    static constexpr bool Q_STAYS = DIM <= 128;

    using Mine = Rows<T, DIM, Bc, At>;

    const AttendArguments &args;
    const At at;
    const u32 lane;
    Mine mine;

    DEVICE Attention(const AttendArguments &args, const At &at)
        : args(args), at(at), lane(thread_x() % 32), mine(args) {
        mine.begin(at, Br, thread_x() / 32 * 16);
    }

    // The offset in bytes of a 16-byte column of a row in a tile. Columns are permuted so that 8 rows of one column, which
    // ldmatrix reads at a time, are in different banks.
    DEVICE static u32 place(u32 row, u32 column) {
        const u32 twist = COLUMNS % 8 == 0 ? row & 7 : row >> 1 & 3;
        return (row * COLUMNS + (column ^ twist)) * 16;
    }

    // Calls `each(row, column)` for this thread's share of the 16-byte columns of a tile.
    template <int rows, typename Each> DEVICE static void share(Each each) {
        static_assert(rows * COLUMNS % THREADS == 0, "threads share a tile evenly");
        UNROLL for (int i = 0; i < rows * COLUMNS / THREADS; i++) {
            const u32 n = i * THREADS + thread_x();
            each(n / COLUMNS, n % COLUMNS);
        }
    }

    // Starts a copy of 16 bytes, or of zeros behind the last row and behind the last element of a head.
    DEVICE void copy(u32 into, const u16 *row, u32 column, bool there) const {
        there = there && column * 8 < args.dim;
        copy_async(into, there ? row + column * 8 : row, there);
    }

    DEVICE void copy_queries(u32 into) const {
        share<Br>([&](u32 n, u32 column) {
            const TileRow from = at.row(Br, n);
            const bool there = from.row < args.rows;
            const u16 *head = head_of<u16>(args.q, at.batch, from.head);
            copy(into + place(n, column), head + (there ? from.row : 0) * args.q.row_stride, column, there);
        });
    }

    DEVICE void copy_tile(u32 into, const Tensor &tensor, u32 first) const {
        const u16 *head = head_of<u16>(tensor, at.batch, at.kv_head);
        share<Bc>([&](u32 n, u32 column) {
            const bool there = first + n < args.keys;
            copy(into + place(n, column), head + (there ? first + n : 0) * tensor.row_stride, column, there);
        });
    }

    DEVICE void copy_keys(u32 stage, u32 tile) const {
        copy_tile(stage, args.k, tile * Bc);
        copy_tile(stage + TILE_BYTES, args.v, tile * Bc);
        copy_async_commit();
    }

    // Whether this thread's share of a tile of V has a NaN or an infinity.
    DEVICE static bool copied_odd(u32 v) {
        bool odd = false;
        share<Bc>([&](u32 row, u32 column) {
            UNROLL for (u32 word = 0; word < 4; word++)
                odd |= Mine::odd_pair(load_shared(v + place(row, column) + word * 4));
        });
        return odd;
    }

    // The A fragment of 16 elements of the warp's queries. For a negative scale the queries are negated.
    DEVICE void load_q(u32 (&q)[4], u32 from, u32 k) const {
        load_matrices(q, from + place(thread_x() / 32 * 16 + lane % 16, 2 * k + lane / 16));
        UNROLL for (int i = 0; i < 4; i++) q[i] ^= args.scale < 0.0f ? 0x80008000u : 0;
    }

    // scores = q · k, for all keys of a tile.
    DEVICE void multiply_keys(float (&scores)[Bc / 8][4], const u32 (*held)[4], u32 q_from, u32 k_from) const {
        UNROLL for (int n = 0; n < Bc / 8; n++)
            UNROLL for (int i = 0; i < 4; i++) scores[n][i] = 0.0f;
        UNROLL for (int k = 0; k < DIM / 16; k++) {
            u32 q[4];
            if (Q_STAYS) {
                UNROLL for (int i = 0; i < 4; i++) q[i] = held[k][i];
            } else {
                load_q(q, q_from, k);
            }
            UNROLL for (int n = 0; n < Bc / 16; n++) {
                u32 keys[4];
                load_matrices(keys, k_from + place(16 * n + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
                T::multiply(scores[2 * n], q, keys[0], keys[1]);
                T::multiply(scores[2 * n + 1], q, keys[2], keys[3]);
            }
        }
    }

    // O += weights · v. If `odd`, elements of v that are not finite count as 0.
    DEVICE void multiply_values(const float (&weights)[Bc / 8][4], u32 v_from, bool odd) {
        UNROLL for (int k = 0; k < Bc / 16; k++) {
            u32 p[4];
            Mine::pack_weights(p, weights, k);
            UNROLL for (int j = 0; j < DIM / 16; j++) {
                u32 v[4];
                load_matrices_transposed(v, v_from + place(16 * k + lane % 16, 2 * j + lane / 16));
                if (odd) {
                    UNROLL for (int i = 0; i < 4; i++) {
                        if (Mine::odd(u16(v[i]))) v[i] &= 0xffff0000u;
                        if (Mine::odd(u16(v[i] >> 16))) v[i] &= 0xffffu;
                    }
                }
                T::multiply(mine.O[2 * j], p, v[0], v[1]);
                T::multiply(mine.O[2 * j + 1], p, v[2], v[3]);
            }
        }
    }

    DEVICE void run() {
        Tiles tiles = at.tiles(args);
        // Warps behind the last row only copy.
        const bool rows_here = at.row(Br, thread_x() / 32 * 16).row < args.rows;
        if (tiles.done()) {
            if ((At::PARTS || args.fresh) && rows_here) mine.merge(at);
            return;
        }
        const u32 q_from = shared_base(), stages = q_from + Br * DIM * 2;
        copy_queries(q_from);
        copy_keys(stages, tiles.tile());
        // With a scale of 0 the -inf of hidden keys would become NaN.
        const float scale = larger(magnitude(args.scale), 1.2e-38f);
        u32 held[Q_STAYS ? DIM / 16 : 1][4];
        for (u32 step = 0; !tiles.done(); step++) {
            const u32 k_from = stages + step % 2 * 2 * TILE_BYTES, v_from = k_from + TILE_BYTES;
            const u32 first_key = tiles.tile() * Bc;
            const bool tested = !tiles.full() || first_key + Bc > args.keys || args.bias_kind != NO_BIAS;
            tiles.advance();
            copy_async_wait<0>();
            // After this the tile is complete for all threads, and no thread reads the other stage.
            const bool odd = barrier_or(tested && copied_odd(v_from));
            if (!tiles.done()) copy_keys(stages + (step + 1) % 2 * 2 * TILE_BYTES, tiles.tile());
            if (!rows_here) continue;
            if (Q_STAYS && step == 0) {
                UNROLL for (int k = 0; k < DIM / 16; k++) load_q(held[k], q_from, k);
            }
            float scores[Bc / 8][4], corr[2];
            multiply_keys(scores, held, q_from, k_from);
            mine.weigh(scores, mine.shape(scores, scale, at.batch, first_key, tested), corr);
            mine.scale_sums(corr);
            multiply_values(scores, v_from, odd);
            if (odd) {
                mine.add_odd_values(scores, at.batch, first_key, [&](u32 key, int j) {
                    return load_shared(v_from + place(key, j) + lane % 4 * 4);
                });
            }
        }
        if (rows_here) mine.merge(at);
    }
};
