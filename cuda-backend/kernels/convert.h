// Conversion between storage types, rounded to nearest, ties to even. Values that are too large become infinite.
//
// Bound by memory: each element is read once and written once, 6 bytes.
#pragma once
#include "logits.h"

static constexpr int CONVERT_THREADS = 256;

// 16 bytes that are read or written by one instruction.
struct alignas(16) Unit {
    u32 words[4];
};

// Elements 8 · eight to 8 · eight + 7 of a tensor whose address is a multiple of 16.
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

// Whether a finite number becomes infinite: in f16 from half a step above its largest number on. Others have the range of f32.
template <typename Into> DEVICE bool overflows(float) { return false; }
template <> DEVICE bool overflows<F16>(float x) { return magnitude(x) >= 65520.0f && magnitude(x) < INFINITE; }

template <typename From, typename Into> DEVICE void convert(const ConvertArguments &args) {
    const u64 eight = u64(block_x()) * CONVERT_THREADS + thread_x();
    if (eight >= args.eights) return;
    float x[8];
    load_eight<From>(args.from, eight, x);
    store_eight<Into>(args.into, eight, x);
    if (args.overflow == nullptr) return;
    bool beyond = false;
    UNROLL for (int i = 0; i < 8; i++) beyond |= overflows<Into>(x[i]);
    if (beyond) *args.overflow = 1;
}
