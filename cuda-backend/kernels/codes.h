// Elements to 8-bit codes and back. An element is its code times a scale, which a group of elements shares. A scale is the
// largest finite magnitude of its group divided by 127.
//
// Bound by memory: each element is read once and written once, 3 bytes for a 16-bit element and 5 for f32, and 4 bytes per scale.
#pragma once
#include "convert.h"

// The code of elements that are not finite. They come back as NaN.
static constexpr u32 CODE_NOT_FINITE = 0x80;

// Eight consecutive codes.
struct alignas(8) EightCodes {
    u32 words[2];
};

// The magnitude of an element for the scale: 0 if it is not finite.
DEVICE float counted(float x) { return magnitude(x) < INFINITE ? magnitude(x) : 0.0f; }

// The scale, or 0 if it would be subnormal: other devices may flush subnormal numbers.
DEVICE float scale_for(float largest) {
    const float scale = largest / 127.0f;
    return scale < 1.17549435e-38f ? 0.0f : scale;
}

DEVICE float inverse_of(float scale) { return scale == 0.0f ? 0.0f : 1.0f / scale; }

DEVICE u32 code_of(float x, float scale, float inverse) {
    // The second step corrects the product to the result of a division, so that ties are exact, with a third of its instructions.
    const float about = x * inverse, quotient = fused(fused(-about, scale, x), inverse, about);
    // The sum has no fraction bits: its low bits are the nearest integer, ties to even.
    const u32 code = bits_of(quotient + 12582912.0f) & 0xff;
    return magnitude(x) < INFINITE ? code : CODE_NOT_FINITE;
}

DEVICE float number_of(u32 code, float scale) {
    return code == CODE_NOT_FINITE ? float_of(0x7fc00000) : float(i32(code << 24) >> 24) * scale;
}

DEVICE void store_codes(const CodesArguments &args, u64 eight, const float (&x)[8], const float (&scales)[8],
                        const float (&inverses)[8]) {
    EightCodes codes = {};
    UNROLL for (int i = 0; i < 8; i++) codes.words[i / 4] |= code_of(x[i], scales[i], inverses[i]) << i % 4 * 8;
    static_cast<EightCodes *>(args.codes)[eight] = codes;
}

template <typename T> DEVICE void store_numbers(const CodesArguments &args, u64 eight, const float (&scales)[8]) {
    const EightCodes codes = static_cast<const EightCodes *>(args.codes)[eight];
    float x[8];
    UNROLL for (int i = 0; i < 8; i++) x[i] = number_of(codes.words[i / 4] >> i % 4 * 8 & 0xff, scales[i]);
    store_eight<T>(args.data, eight, x);
}

// One scale per row, the elements of one head of one token. `lanes` lanes of a warp have eight elements each.
struct RowCodes {
    static constexpr int THREADS = 256;

    u64 row, eight;
    u32 lane;
    bool there;

    DEVICE explicit RowCodes(const CodesArguments &args) {
        const u64 n = u64(block_x()) * THREADS + thread_x();
        row = n / args.lanes;
        lane = n % args.lanes;
        there = row < u64(args.batch) * args.tokens * args.heads && lane < args.dim / 8;
        eight = row * (args.dim / 8) + lane;
    }

    template <typename T> DEVICE void make(const CodesArguments &args) const {
        float x[8] = {}, scales[8], inverses[8], largest = 0.0f;
        if (there) load_eight<T>(args.data, eight, x);
        UNROLL for (int i = 0; i < 8; i++) largest = larger(largest, counted(x[i]));
        // Lanes behind the last row take part in the shuffles.
        for (u32 apart = args.lanes / 2; apart; apart /= 2) largest = larger(largest, shuffle_xor(largest, apart));
        if (!there) return;
        const float scale = scale_for(largest), inverse = inverse_of(scale);
        UNROLL for (int i = 0; i < 8; i++) {
            scales[i] = scale;
            inverses[i] = inverse;
        }
        store_codes(args, eight, x, scales, inverses);
        if (lane == 0) args.scales[row] = scale;
    }

