// Running states: reset, merge, finalize. One warp for each row of a head.
#pragma once
#include "logits.h"

struct StateRow {
    static constexpr int THREADS = 256;

    u32 lane;
    bool there;
    u64 a, ml, lse;  // indices of the row's elements
    u32 head;

    DEVICE explicit StateRow(const StateArguments &args) : lane(thread_x() % 32) {
        const u64 n = u64(block_x()) * (THREADS / 32) + thread_x() / 32;
        there = n < u64(args.batch) * args.rows * args.heads;
        head = n % args.heads;
        const u64 row = n / args.heads % args.rows, batch = n / args.heads / args.rows;
        a = n * args.dim;
        ml = ((batch * args.heads + head) * args.rows + row) * 2;
        lse = n * 2;
    }
};

DEVICE void reset(const StateArguments &args) {
    const StateRow row(args);
    if (!row.there) return;
    for (u32 d = row.lane; d < args.dim; d += 32) args.a[row.a + d] = 0.0f;
    if (row.lane == 0) {
        args.ml[row.ml] = EMPTY_M;
        args.ml[row.ml + 1] = 0.0f;
    }
}

// If one side of a row is empty, the result is the other side, bit for bit.
DEVICE void merge(const StateArguments &args) {
    const StateRow row(args);
    if (!row.there) return;
    const float our_m = args.ml[row.ml], our_l = args.ml[row.ml + 1];
    const float their_m = args.from_ml[row.ml], their_l = args.from_ml[row.ml + 1];
    // All lanes must have read before one writes.
    warp_sync();
    if (their_l == 0.0f && their_m == EMPTY_M) return;
    const bool fresh = our_l == 0.0f && our_m == EMPTY_M;
    const float m = fresh ? their_m : larger(our_m, their_m);
    const float ours = exp_fast(our_m - m), theirs = exp_fast(their_m - m);
    for (u32 d = row.lane; d < args.dim; d += 32) {
        const float from = args.from_a[row.a + d];
        args.a[row.a + d] = fresh ? from : fused(args.a[row.a + d], ours, from * theirs);
    }
    if (row.lane == 0) {
        args.ml[row.ml] = m;
        args.ml[row.ml + 1] = fresh ? their_l : fused(our_l, ours, their_l * theirs);
    }
}

// Merges parts in their order, not in the order in which blocks end: the same parts give the same bytes.
//
// Short, so it waits for memory most of the time. A lane has four elements (eight of the largest heads). It reads m and l of one
// part in 32, so the warp has the weights of 32 parts at once, and the elements of several parts before it adds the first.
struct Parts {
    static constexpr u32 MOST_DIM = 256, AT_ONCE = 8;

    const PartsArguments &args;
    const StateArguments &state;
    const StateRow row;

    DEVICE explicit Parts(const PartsArguments &args) : args(args), state(args.state), row(args.state) {}

    // m and l of this lane's part of those from `first` on; those of an empty state if there is none.
    DEVICE Pair ml(u32 first) const {
        const u32 part = first + row.lane;
        if (part >= args.parts) return {EMPTY_M, 0.0f};
        const u64 rows = u64(state.batch) * state.rows * state.heads;
        return pair_at(state.from_ml + part * rows * 2 + row.ml);
    }
    // The row saw no key of a part; then its elements are not written.
    DEVICE static bool empty(const Pair &ml) { return ml.x == EMPTY_M && ml.y == 0.0f; }

    DEVICE void run() const {
        if (!row.there) return;
        const Pair old = args.fresh ? Pair{EMPTY_M, 0.0f} : pair_at(state.ml + row.ml);
        // EMPTY_M is less than every finite logit.
        float m = old.x;
        bool any = false;
        for (u32 first = 0; first < args.parts; first += 32) {
            const Pair one = ml(first);
            m = larger(m, one.x);
            any |= vote(!empty(one)) != 0;
        }
        for (u32 apart = 16; apart; apart /= 2) m = larger(m, shuffle_xor(m, apart));
        // All lanes must have read before one writes.
        warp_sync();
        if (!any && !args.fresh) return;
        if (state.dim <= 128)
            add<1>(old, m);
        else
            add<MOST_DIM / 128>(old, m);
    }

    // Adds `UNITS` times four elements of each lane.
    template <int UNITS> DEVICE void add(const Pair &old, float m) const {
        const u64 stride = u64(state.batch) * state.rows * state.heads * state.dim;
        const bool kept = !empty(old);
        const float keep = kept ? exp_fast(old.x - m) : 0.0f;
        Four sums[UNITS];
        float l = 0.0f;
        UNROLL for (int unit = 0; unit < UNITS; unit++) {
            const u32 d = 4 * row.lane + 128 * unit;
            sums[unit] = kept && d < state.dim ? four_at(state.a + row.a + d) : Four{};
            UNROLL for (int k = 0; k < 4; k++) sums[unit].x[k] *= keep;
        }
        for (u32 first = 0; first < args.parts; first += 32) {
            const Pair one = ml(first);
            const float weight = empty(one) ? 0.0f : exp_fast(one.x - m);
            const u32 seen = vote(!empty(one));
            l = fused(one.y, weight, l);
            const u32 end = args.parts - first < 32 ? args.parts - first : 32;
            for (u32 n = 0; n < end; n += AT_ONCE) {
                float of_part[AT_ONCE];
                UNROLL for (u32 i = 0; i < AT_ONCE; i++) of_part[i] = shuffle(weight, n + i);
                Four found[AT_ONCE][UNITS];
                UNROLL for (u32 i = 0; i < AT_ONCE; i++)
                    UNROLL for (int unit = 0; unit < UNITS; unit++) {
                        const u32 d = 4 * row.lane + 128 * unit;
                        const float *from = state.from_a + (first + n + i) * stride + row.a + d;
                        found[i][unit] = seen >> (n + i) & 1 && d < state.dim ? four_at(from) : Four{};
                    }
                UNROLL for (u32 i = 0; i < AT_ONCE; i++)
                    UNROLL for (int unit = 0; unit < UNITS; unit++)
                        UNROLL for (int k = 0; k < 4; k++)
                            sums[unit].x[k] = fused(found[i][unit].x[k], of_part[i], sums[unit].x[k]);
            }
        }
        for (u32 apart = 16; apart; apart /= 2) l += shuffle_xor(l, apart);
        UNROLL for (int unit = 0; unit < UNITS; unit++) {
            const u32 d = 4 * row.lane + 128 * unit;
            if (d < state.dim) four_at(state.a + row.a + d) = sums[unit];
        }
        if (row.lane == 0) pair_at(state.ml + row.ml) = {m, kept ? fused(old.y, keep, l) : l};
    }
};

template <typename T> DEVICE void store(void *o, u64 index, float value) {
    static_cast<u16 *>(o)[index] = static_cast<u16>(T::pack(value, 0.0f));
}
template <> DEVICE void store<F32>(void *o, u64 index, float value) { static_cast<float *>(o)[index] = value; }

template <typename T> DEVICE void finalize(const StateArguments &args) {
    const StateRow row(args);
    if (!row.there) return;
    const Result<T> result(args.ml[row.ml], args.ml[row.ml + 1], args.sinks ? args.sinks + row.head : nullptr);
    for (u32 d = row.lane; d < args.dim; d += 32) store<T>(args.o, row.a + d, result.of(args.a[row.a + d]));
    if (row.lane == 0) pair_at(args.lse + row.lse) = {result.lse, result.rest};
}
