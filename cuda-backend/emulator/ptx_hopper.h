// The instructions of Hopper, on a CPU: the names of `kernels/cuda/ptx_hopper.h`.
#pragma once
#include "ptx.h"

inline void phase_init(u32 barrier, u32 count) { machine::phase_init(barrier, count); }
inline void phases_are_there() {}
inline void stores_are_there() {}
inline void phase_arrive(u32 barrier) { machine::phase_arrive(barrier, 0); }
inline void phase_arrive_expecting(u32 barrier, u32 bytes) { machine::phase_arrive(barrier, bytes); }
inline void phase_wait(u32 barrier, u32 parity) { machine::phase_wait(barrier, parity); }

inline void copy_box(u32 into, const TensorMap &map, u32 barrier, i32 x, i32 y, i32 z, i32 w) {
    const i32 at[4] = {x, y, z, w};
    machine::copy_box(into, &map, barrier, at, 4);
}

inline void named_sync(u32 id, u32 threads) { machine::named_or(id, threads, false); }
inline void named_arrive(u32 id, u32 threads) { machine::named_arrive(id, threads); }
inline bool named_or(u32 id, u32 threads, bool set) { return machine::named_or(id, threads, set); }

// The value of lane 0, for branches that are uniform in a warp.
inline u32 warp_uniform(u32 value) { return value; }
inline bool elect_one() {
    warp_sync();
    return thread_x() % 32 == 0;
}

template <u32 count> inline void registers_fewer() {
    static_assert(count % 8 == 0 && count >= 24 && count <= 256, "what setmaxnreg takes");
}
template <u32 count> inline void registers_more() { registers_fewer<count>(); }

inline void wgmma_fence() { machine::wgmma_fence(); }
inline void wgmma_commit() { machine::wgmma_commit(); }
template <int later> inline void wgmma_wait() { machine::wgmma_wait(later); }
template <typename E, int rows> inline void settle(E (&)[rows][4]) {}
inline void not_before(float) {}

template <typename T, int N> struct Wgmma {
    static void shared(float (&c)[N / 8][4], u64 a, u64 b, bool adds) {
        machine::wgmma(c[0], N, nullptr, a, b, adds, false, &T::widen);
    }
    static void registers(float (&c)[N / 8][4], const u32 (&a)[4], u64 b) {
        machine::wgmma(c[0], N, a, 0, b, true, true, &T::widen);
    }
    static void by_columns(float (&c)[N / 8][4], const u32 (&a)[4], u64 b, bool adds) {
        machine::wgmma(c[0], N, a, 0, b, adds, false, &T::widen);
    }
};
