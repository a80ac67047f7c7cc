// Attention on tensor cores by mma.sync, from sm_80 on: a block of warps, 16 query rows each, walks over tiles of keys.
//
// - K and V come by cp.async into two stages: while a tile is multiplied the next one is on its way. There is one
//   barrier for each tile.
// - Scores, weights, sums and the accumulator stay in registers. They begin afresh and are merged into the caller's
//   state at the end, so that a state is read and written once.
// - Everything is written against the fragments of mma.m16n8k16: of its warp's 16 rows a lane has `lane / 4` and the one
//   8 below, which `half` counts, and of every 8 columns `lane % 4 · 2` and the next.
#pragma once
#include "logits.h"

template <typename T, int DIM> struct Attention {
    static constexpr int WARPS = DIM <= 192 ? 8 : 4;
    static constexpr int THREADS = WARPS * 32;
    static constexpr int ROWS = WARPS * 16;
    static constexpr int KEYS = DIM <= 128 ? 64 : 32;
    // 16-byte columns of a row in shared memory.
    static constexpr int COLUMNS = DIM / 8;
    static constexpr u32 TILE_BYTES = KEYS * DIM * 2;
    static constexpr u32 SHARED_BYTES = ROWS * DIM * 2 + 4 * TILE_BYTES;
    // Beyond this the accumulator leaves no registers for queries: they are read for every tile.
    static constexpr bool Q_STAYS = DIM <= 128;

    const AttendArguments &args;
    const Place at;
    const u32 lane, first_row;
    RowSpan spans[2];
    float acc[DIM / 8][4];
    float top[2];  // largest base-2 logit so far, -inf before the first
    float sum[2];  // of weights, over this lane's columns only

    DEVICE explicit Attention(const AttendArguments &args)
        : args(args), at(args), lane(thread_x() % 32), first_row(at.tile * ROWS + thread_x() / 32 * 16) {
        UNROLL for (int half = 0; half < 2; half++) {
            spans[half] = at.span(args, row(half));
            top[half] = -INFINITE;
            sum[half] = 0.0f;
        }
        UNROLL for (int j = 0; j < DIM / 8; j++)
            UNROLL for (int i = 0; i < 4; i++) acc[j][i] = 0.0f;
    }

    DEVICE u32 row(int half) const { return first_row + lane / 4 + 8 * half; }

    // Where a 16-byte column of a row lies in a tile. Columns are permuted so that 8 rows at one column, which is what
    // ldmatrix reads at a time, lie in different banks.
    DEVICE static u32 place(u32 row, u32 column) {
        const u32 twist = COLUMNS % 8 == 0 ? row & 7 : row >> 1 & 3;
        return (row * COLUMNS + (column ^ twist)) * 16;
    }

    // Calls `each(row, column)` for the thread's part of a tile's 16-byte columns.
    template <int rows, typename Each> DEVICE static void share(Each each) {
        static_assert(rows * COLUMNS % THREADS == 0, "threads share a tile evenly");
        UNROLL for (int i = 0; i < rows * COLUMNS / THREADS; i++) {
            const u32 n = i * THREADS + thread_x();
            each(n / COLUMNS, n % COLUMNS);
        }
    }

    // Starts copying rows of a head; zeros stand behind the last row and behind the last element.
    template <int rows> DEVICE void copy_tile(u32 into, const u16 *head, u64 row_stride, u32 first, u32 end) const {
        share<rows>([&](u32 row, u32 column) {
            const bool there = first + row < end && column * 8 < args.dim;
            copy_async(into + place(row, column), there ? head + (first + row) * row_stride + column * 8 : head, there);
        });
    }

    DEVICE void copy_keys(u32 stage, u32 tile) const {
        copy_tile<KEYS>(stage, head_of<u16>(args.k, at.batch, at.kv_head), args.k.row_stride, tile * KEYS, args.keys);
        copy_tile<KEYS>(stage + TILE_BYTES, head_of<u16>(args.v, at.batch, at.kv_head), args.v.row_stride, tile * KEYS,
                        args.keys);
        copy_async_commit();
    }

    DEVICE static bool odd_pair(u32 pair) {
        return (pair & T::EXPONENT) == T::EXPONENT || (pair >> 16 & T::EXPONENT) == T::EXPONENT;
    }

    // Whether what this thread has copied of a tile of V holds NaN or an infinity.
    DEVICE static bool copied_odd(u32 v) {
        bool odd = false;
        share<KEYS>([&](u32 row, u32 column) {
            UNROLL for (u32 word = 0; word < 4; word++) odd |= odd_pair(load_shared(v + place(row, column) + word * 4));
        });
        return odd;
    }

    // The A fragment of 16 elements of the warp's queries. A negative scale is their sign.
    DEVICE void load_q(u32 (&q)[4], u32 from, u32 k) const {
        load_matrices(q, from + place(thread_x() / 32 * 16 + lane % 16, 2 * k + lane / 16));
        UNROLL for (int i = 0; i < 4; i++) q[i] ^= args.scale < 0.0f ? 0x80008000u : 0;
    }

    // scores = q · k for all keys of a tile.
    DEVICE void multiply_keys(float (&scores)[KEYS / 8][4], const u32 (*held)[4], u32 q_from, u32 k_from) const {
        UNROLL for (int n = 0; n < KEYS / 8; n++)
            UNROLL for (int i = 0; i < 4; i++) scores[n][i] = 0.0f;
        UNROLL for (int k = 0; k < DIM / 16; k++) {
            u32 q[4];
            if (Q_STAYS) {
                UNROLL for (int i = 0; i < 4; i++) q[i] = held[k][i];
            } else {
                load_q(q, q_from, k);
            }
            UNROLL for (int n = 0; n < KEYS / 16; n++) {
                u32 keys[4];
                load_matrices(keys, k_from + place(16 * n + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
                T::multiply(scores[2 * n], q, keys[0], keys[1]);
                T::multiply(scores[2 * n + 1], q, keys[2], keys[3]);
            }
        }
    }

    // Softcap, pair tensor and mask. Returns the factor that is left between scores and base-2 logits.
    DEVICE float shape(float (&scores)[KEYS / 8][4], u32 first_key, bool tested) const {
        // A scale of 0 must not turn the -inf of hidden keys into NaN.
        const float scale = larger(magnitude(args.scale), 1.2e-38f);
        const bool bent = reshaped(args);
        if (bent) {
            UNROLL for (int n = 0; n < KEYS / 8; n++)
                UNROLL for (int i = 0; i < 4; i++) {
                    const float x = scores[n][i] * scale;
                    scores[n][i] = args.cap != 0.0f ? args.cap * tanh_exact(x) : x;
                }
        }
        if (tested) {
            UNROLL for (int n = 0; n < KEYS / 8; n++)
                UNROLL for (int column = 0; column < 2; column++) {
                    const u32 position = position_of(args, first_key + 8 * n + lane % 4 * 2 + column);
                    UNROLL for (int half = 0; half < 2; half++) {
                        float &score = scores[n][2 * half + column];
                        const float add = term<T>(args, at, row(half), spans[half], position);
                        score = add == -INFINITE ? add : score + add;
                    }
                }
        }
        return bent ? 1.0f : scale;
    }

    // Scores become weights relative to the largest logit so far; what was summed under an older one is scaled to it.
    DEVICE void weigh(float (&scores)[KEYS / 8][4], float factor) {
        UNROLL for (int half = 0; half < 2; half++) {
            float most = -INFINITE;
            UNROLL for (int n = 0; n < KEYS / 8; n++)
                most = larger(most, larger(scores[n][2 * half], scores[n][2 * half + 1]));
            most = larger(most, shuffle_xor(most, 1));
            most = larger(most, shuffle_xor(most, 2));
            most = larger(top[half], most * factor);
            // Where all is -inf so far, weights are relative to 0 and become 0.
            const float base = most == -INFINITE ? 0.0f : most;
            const float rescale = exp2_fast(top[half] - base);
            top[half] = most;
            float sum_here = 0.0f;
            UNROLL for (int n = 0; n < KEYS / 8; n++)
                UNROLL for (int i = 2 * half; i < 2 * half + 2; i++) {
                    scores[n][i] = exp2_fast(fused(scores[n][i], factor, -base));
                    sum_here += scores[n][i];
                }
            sum[half] = fused(sum[half], rescale, sum_here);
            UNROLL for (int j = 0; j < DIM / 8; j++) {
                acc[j][2 * half] *= rescale;
                acc[j][2 * half + 1] *= rescale;
            }
        }
    }

    // acc += weights · v. If `odd`, elements that are not finite count as 0.
    DEVICE void multiply_values(const float (&weights)[KEYS / 8][4], u32 v_from, bool odd) {
        UNROLL for (int k = 0; k < KEYS / 16; k++) {
            const u32 p[4] = {T::pack(weights[2 * k][0], weights[2 * k][1]), T::pack(weights[2 * k][2], weights[2 * k][3]),
                              T::pack(weights[2 * k + 1][0], weights[2 * k + 1][1]),
                              T::pack(weights[2 * k + 1][2], weights[2 * k + 1][3])};
            UNROLL for (int j = 0; j < DIM / 16; j++) {
                u32 v[4];
                load_matrices_transposed(v, v_from + place(16 * k + lane % 16, 2 * j + lane / 16));
                if (odd) {
                    UNROLL for (int i = 0; i < 4; i++) {
                        if ((v[i] & T::EXPONENT) == T::EXPONENT) v[i] &= 0xffff0000u;
                        if ((v[i] >> 16 & T::EXPONENT) == T::EXPONENT) v[i] &= 0xffffu;
                    }
                }
                T::multiply(acc[2 * j], p, v[0], v[1]);
                T::multiply(acc[2 * j + 1], p, v[2], v[3]);
            }
        }
    }

    // Adds the elements of V that multiply_values left out, for the rows that see their keys: 0 · NaN would reach others.
    // Rare, so it is short rather than fast.
    DEVICE void add_odd_values(const float (&weights)[KEYS / 8][4], u32 v_from, u32 first_key) {
        ROLLED for (u32 key = 0; key < KEYS; key++) {
            // Registers have no index: the ones of the key's group are chosen one by one.
            float of_pair[4];
            UNROLL for (int i = 0; i < 4; i++)
                UNROLL for (int n = 0; n < KEYS / 8; n++)
                    if (n == 0 || key / 8 == u32(n)) of_pair[i] = weights[n][i];
            const u32 holder = lane / 4 * 4 + key % 8 / 2, position = position_of(args, first_key + key);
            float weight[2];
            bool seen[2];
            UNROLL for (int half = 0; half < 2; half++) {
                const float even = shuffle(of_pair[2 * half], holder), uneven = shuffle(of_pair[2 * half + 1], holder);
                weight[half] = key % 2 ? uneven : even;
                seen[half] = term<T>(args, at, row(half), spans[half], position) != -INFINITE;
            }
            UNROLL for (int j = 0; j < DIM / 8; j++) {
                const u32 pair = load_shared(v_from + place(key, j) + lane % 4 * 4);
                UNROLL for (int half = 0; half < 2; half++) {
                    if (seen[half] && (pair & T::EXPONENT) == T::EXPONENT)
                        acc[j][2 * half] += weight[half] * T::low(pair);
                    if (seen[half] && (pair >> 16 & T::EXPONENT) == T::EXPONENT)
                        acc[j][2 * half + 1] += weight[half] * T::high(pair);
                }
            }
        }
    }

    // Merges what was found into the caller's state.
    DEVICE void merge() {
        UNROLL for (int half = 0; half < 2; half++) {
            sum[half] += shuffle_xor(sum[half], 1);
            sum[half] += shuffle_xor(sum[half], 2);
            const bool there = row(half) < args.rows;
            float *ml = at.ml(args, there ? row(half) : 0);
            const Entry entry(top[half], sum[half], there ? ml[0] : 0.0f, there ? ml[1] : 0.0f);
            // Four lanes share a row: all have read before one writes.
            warp_sync();
            if (!there || entry.nothing) continue;
            if (lane % 4 == 0) {
                ml[0] = entry.m;
                ml[1] = entry.l;
            }
            float *a = at.a(args, row(half)) + lane % 4 * 2;
            UNROLL for (int j = 0; j < DIM / 8; j++) {
                if (u32(8 * j) >= args.dim) break;
                UNROLL for (int i = 0; i < 2; i++) a[8 * j + i] = entry.of(a[8 * j + i], acc[j][2 * half + i]);
            }
        }
    }

    DEVICE void run() {
        Tiles tiles = at.tiles(args);
        if (tiles.done()) return;
        const u32 q_from = shared_base(), stages = q_from + ROWS * DIM * 2;
        copy_tile<ROWS>(q_from, head_of<u16>(args.q, at.batch, at.head), args.q.row_stride, at.tile * ROWS, args.rows);
        copy_keys(stages, tiles.tile());
        // Warps behind the last row help to copy, and no more.
        const bool rows_here = first_row < args.rows;
        u32 held[Q_STAYS ? DIM / 16 : 1][4];
        for (u32 step = 0; !tiles.done(); step++) {
            const u32 k_from = stages + step % 2 * 2 * TILE_BYTES, v_from = k_from + TILE_BYTES;
            const u32 first_key = tiles.tile() * KEYS;
            const bool tested = !tiles.full() || first_key + KEYS > args.keys || args.pair_kind != NO_PAIRS;
            tiles.advance();
            copy_async_wait<0>();
            // The tile is there for everybody, and nobody reads the other stage any more.
            const bool odd = barrier_or(tested && copied_odd(v_from));
            if (!tiles.done()) copy_keys(stages + (step + 1) % 2 * 2 * TILE_BYTES, tiles.tile());
            if (!rows_here) continue;
            if (Q_STAYS && step == 0) {
                UNROLL for (int k = 0; k < DIM / 16; k++) load_q(held[k], q_from, k);
            }
            float scores[KEYS / 8][4];
            multiply_keys(scores, held, q_from, k_from);
            weigh(scores, shape(scores, first_key, tested));
            multiply_values(scores, v_from, odd);
            if (odd) add_odd_values(scores, v_from, first_key);
        }
        if (rows_here) merge();
    }
};
