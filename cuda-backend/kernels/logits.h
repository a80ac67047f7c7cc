// Masks, logits and the merge into a state: common to all attention kernels.
#pragma once
#include "ptx.h"

static constexpr float LOG2_E = 1.44269504f, LOG2_E_REST = 1.92596299e-8f;
// m of a row that has seen no key, in a state in memory.
static constexpr float EMPTY_M = -0.7f * 3.40282347e38f;

// Iterates over the tiles of keys of a query tile, in order, up to tile `end_taken` (exclusive) of the run `end`.
struct Tiles {
    const TileRun *run, *end;
    u32 taken, end_taken;

    DEVICE bool done() const { return run == end && taken == end_taken; }
    DEVICE u32 tile() const { return run->first + taken; }
    DEVICE bool full() const { return run->full; }
    DEVICE void advance() {
        if (++taken == run->count) {
            ++run;
            taken = 0;
        }
    }
    // Moves to the `n`-th tile.
    DEVICE void skip(u32 n) {
        while (run != end && n >= run->count) n -= run++->count;
        taken = n;
    }
};

// A row of a query tile. Behind the last row of the call, `row` is at least args.rows.
struct TileRow {
    u32 row, head;
};

// Numbers that are read or written by one instruction.
struct alignas(8) Pair {
    float x, y;
};
struct alignas(16) Four {
    float x[4];
};
DEVICE Pair &pair_at(float *address) { return *reinterpret_cast<Pair *>(address); }
DEVICE Four &four_at(float *address) { return *reinterpret_cast<Four *>(address); }
DEVICE const Pair &pair_at(const float *address) { return *reinterpret_cast<const Pair *>(address); }
DEVICE const Four &four_at(const float *address) { return *reinterpret_cast<const Four *>(address); }

// The query tile of a block: consecutive rows of one head.
struct Place {
    // The rows are merged into an existing state, or written to a fresh one.
    static constexpr bool PARTS = false;

    u32 tile, head, batch, kv_head, mask_class;

    DEVICE Place(const AttendArguments &args, u32 tile, u32 head, u32 batch)
        : tile(tile), head(head), batch(batch), kv_head(args.kv_head_of[head]),
          mask_class(args.classes > 1 ? batch : 0) {}
    // The last tiles come first: under a causal mask they have the most keys.
    DEVICE explicit Place(const AttendArguments &args)
        : Place(args, args.first_tile + grid_x() - 1 - block_x(), args.first_head + block_y(),
                args.first_batch + block_z()) {}

    DEVICE Tiles tiles(const AttendArguments &args) const {
        const u32 *starts = args.starts + mask_class * (args.q_tiles + 1) + tile;
        return {args.runs + starts[0], args.runs + starts[1], 0, 0};
    }
    // The `n`-th row of the tile.
    DEVICE TileRow row(u32 tile_rows, u32 n) const { return {tile * tile_rows + n, head}; }
    // The key positions that a row sees; none behind the last row.
    DEVICE RowSpan span(const AttendArguments &args, u32 row) const {
        return row < args.rows ? args.spans[u64(mask_class) * args.rows + row] : RowSpan{0, 0};
    }
    // Addresses of the state of a row.
    DEVICE float *a(const AttendArguments &args, TileRow at) const {
        return args.a + ((u64(batch) * args.rows + at.row) * args.heads + at.head) * args.dim;
    }
    DEVICE float *ml(const AttendArguments &args, TileRow at) const {
        return args.ml + ((u64(batch) * args.heads + at.head) * args.rows + at.row) * 2;
    }
};

template <typename E> DEVICE const E *head_of(const Tensor &tensor, u32 batch, u32 head) {
    return static_cast<const E *>(tensor.data) + batch * tensor.batch_stride + head * tensor.head_stride;
}

// The position of a key. Behind the last key: a position that is in no span.
DEVICE u32 position_of(const AttendArguments &args, u32 key) {
    return key < args.keys ? args.positions[key] : ~0u;
}

// The storage type f32; Bf16 and F16 are in ptx.h.
struct F32 {};

template <typename T> DEVICE float element(const void *data, u64 index) {
    return T::low(static_cast<const u16 *>(data)[index]);
}
template <> DEVICE float element<F32>(const void *data, u64 index) { return static_cast<const float *>(data)[index]; }