    template <typename T> DEVICE void read(const CodesArguments &args) const {
        if (!there) return;
        const float scale = args.scales[row];
        float scales[8];
        UNROLL for (int i = 0; i < 8; i++) scales[i] = scale;
        store_numbers<T>(args, eight, scales);
    }
};

// One scale per channel and group of 64 tokens. A block has 128 channels. A thread keeps eight channels of four tokens in
// registers, so that elements are read only once.
struct ChannelCodes {
    static constexpr int THREADS = 256, LANES = 16, TOKENS = 64, WARPS = THREADS / 32;
    static constexpr u32 APART = THREADS / LANES, EACH = TOKENS / APART;

    u32 lane, token, tokens, stride;  // tokens: of the group; stride: between tokens, in units of 8 elements
    u64 eight, scales;                // first elements and scales of this thread, in units of 8
    bool there;

    DEVICE explicit ChannelCodes(const CodesArguments &args) : lane(thread_x() % LANES), token(thread_x() / LANES) {
        stride = args.heads * (args.dim / 8);
        const u32 across = (stride + LANES - 1) / LANES, groups = (args.tokens + TOKENS - 1) / TOKENS;
        const u32 group = block_x() / across % groups, batch = block_x() / across / groups;
        const u32 column = block_x() % across * LANES + lane, first = group * TOKENS;
        tokens = args.tokens - first < TOKENS ? args.tokens - first : TOKENS;
        eight = (u64(batch) * args.tokens + first + token) * stride + column;
        scales = (u64(batch) * groups + group) * stride + column;
        there = column < stride;
    }
    // Whether this thread has an `i`-th token, and its index in units of 8 elements.
    DEVICE bool has(u32 i) const { return there && token + i * APART < tokens; }
    DEVICE u64 at(u32 i) const { return eight + u64(i * APART) * stride; }

    // The shared address of element `i` of each lane, for the tokens of a warp.
    DEVICE u32 place(u32 warp, u32 i) const { return shared_base() + ((warp * 8 + i) * LANES + lane) * 4; }

    template <typename T> DEVICE void make(const CodesArguments &args) const {
        float x[EACH][8] = {}, most[8] = {}, inverses[8];
        UNROLL for (u32 i = 0; i < EACH; i++)
            if (has(i)) load_eight<T>(args.data, at(i), x[i]);
        UNROLL for (u32 i = 0; i < EACH; i++)
            UNROLL for (int e = 0; e < 8; e++) most[e] = larger(most[e], counted(x[i][e]));
        // A warp has two tokens at a time: lanes of the same channels are 16 apart.
        UNROLL for (int e = 0; e < 8; e++) {
            most[e] = larger(most[e], shuffle_xor(most[e], LANES));
            if (thread_x() % 32 < LANES) store_shared(place(thread_x() / 32, e), bits_of(most[e]));
        }
        barrier_or(false);
        // Half of the threads reduce one channel each over the warps and store its scale in the first warp's place.
        if (token < 8) {
            float largest = 0.0f;
            UNROLL for (int warp = 0; warp < WARPS; warp++)
                largest = larger(largest, float_of(load_shared(place(warp, token))));
            store_shared(place(0, token), bits_of(scale_for(largest)));
        }
        barrier_or(false);
        UNROLL for (int e = 0; e < 8; e++) {
            most[e] = float_of(load_shared(place(0, e)));
            inverses[e] = inverse_of(most[e]);
        }
        UNROLL for (u32 i = 0; i < EACH; i++)
            if (has(i)) store_codes(args, at(i), x[i], most, inverses);
        if (there && token == 0) store_eight<F32>(args.scales, scales, most);
    }

    template <typename T> DEVICE void read(const CodesArguments &args) const {
        if (!there) return;
        float shared_by[8];
        load_eight<F32>(args.scales, scales, shared_by);
        UNROLL for (u32 i = 0; i < EACH; i++)
            if (has(i)) store_numbers<T>(args, at(i), shared_by);
    }
};
