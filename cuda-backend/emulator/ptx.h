// The instructions that kernels use, on a CPU: the names of `kernels/cuda/ptx.h`, with the semantics of the PTX ISA. Every lane is
// a fiber (`machine.h`). A warp-wide instruction is executed when all lanes have reached it.
#pragma once
#include "../kernels/arguments.h"
#include "machine.h"

#include <cmath>
#include <cstring>

#define DEVICE inline
#define UNROLL
#define ROLLED
constexpr u32 threads_of(u32 threads, u32 = 1) { return threads; }
#define KERNEL(name, Arguments, ...)                                                                   \
    static void name(const Arguments &args);                                                           \
    static const machine::Kernel kernel_##name(#name, sizeof(Arguments), threads_of(__VA_ARGS__), [](const void *args) { \
        name(*static_cast<const Arguments *>(args));                                                   \
    });                                                                                                \
    static void name(const Arguments &args)

#define HOPPER 1

#define INFINITE __builtin_inff()

inline u32 thread_x() { return machine::here().thread; }
inline u32 block_x() { return machine::here().block[0]; }
inline u32 block_y() { return machine::here().block[1]; }
inline u32 block_z() { return machine::here().block[2]; }
inline u32 grid_x() { return machine::here().grid[0]; }
inline u32 shared_base() { return machine::SHARED_BASE; }

inline bool barrier_or(bool odd) { return machine::barrier_or(odd); }
inline void warp_sync() { machine::warp_sync(); }
inline float shuffle_xor(float value, u32 mask) { return machine::shuffle(value, thread_x() % 32 ^ mask); }
inline float shuffle(float value, u32 lane) { return machine::shuffle(value, lane); }
inline u32 vote(bool set) { return machine::vote(set); }

inline void copy_async(u32 into, const void *from, bool there) { machine::copy_async(into, there ? from : nullptr); }
inline void copy_async_commit() { machine::copy_async_commit(); }
template <int later> inline void copy_async_wait() { machine::copy_async_wait(later); }

inline void load_matrices(u32 (&r)[4], u32 row) { machine::load_matrices(r, row, false); }
inline void load_matrices_transposed(u32 (&r)[4], u32 row) { machine::load_matrices(r, row, true); }
inline u32 load_shared(u32 address) { return machine::load_shared(address); }
inline void load_shared(u32 (&words)[2], u32 address) { machine::load_shared(words, 2, address); }
inline void load_shared(u32 (&words)[4], u32 address) { machine::load_shared(words, 4, address); }
inline void store_shared(u32 address, u32 word) { machine::store_shared(address, word); }

inline float exp2_fast(float x) {
    const float y = std::exp2(x);
    return y < 1.17549435e-38f ? 0.0f : y;
}
inline float log_natural(float x) { return std::log(x); }
inline float tanh_exact(float x) { return std::tanh(x); }
inline float fused(float x, float y, float z) { return std::fma(x, y, z); }
inline float product(float x, float y) { return x * y; }
inline float at_most(float x, float most) { return x > most ? most : x; }
inline float larger(float x, float y) { return std::fmax(x, y); }
inline float magnitude(float x) { return std::fabs(x); }
inline u32 bits_of(float x) {
    u32 bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}
inline float float_of(u32 bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

template <typename T> struct Sixteen {
    static u32 pack(float low, float high) { return T::narrow(low) | u32(T::narrow(high)) << 16; }
    static float low(u32 pair) { return T::widen(u16(pair)); }
    static float high(u32 pair) { return T::widen(u16(pair >> 16)); }
    static void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        const u32 b[2] = {b0, b1};
        machine::multiply(c, a, b, &T::widen);
    }
};
struct Bf16 : Sixteen<Bf16> {
    static constexpr u32 EXPONENT = 0x7f80;
    static float widen(u16 bits) { return machine::widen_bf16(bits); }
    static u16 narrow(float value) { return machine::narrow_bf16(value); }
};
struct F16 : Sixteen<F16> {
    static constexpr u32 EXPONENT = 0x7c00;
    static float widen(u16 bits) { return machine::widen_f16(bits); }
    static u16 narrow(float value) { return machine::narrow_f16(value); }
};