// The term that is added to the logit of a (row, key position); -inf hides the key.
template <typename T>
DEVICE float term(const AttendArguments &args, u32 batch, TileRow at, RowSpan span, u32 position) {
    if (position < span.lo || position >= span.hi) return -INFINITE;
    if (args.bias_kind == NO_BIAS) return 0.0f;
    const u64 first = batch * args.bias.batch_stride + at.row * args.bias.row_stride + at.head * args.bias.head_stride;
    if (args.bias_kind == MASK_TENSOR) {
        const u32 word = static_cast<const u32 *>(args.bias.data)[first + position / 32];
        return word >> position % 32 & 1 ? 0.0f : -INFINITE;
    }
    const float bias = element<T>(args.bias.data, first + position);
    // The contract of the bias tensor: only -inf hides a key, and logits stay above EMPTY_M.
    return bias < -1e38f && bias != -INFINITE ? -1e38f : bias;
}

// Whether a softcap or a bias applies, so that logits are not q·k times one factor.
DEVICE bool reshaped(const AttendArguments &args) { return args.cap != 0.0f || args.bias_kind == ADDITIVE_BIAS; }

// e^x, where x is at most about 0.
DEVICE float exp_fast(float x) { return exp2_fast(x * LOG2_E); }

// The weight of a logit is 2^(score · (scale · log2 e) - base): one fused operation and one power. `base` is log2 e times the largest
// logit, rounded, so all weights of a row are off by one factor, 2^`off`. Below FAR it is so near to 1 that a weight of 1 is still 1 in f16 and
// bf16. Beyond, it would be without bound: there the largest logit is subtracted first.
struct Anchor {
    static constexpr float FAR = 4096.0f;

    DEVICE static float of(float m) { return m == -INFINITE ? 0.0f : product(m, LOG2_E); }
    DEVICE static bool far(float base) { return !(magnitude(base) < FAR); }
    DEVICE static float off(float m) {
        const float base = of(m);
        return far(base) ? 0.0f : fused(-m, LOG2_E, base) - m * LOG2_E_REST;
    }
};

// The merge of one row into the state in memory.
struct Entry {
    float keep, found;  // factors for the old state and for this block's sums
    float m, l;
    bool nothing;

    // Merges the largest logit and the sum of this block with (m, l) of the state; the block's sums lack the factor 2^`off`. If one side saw
    // no key, the other side stays as it is. If none did, this is an empty state.
    DEVICE Entry(float new_m, float new_l, float off, float old_m, float old_l)
        : keep(0.0f), found(0.0f), m(EMPTY_M), l(0.0f), nothing(new_m == -INFINITE && new_l == 0.0f) {
        if (nothing) return;
        const bool fresh = old_l == 0.0f && old_m == EMPTY_M;
        m = fresh ? new_m : larger(new_m, old_m);
        found = exp2_fast(fused(new_m - m, LOG2_E, off));
        l = new_l * found;
        if (!fresh) {
            keep = exp_fast(old_m - m);
            l += old_l * keep;
        }
    }
    DEVICE float of(float old, float sum) const { return keep == 0.0f ? sum * found : fused(old, keep, sum * found); }
};

// The result of a row from its state, in elements of type T; that of an element is `of(a)`. `sink`: null, or the logit of a key with the
// value 0.
template <typename T> struct Result {
    // The log-sum-exp is lse + rest. Far from 0, m + ln l rounds to m, and lse alone has lost ln l.
    float lse, rest;

    DEVICE Result(float m, float l, const float *sink) : weight(1.0f) {
        // A NaN in l is not 0 and is passed on to o and lse.
        nothing = l == 0.0f;
        if (sink) {
            const float most = nothing ? *sink : larger(m, *sink);
            weight = nothing ? 0.0f : exp_fast(m - most);
            l = l * weight + exp_fast(*sink - most);
            m = most;
        }
        const float of_sum = log_natural(l);
        lse = l == 0.0f ? -INFINITE : m + of_sum;
        rest = magnitude(lse) < INFINITE ? of_sum - (lse - m) : 0.0f;
        sum = l;
        factor = weight / l;
    }
    // Adding 0 makes -0 positive: the sign of a zero would depend on the order of merges.
    DEVICE float of(float a) const { return nothing ? 0.0f : divided(a, T()) + 0.0f; }

private:
    float weight, sum, factor;
    bool nothing;

    // 16 bits hide the rounding of the factor. In f32 one key alone has its value as the result, to the last bit.
    template <typename E> DEVICE float divided(float a, E) const { return a * factor; }
    DEVICE float divided(float a, F32) const { return a * weight / sum; }
};
