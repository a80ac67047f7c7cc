// Common to all kernels of the backward pass.
//
// There are two kernels for each call, without atomic additions: in one a block has query rows and iterates over keys, in the
// other it has keys and iterates over the query heads that read them and their rows. Each sum is made by one thread, in the order
// of the work list, and added to memory once. So sums depend on the arguments only.
//
// A third one adds to the gradient of a bias, on request. A block has keys, and iterates over the rows of one query head. No two
// blocks of a launch have the same element: query heads or batch entries that share elements have launches of their own.
#pragma once
#include "logits.h"

// Query rows and keys of a tile of the work lists. A block may have fewer.
static constexpr u32 BACKWARD_TILE = 64;

// P and dS are multiplied by 2^LIFT before they are rounded. P is at most 1. With many keys it would be subnormal in f16.
template <typename T> struct Lift {
    static constexpr float EXPONENT = 0.0f, BACK = 1.0f;
    static constexpr bool NARROW = false;
};
template <> struct Lift<F16> {
    static constexpr float EXPONENT = 12.0f, BACK = 1.0f / 4096.0f;
    static constexpr bool NARROW = true;
};

// P of a logit, times 2^LIFT. Rounded, a logit may be above the log-sum-exp: P is at most 1. `lift` is that of the row.
template <typename T> DEVICE float share(float logit, float lse, float lift) {
    return exp2_fast(at_most(fused(logit - lse, LOG2_E, lift), Lift<T>::EXPONENT));
}

// What a pair needs of its row.
template <typename T> struct RowNumbers {
    // The log-sum-exp is lse and a rest, which is the last term of the exponent together with LIFT: logit - lse has no bits for it.
    float lse, lift, delta;
    RowSpan span;

    // Of a row behind the last, and of one without visible keys: no pair counts, and the weight of a finite logit is 0.
    DEVICE RowNumbers() : lse(INFINITE), lift(Lift<T>::EXPONENT), delta(0.0f), span{0, 0} {}
    DEVICE RowNumbers(const BackwardArguments &args, u32 batch, u32 mask_class, TileRow at) : RowNumbers() {
        if (at.row >= args.attend.rows) return;
        const float *stats = head_of<float>(args.stats, batch, at.head) + at.row * args.stats.row_stride;
        if (stats[0] == -EMPTY_M) return;
        lse = stats[0];
        lift = fused(-stats[3], LOG2_E, Lift<T>::EXPONENT);
        delta = stats[2];
        span = args.attend.spans[u64(mask_class) * args.attend.rows + at.row];
    }
};

// The tiles of the other side that a tile meets.
DEVICE Tiles tiles_of(const AttendArguments &args, u32 mask_class, u32 tile) {
    const u32 *starts = args.starts + mask_class * (args.q_tiles + 1) + tile;
    return {args.runs + starts[0], args.runs + starts[1], 0, 0};
}

// The tile of a block of the kernel of dK and dV: consecutive keys of one KV head.
struct KeyPlace {
    u32 first, batch, kv_head, mask_class;

    DEVICE KeyPlace(const AttendArguments &args, u32 keys)
        : first((args.first_tile + block_x()) * keys), batch(args.first_batch + block_z()),
          kv_head(args.first_head + block_y()), mask_class(args.classes > 1 ? batch : 0) {}
};

// The tile of a block of the kernel of the gradient of a bias: consecutive keys for one query head.
struct BiasPlace : KeyPlace {
    u32 head;
    // Where the gradient has the head's row 0.
    float *into;

    DEVICE BiasPlace(const BackwardArguments &args, u32 keys) : KeyPlace(args.attend, keys), head(kv_head) {
        kv_head = args.attend.kv_head_of[head];
        into = args.d_bias + batch * args.bias_sum.batch_stride + head * args.bias_sum.head_stride;
    }
};
