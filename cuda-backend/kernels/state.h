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
        lse = n;
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
    const float ours = exp2_fast((our_m - m) * LOG2_E), theirs = exp2_fast((their_m - m) * LOG2_E);
    for (u32 d = row.lane; d < args.dim; d += 32) {
        const float from = args.from_a[row.a + d];
        args.a[row.a + d] = fresh ? from : fused(args.a[row.a + d], ours, from * theirs);
    }
    if (row.lane == 0) {
        args.ml[row.ml] = m;
        args.ml[row.ml + 1] = fresh ? their_l : fused(our_l, ours, their_l * theirs);
    }
}

// Calls `with(part, m, l)` for each part in which the row saw a key, in order.
template <typename With> DEVICE void each_part(const PartsArguments &args, u64 ml_stride, u64 row_ml, With with) {
    for (u32 part = 0; part < args.parts; part++) {
        const float *ml = args.state.from_ml + part * ml_stride + row_ml;
        if (ml[0] != EMPTY_M || ml[1] != 0.0f) with(part, ml[0], ml[1]);
    }
}

// Merges parts in their order, not in the order in which blocks end: the same parts give the same bytes.
DEVICE void merge_in_order(const PartsArguments &args) {
    const StateArguments &state = args.state;
    const StateRow row(state);
    if (!row.there) return;
    const u64 rows = u64(state.batch) * state.rows * state.heads;
    const float old_m = state.ml[row.ml], old_l = state.ml[row.ml + 1];
    // All lanes must have read before one writes.
    warp_sync();
    const bool fresh = old_l == 0.0f && old_m == EMPTY_M;
    // EMPTY_M is less than every finite logit.
    float m = old_m;
    bool any = false;
    each_part(args, rows * 2, row.ml, [&](u32, float their_m, float) {
        m = larger(m, their_m);
        any = true;
    });
    if (!any) return;
    const float keep = fresh ? 0.0f : exp2_fast((old_m - m) * LOG2_E);
    float l = old_l * keep;
    each_part(args, rows * 2, row.ml,
              [&](u32, float their_m, float their_l) { l = fused(their_l, exp2_fast((their_m - m) * LOG2_E), l); });
    for (u32 d = row.lane; d < state.dim; d += 32) {
        float a = fresh ? 0.0f : state.a[row.a + d] * keep;
        each_part(args, rows * 2, row.ml, [&](u32 part, float their_m, float) {
            a = fused(state.from_a[part * rows * state.dim + row.a + d], exp2_fast((their_m - m) * LOG2_E), a);
        });
        state.a[row.a + d] = a;
    }
    if (row.lane == 0) {
        state.ml[row.ml] = m;
        state.ml[row.ml + 1] = l;
    }
}

template <typename T> DEVICE void store(void *o, u64 index, float value) {
    static_cast<u16 *>(o)[index] = static_cast<u16>(T::pack(value, 0.0f));
}
template <> DEVICE void store<F32>(void *o, u64 index, float value) { static_cast<float *>(o)[index] = value; }

template <typename T> DEVICE void finalize(const StateArguments &args) {
    const StateRow row(args);
    if (!row.there) return;
    float m = args.ml[row.ml], l = args.ml[row.ml + 1], weight = 1.0f;
    // A NaN in l is not 0 and is passed on to o and lse.
    const bool nothing = l == 0.0f;
    if (args.sinks) {
        const float sink = args.sinks[row.head];
        const float most = nothing ? sink : larger(m, sink);
        weight = nothing ? 0.0f : exp2_fast((m - most) * LOG2_E);
        l = l * weight + exp2_fast((sink - most) * LOG2_E);
        m = most;
    }
    // Adding 0 makes -0 positive: the sign of a zero would depend on the order of merges.
    for (u32 d = row.lane; d < args.dim; d += 32)
        store<T>(args.o, row.a + d, nothing ? 0.0f : args.a[row.a + d] * weight / l + 0.0f);
    if (row.lane == 0) args.lse[row.lse] = l == 0.0f ? -INFINITE : m + log_natural(l);
}
