// Common to all tensor-core kernels of the backward pass, by mma.sync for sm_80 and later.
//
// A block has 64 rows of one side: "fixed" (query rows with q and d_o, or keys with k and v), 16 for each warp. It iterates over
// tiles of the other side, "moving", which cp.async copies into shared memory. S and dP are fixed · moving, and their fragments are
// the A fragments of the products that the sums need: (P or dS) · moving.
#pragma once
#include "attend.h"
#include "backward/common.h"

// The moving tiles of a block: for each of some query heads the same tiles.
struct HeadTiles {
    Tiles all, now;
    u32 head, end;

    DEVICE HeadTiles(Tiles all, u32 head, u32 end) : all(all), now(all), head(all.done() ? end : head), end(end) {}
    DEVICE bool done() const { return head == end; }
    DEVICE u32 count() const {
        u32 of_head = 0;
        for (const TileRun *run = all.run; run != all.end; run++) of_head += run->count;
        return (end - head) * of_head;
    }
    DEVICE void advance() {
        now.advance();
        if (!now.done()) return;
        now = all;
        head++;
    }
};

template <typename T, int DIM, int MOVING_, int WARPS> struct BackwardTiles {
    using Tile = Attention<T, DIM, Place, WARPS>;
    using Mine = Rows<T, DIM, MOVING_, Place>;
    static constexpr int THREADS = WARPS * 32, FIXED = 64, MOVING = MOVING_;
    static constexpr u32 FIXED_BYTES = FIXED * DIM * 2, MOVING_BYTES = MOVING * DIM * 2;
    using Products = float[MOVING / 8][4];

    const BackwardArguments &args;
    const AttendArguments &attend;
    // The first fixed row of this warp in the block.
    const u32 lane, mine;
    const bool bent;
    // Logits are scores · scale, unless `bent`.
    const float scale;

    DEVICE explicit BackwardTiles(const BackwardArguments &args)
        : args(args), attend(args.attend), lane(thread_x() % 32), mine(thread_x() / 32 % 4 * 16),
          bent(reshaped(attend) || attend.scale < 0.0f),
          // As in the forward pass a scale of 0 is a tiny one, because of infinite scores.
          scale(attend.scale < 0.0f ? attend.scale : larger(attend.scale, 1.2e-38f)) {}

    // Starts copies of rows first.. of a head into a tile, with zeros behind row `end` and behind the last element.
    template <int rows> DEVICE void copy(u32 into, const u16 *head, u64 row_stride, u32 first, u32 end) const {
        Tile::template share<rows>([&](u32 n, u32 column) {
            const bool there = first + n < end && column * 8 < attend.dim;
            copy_async(into + Tile::place(n, column), head + (there ? (first + n) * row_stride + column * 8 : 0), there);
        });
    }

    // Calls step(stage, tile, odd) for all moving tiles, which alternate between two stages: while one is multiplied, the next one is
    // copied. `copy_moving(stage, tile)` starts the copy of one; `odd_here(stage, tile)` is whether this thread found in it what needs
    // selection instead of products with 0. The copies of the fixed rows were started.
    template <typename Copy, typename Odd, typename Step>
    DEVICE static void iterate(HeadTiles tiles, Copy copy_moving, Odd odd_here, Step step) {
        copy_moving(0, tiles);
        copy_async_commit();
        for (u32 stage = 0; !tiles.done(); stage ^= 1) {
            const HeadTiles here = tiles;
            tiles.advance();
            copy_async_wait<0>();
            // After this the tile is complete for all threads, and no thread reads the other stage.
            const bool odd = barrier_or(odd_here(stage, here));
            if (!tiles.done()) {
                copy_moving(stage ^ 1, tiles);
                copy_async_commit();
            }
            step(stage, here, odd);
        }
    }

    // Whether this thread's share of a moving tile has a NaN or an infinity.
    DEVICE static bool copied_odd(u32 tile) {
        bool odd = false;
        Tile::template share<MOVING>([&](u32 row, u32 column) {
            UNROLL for (u32 word = 0; word < 4; word++)
                odd |= Mine::odd_pair(load_shared(tile + Tile::place(row, column) + word * 4));
        });
        return odd;
    }

    // products = fixed rows of this warp · moving rows.
    DEVICE void multiply(Products &products, u32 fixed, u32 moving) const {
        UNROLL for (int n = 0; n < MOVING / 8; n++)
            UNROLL for (int i = 0; i < 4; i++) products[n][i] = 0.0f;
        UNROLL for (int k = 0; k < DIM / 16; k++) {
            u32 a[4];
            load_matrices(a, fixed + Tile::place(mine + lane % 16, 2 * k + lane / 16));
            UNROLL for (int n = 0; n < MOVING / 16; n++) {
                u32 b[4];
                load_matrices(b, moving + Tile::place(16 * n + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
                T::multiply(products[2 * n], a, b[0], b[1]);
                T::multiply(products[2 * n + 1], a, b[2], b[3]);
            }
        }
    }

    // A score becomes P, and dP becomes dS, or the gradient of the bias: dS without the slope of the softcap. `add` is the term of the
    // logit; -inf hides the pair: both are 0 then, whatever they are.
    template <bool OF_BIAS = false>
    DEVICE void weigh(float &score, float &dp, float lse, float lift, float delta, float add) const {
        weigh_as<OF_BIAS>(bent, score, dp, lse, lift, delta, add);
    }
    template <bool OF_BIAS>
    DEVICE void weigh_as(bool bent, float &score, float &dp, float lse, float lift, float delta, float add) const {
        // With exactly the rounding of the forward pass: the log-sum-exp is one of such logits, and with |x| = 2^24 a unit in the last
        // place of x is a factor of e on P.
        float x = product(score, scale), d = dp - delta;
        if (bent && attend.cap != 0.0f) {
            const float t = tanh_exact(x);
            if (!OF_BIAS) d *= fused(-t, t, 1.0f);
            x = product(attend.cap, t);
        }
        const float p = share<T>(x + add, lse, lift);
        const bool hidden = add == -INFINITE;
        score = hidden ? 0.0f : p;
        dp = hidden ? 0.0f : p * d;
    }

    // dS of f16 can be out of its range, as the loss may be scaled. So each row's dS, and its sum so far, are multiplied by a power
    // of two that becomes smaller when it must. Values that are not finite stay as they are.
    template <int OUT> DEVICE void fit(Products &ds, float (&acc)[OUT / 8][4], float (&shrink)[2]) const {
        if (!Lift<T>::NARROW) return;
        float most[2] = {0.0f, 0.0f};
        UNROLL for (int n = 0; n < MOVING / 8; n++)
            UNROLL for (int i = 0; i < 4; i++) most[i / 2] = larger(most[i / 2], magnitude(ds[n][i]));
        if (vote(larger(most[0] * shrink[0], most[1] * shrink[1]) > 32768.0f)) {
            UNROLL for (int half = 0; half < 2; half++) {
                float of_row = larger(most[half], shuffle_xor(most[half], 1)), by = 1.0f;
                of_row = larger(of_row, shuffle_xor(of_row, 2));
                ROLLED while (of_row < INFINITE && of_row * shrink[half] * by > 32768.0f) by *= 1.0f / 1024.0f;
                shrink[half] *= by;
                UNROLL for (int j = 0; j < OUT / 8; j++)
                    UNROLL for (int i = 2 * half; i < 2 * half + 2; i++) acc[j][i] *= by;
            }
        }
        UNROLL for (int n = 0; n < MOVING / 8; n++)
            UNROLL for (int i = 0; i < 4; i++) ds[n][i] *= shrink[i / 2];
    }

    // acc += weights · moving, for the elements of a head from 16-byte column `from` on. If `odd`, elements that are not finite count
    // as 0.
    template <int OUT>
    DEVICE void add(float (&acc)[OUT / 8][4], const Products &weights, u32 moving, u32 from, bool odd) const {
        UNROLL for (int k = 0; k < MOVING / 16; k++) {
            u32 p[4];
            Mine::pack_weights(p, weights, k);
            UNROLL for (int j = 0; j < OUT / 16; j++) {
                u32 b[4];
                load_matrices_transposed(b, moving + Tile::place(16 * k + lane % 16, from + 2 * j + lane / 16));
                if (odd) {
                    UNROLL for (int i = 0; i < 4; i++) {
                        if (Mine::odd(u16(b[i]))) b[i] &= 0xffff0000u;
                        if (Mine::odd(u16(b[i] >> 16))) b[i] &= 0xffffu;
                    }
                }
                T::multiply(acc[2 * j], p, b[0], b[1]);
                T::multiply(acc[2 * j + 1], p, b[2], b[3]);
            }
        }
    }

    // The same for the elements that are not finite, only for pairs that are visible: `seen(n, half)` of moving row n, of whose
    // elements `pair_at(n, j)` is this lane's pair of the j-th 8. Rare, so short rather than fast.
    template <int OUT, typename PairAt, typename Seen>
    DEVICE void add_odd(float (&acc)[OUT / 8][4], const Products &weights, PairAt pair_at, Seen seen) const {
        ROLLED for (u32 n = 0; n < MOVING; n++) {
            // Registers cannot be indexed, so the weights of the row's group are selected by comparison.
            float of_pair[4];
            UNROLL for (int i = 0; i < 4; i++)
                UNROLL for (int group = 0; group < MOVING / 8; group++)
                    if (group == 0 || n / 8 == u32(group)) of_pair[i] = weights[group][i];
            const u32 holder = lane / 4 * 4 + n % 8 / 2;
            UNROLL for (int half = 0; half < 2; half++) {
                const float even = shuffle(of_pair[2 * half], holder), uneven = shuffle(of_pair[2 * half + 1], holder);
                const float weight = n % 2 ? uneven : even;
                if (!seen(n, half)) continue;
                UNROLL for (int j = 0; j < OUT / 8; j++) {
                    const u32 pair = pair_at(n, j);
                    if (Mine::odd(u16(pair))) acc[j][2 * half] += weight * T::low(pair);
                    if (Mine::odd(u16(pair >> 16))) acc[j][2 * half + 1] += weight * T::high(pair);
                }
            }
        }
    }

    // This lane's pairs of a moving tile from 16-byte column `from` on, as `add_odd` takes them.
    DEVICE auto pairs_of(u32 moving, u32 from) const {
        return [=](u32 n, u32 j) { return load_shared(moving + Tile::place(n, from + j) + thread_x() % 4 * 4); };
    }

    // into += acc · lifted · by, for the lane's elements of half `half` from element `from` of a head on.
    template <int OUT>
    DEVICE void write(float *into, const float (&acc)[OUT / 8][4], int half, u32 from, float lifted, float by) const {
        UNROLL for (int j = 0; j < OUT / 8; j++) {
            const u32 d = from + 8 * j + lane % 4 * 2;
            if (d >= attend.dim) break;
            UNROLL for (int i = 0; i < 2; i++) into[d + i] = fused(acc[j][2 * half + i] * lifted, by, into[d + i]);
        }
    }
};
