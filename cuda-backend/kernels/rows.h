// The 16 query rows of a warp in the tensor-core kernels: mask, softmax and sums.
//
// Names are those of the literature and of shaders/wgsl/attend/portable.wgsl: m, l and O of a row, tiles of Br x Bc; scores are S
// and become the weights P in place; corr is e^(m before - m).
//
// Fragments of mma.m16n8k16 and of wgmma have the same layout: of the 16 rows of its warp a lane has rows `lane / 4` (half 0) and
// `lane / 4 + 8` (half 1), and of every 8 columns `lane % 4 · 2` and the next one.
#pragma once
#include "logits.h"

template <typename T, int DIM, int Bc, typename At> struct Rows {
    const AttendArguments &args;
    const u32 lane;
    TileRow rows[2];
    RowSpan spans[2];
    float O[DIM / 8][4];
    float m[2];  // largest logit so far, -inf at the beginning
    float l[2];  // sum of weights, over this lane's columns only

    DEVICE explicit Rows(const AttendArguments &args) : args(args), lane(thread_x() % 32) {}

    // Starts an empty state for the 16 rows from `first` on of a tile of `tile_rows`.
    DEVICE void begin(const At &at, u32 tile_rows, u32 first) {
        UNROLL for (int half = 0; half < 2; half++) {
            rows[half] = at.row(tile_rows, first + lane / 4 + 8 * half);
            spans[half] = at.span(args, rows[half].row);
            m[half] = -INFINITE;
            l[half] = 0.0f;
        }
        UNROLL for (int j = 0; j < DIM / 8; j++)
            UNROLL for (int i = 0; i < 4; i++) O[j][i] = 0.0f;
    }

    // Applies softcap and a negative scale to scores; scores · scale are logits. Returns the factor that is still missing: 1 or `scale`.
    DEVICE float bend(float (&scores)[Bc / 8][4], float scale) const {
        const bool bent = reshaped(args) || scale < 0.0f;
        if (bent) {
            UNROLL for (int n = 0; n < Bc / 8; n++)
                UNROLL for (int i = 0; i < 4; i++) {
                    const float x = product(scores[n][i], scale);
                    scores[n][i] = args.cap != 0.0f ? product(args.cap, tanh_exact(x)) : x;
                }
        }
        return bent ? 1.0f : scale;
    }

    // Applies softcap, bias and mask to scores, as `bend`.
    DEVICE float shape(float (&scores)[Bc / 8][4], float scale, u32 batch, u32 first_key, bool tested) const {
        const float factor = bend(scores, scale);
        if (tested) {
            UNROLL for (int n = 0; n < Bc / 8; n++)
                UNROLL for (int column = 0; column < 2; column++) {
                    const u32 position = position_of(args, first_key + 8 * n + lane % 4 * 2 + column);
                    UNROLL for (int half = 0; half < 2; half++) {
                        float &score = scores[n][2 * half + column];
                        const float add = term<T>(args, batch, rows[half], spans[half], position);
                        score = add == -INFINITE ? add : score + add;
                    }
                }
        }
        return factor;
    }

    // Hides the keys that a row does not see, where there is no mask tensor and no bias tensor. `read(pair, n)` reads the positions of
    // this lane's keys of the `n`-th 8.
    template <typename Read> DEVICE void hide(float (&scores)[Bc / 8][4], Read read) const {
        // Under a causal mask rows see all keys up to one.
        if (vote(spans[0].lo != 0 || spans[1].lo != 0))
            hide_outside<true>(scores, read);
        else
            hide_outside<false>(scores, read);
    }
    template <bool BEGINS, typename Read> DEVICE void hide_outside(float (&scores)[Bc / 8][4], Read read) const {
        UNROLL for (int n = 0; n < Bc / 8; n++) {
            u32 pair[2];
            read(pair, n);
            UNROLL for (int i = 0; i < 4; i++)
                if (pair[i % 2] >= spans[i / 2].hi || (BEGINS && pair[i % 2] < spans[i / 2].lo)) scores[n][i] = -INFINITE;
        }
    }

    // Turns scores, whose logits are scores · scale, into weights relative to the largest logit so far. `corr` is the factor for sums
    // relative to the previous one: it is applied to l here, and the caller applies it to O.
    DEVICE void weigh(float (&scores)[Bc / 8][4], float scale, float (&corr)[2]) {
        float base[2], factor = scale * LOG2_E;
        const float before[2] = {m[0], m[1]};
        UNROLL for (int half = 0; half < 2; half++) {
            float most = -INFINITE;
            UNROLL for (int n = 0; n < Bc / 8; n++)
                most = larger(most, larger(scores[n][2 * half], scores[n][2 * half + 1]));
            most = larger(most, shuffle_xor(most, 1));
            most = larger(most, shuffle_xor(most, 2));
            m[half] = larger(before[half], most * scale);
            base[half] = Anchor::of(m[half]);
            corr[half] = exp2_fast(product(before[half], LOG2_E) - base[half]);
        }
        if (vote(Anchor::far(base[0]) || Anchor::far(base[1]))) {
            factor = LOG2_E;
            UNROLL for (int half = 0; half < 2; half++) {
                const bool far = Anchor::far(base[half]);
                UNROLL for (int n = 0; n < Bc / 8; n++)
                    UNROLL for (int i = 2 * half; i < 2 * half + 2; i++)
                        scores[n][i] = product(scores[n][i], scale) - (far ? m[half] : 0.0f);
                if (!far) continue;
                base[half] = 0.0f;
                corr[half] = exp_fast(before[half] - m[half]);
            }
        }
        UNROLL for (int half = 0; half < 2; half++) {
            float l_here = 0.0f;
            UNROLL for (int n = 0; n < Bc / 8; n++)
                UNROLL for (int i = 2 * half; i < 2 * half + 2; i++) {
                    scores[n][i] = exp2_fast(fused(scores[n][i], factor, -base[half]));
                    l_here += scores[n][i];
                }
            l[half] = fused(l[half], corr[half], l_here);
        }
    }

    DEVICE void scale_sums(const float (&corr)[2]) {
        UNROLL for (int j = 0; j < DIM / 8; j++)
            UNROLL for (int i = 0; i < 4; i++) O[j][i] *= corr[i / 2];
    }

    // The A fragment of the weights of 16 keys.
    DEVICE static void pack_weights(u32 (&p)[4], const float (&weights)[Bc / 8][4], int k) {
        UNROLL for (int i = 0; i < 4; i++)
            p[i] = T::pack(weights[2 * k + i / 2][i % 2 * 2], weights[2 * k + i / 2][i % 2 * 2 + 1]);
    }

    DEVICE static bool odd(u16 element) { return (element & T::EXPONENT) == T::EXPONENT; }
    DEVICE static bool odd_pair(u32 pair) {
        // An exponent of ones and its lowest bit carry into the sign, which was cleared.
        constexpr u32 ONES = T::EXPONENT * 0x10001u, LOWEST = (T::EXPONENT & -T::EXPONENT) * 0x10001u;
        return (((pair & ONES) + LOWEST) & 0x80008000u) != 0;
    }

    // O += weights · v without tensor cores, only for elements of v that are not finite and only for rows that see their key: on
    // tensor cores 0 · NaN would reach the other rows. `pair_at(key, j)` is this lane's pair of the j-th 8 elements of a key.
    // Rare, so short rather than fast.
    template <typename PairAt>
    DEVICE void add_odd_values(const float (&weights)[Bc / 8][4], u32 batch, u32 first_key, PairAt pair_at) {
        ROLLED for (u32 key = 0; key < Bc; key++) {
            // Registers cannot be indexed, so the weights of the key's group are selected by comparison.
            float of_pair[4];
            UNROLL for (int i = 0; i < 4; i++)
                UNROLL for (int n = 0; n < Bc / 8; n++)
                    if (n == 0 || key / 8 == u32(n)) of_pair[i] = weights[n][i];
            const u32 holder = lane / 4 * 4 + key % 8 / 2, position = position_of(args, first_key + key);
            float weight[2];
            bool seen[2];
            UNROLL for (int half = 0; half < 2; half++) {
                const float even = shuffle(of_pair[2 * half], holder), uneven = shuffle(of_pair[2 * half + 1], holder);
                weight[half] = key % 2 ? uneven : even;
                seen[half] = term<T>(args, batch, rows[half], spans[half], position) != -INFINITE;
            }
            UNROLL for (int j = 0; j < DIM / 8; j++) {
                const u32 pair = pair_at(key, j);
                UNROLL for (int half = 0; half < 2; half++) {
                    if (seen[half] && odd(u16(pair))) O[j][2 * half] += weight[half] * T::low(pair);
                    if (seen[half] && odd(u16(pair >> 16))) O[j][2 * half + 1] += weight[half] * T::high(pair);
                }
            }
        }
    }

    // Merges the rows into the state in memory. A fresh state is only written.
    DEVICE void merge(const At &at) {
        add_lanes();
        Pair ml[2];
        UNROLL for (int half = 0; half < 2; half++)
            ml[half] = reads(half) ? pair_at(at.ml(args, rows[half])) : Pair{EMPTY_M, 0.0f};
        if (args.dim == DIM)
            merge_elements<true>(at, ml);
        else
            merge_elements<false>(at, ml);
    }

    // Writes the results of the rows of a fresh state, as `finalize` of state.h, instead of the state.
    DEVICE void finish(const At &at, void *o, float *lse, const float *sinks) {
        add_lanes();
        UNROLL for (int half = 0; half < 2; half++) {
            if (!there(half)) continue;
            const Entry entry(m[half], l[half], Anchor::off(m[half]), EMPTY_M, 0.0f);
            const Result<T> result(entry.m, entry.l, sinks ? sinks + rows[half].head : nullptr);
            const u64 row = (u64(at.batch) * args.rows + rows[half].row) * args.heads + rows[half].head;
            if (lane % 4 == 0) pair_at(lse + row * 2) = {result.lse, result.rest};
            u32 *into = static_cast<u32 *>(o) + (row * args.dim + lane % 4 * 2) / 2;
            UNROLL for (int j = 0; j < DIM / 8; j++) {
                const float x = O[j][2 * half] * entry.found, y = O[j][2 * half + 1] * entry.found;
                if (u32(8 * j) < args.dim) into[4 * j] = T::pack(result.of(x), result.of(y));
            }
        }
    }

private:
    DEVICE bool there(int half) const { return rows[half].row < args.rows; }
    DEVICE bool reads(int half) const { return there(half) && !At::PARTS && !args.fresh; }

    // Adds the sums of the four lanes of a row.
    DEVICE void add_lanes() {
        UNROLL for (int half = 0; half < 2; half++) {
            l[half] += shuffle_xor(l[half], 1);
            l[half] += shuffle_xor(l[half], 2);
        }
    }

    // `whole`: all elements of the accumulator are elements of the head.
    template <bool whole> DEVICE void merge_elements(const At &at, const Pair (&ml)[2]) const {
        // Four lanes share a row. All must have read m and l before one writes.
        warp_sync();
        UNROLL for (int half = 0; half < 2; half++) {
            const Entry entry(m[half], l[half], Anchor::off(m[half]), ml[half].x, ml[half].y);
            if (!there(half) || (entry.nothing && reads(half))) continue;
            if (lane % 4 == 0) pair_at(at.ml(args, rows[half])) = {entry.m, entry.l};
            if (entry.nothing && At::PARTS) continue;
            float *a = at.a(args, rows[half]) + lane % 4 * 2;
            UNROLL for (int first = 0; first < DIM / 8; first += READS) {
                // All reads before the first write: the compiler cannot know that they are of other elements, so a read behind a
                // write would wait for memory once more.
                Pair old[READS] = {};
                UNROLL for (int i = 0; i < READS; i++)
                    if (is_of_head<whole>(first + i) && reads(half)) old[i] = pair_at(a + 8 * (first + i));
                UNROLL for (int i = 0; i < READS; i++) {
                    if (!is_of_head<whole>(first + i)) continue;
                    const float x = O[first + i][2 * half], y = O[first + i][2 * half + 1];
                    pair_at(a + 8 * (first + i)) = reads(half) ? Pair{entry.of(old[i].x, x), entry.of(old[i].y, y)}
                                                               : Pair{x * entry.found, y * entry.found};
                }
            }
        }
    }

    // Pairs of elements that are read at a time: as many as there are registers for.
    static constexpr int READS = DIM / 8 <= 16 ? DIM / 8 : DIM / 16;

    template <bool whole> DEVICE bool is_of_head(int pair) const { return whole || u32(8 * pair) < args.dim; }
};
