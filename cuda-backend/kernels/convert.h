// Elements from one storage type to another, rounded to nearest, ties to even; what is too large becomes infinite.
//
// They wait for memory: at best 6 bytes for each element, which is read once and written once, over the bandwidth.
#pragma once
#include "logits.h"

static constexpr int CONVERT_THREADS = 256;

// 16 bytes, which are read and written together.
struct alignas(16) Unit {
    u32 words[4];
};

// The `eight`-th eight elements of a tensor that begins at a multiple of 16 bytes.
template <typename T> DEVICE void load_eight(const void *data, u64 eight, float (&x)[8]) {
    const Unit unit = static_cast<const Unit *>(data)[eight];
    UNROLL for (int i = 0; i < 8; i++) x[i] = i % 2 ? T::high(unit.words[i / 2]) : T::low(unit.words[i / 2]);
}
template <> DEVICE void load_eight<F32>(const void *data, u64 eight, float (&x)[8]) {
    const Unit *units = static_cast<const Unit *>(data) + 2 * eight;
    const Unit both[2] = {units[0], units[1]};
    UNROLL for (int i = 0; i < 8; i++) x[i] = float_of(both[i / 4].words[i % 4]);
}

template <typename T> DEVICE void store_eight(void *data, u64 eight, const float (&x)[8]) {
    Unit unit;
    UNROLL for (int i = 0; i < 4; i++) unit.words[i] = T::pack(x[2 * i], x[2 * i + 1]);
    static_cast<Unit *>(data)[eight] = unit;
}
template <> DEVICE void store_eight<F32>(void *data, u64 eight, const float (&x)[8]) {
    Unit both[2];
    UNROLL for (int i = 0; i < 8; i++) both[i / 4].words[i % 4] = bits_of(x[i]);
    static_cast<Unit *>(data)[2 * eight] = both[0];
    static_cast<Unit *>(data)[2 * eight + 1] = both[1];
}

template <typename From, typename Into> DEVICE void convert(const ConvertArguments &args) {
    const u64 eight = u64(block_x()) * CONVERT_THREADS + thread_x();
    if (eight >= args.eights) return;
    float x[8];
    load_eight<From>(args.from, eight, x);
    store_eight<Into>(args.into, eight, x);
}
