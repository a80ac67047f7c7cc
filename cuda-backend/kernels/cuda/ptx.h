// The instructions that kernels use, for nvcc and NVRTC. `emulator/ptx.h` has the same names for a CPU. Kernels use only these
// functions and global memory.
//
// Shared memory has 32-bit addresses, as in the instructions.
#pragma once
#include "arguments.h"

#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")
// The last arguments: threads of a block, and the least number of blocks that a multiprocessor has room for.
#define KERNEL(name, Arguments, ...) \
    extern "C" __global__ void __launch_bounds__(__VA_ARGS__) name(const __grid_constant__ Arguments args)

// Whether the instructions of `ptx_hopper.h` are available.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define HOPPER 1
#else
#define HOPPER 0
#endif

#define INFINITE __int_as_float(0x7f800000)

DEVICE u32 thread_x() { return threadIdx.x; }
DEVICE u32 block_x() { return blockIdx.x; }
DEVICE u32 block_y() { return blockIdx.y; }
DEVICE u32 block_z() { return blockIdx.z; }
DEVICE u32 grid_x() { return gridDim.x; }

// The address of the block's dynamic shared memory: a multiple of 1024, as the swizzled tiles of TMA need it.
DEVICE u32 shared_base() {
    extern __shared__ __align__(1024) u8 shared[];
    return static_cast<u32>(__cvta_generic_to_shared(shared));
}

// A barrier for the whole block. Returns whether `odd` is true for any of its threads.
DEVICE bool barrier_or(bool odd) { return __syncthreads_or(odd); }

DEVICE void warp_sync() { __syncwarp(); }
DEVICE float shuffle_xor(float value, u32 mask) { return __shfl_xor_sync(~0u, value, mask); }
DEVICE float shuffle(float value, u32 lane) { return __shfl_sync(~0u, value, lane); }
DEVICE u32 vote(bool set) { return __ballot_sync(~0u, set); }

// Copies 16 bytes from global to shared memory, or writes 16 zeros. Complete for this thread after the next wait.
DEVICE void copy_async(u32 into, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 ::"r"(into), "l"(__cvta_generic_to_global(from)), "r"(there ? 16 : 0) : "memory");
}
DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `later` groups of this thread are incomplete.
template <int later> DEVICE void copy_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(later) : "memory"); }

// Four 8 x 8 matrices of 16-bit elements. Lane 8i + r gives the address of row r of matrix i. Lane l receives from matrix i
// elements (l / 4, l % 4 · 2) and the next one in the row; transposed (l % 4 · 2, l / 4) and the next one in the column.
DEVICE void load_matrices(u32 (&r)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row) : "memory");
}
DEVICE void load_matrices_transposed(u32 (&r)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row) : "memory");
}
DEVICE u32 load_shared(u32 address) {
    u32 word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
    return word;
}
// Two or four words in a row, at a multiple of their size.
DEVICE void load_shared(u32 (&words)[2], u32 address) {
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(address) : "memory");
}
DEVICE void load_shared(u32 (&words)[4], u32 address) {
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(address) : "memory");
}
DEVICE void store_shared(u32 address, u32 word) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

// 2^x; subnormal results are 0.
DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float log_natural(float x) { return logf(x); }
DEVICE float tanh_exact(float x) { return tanhf(x); }
DEVICE float fused(float x, float y, float z) { return fmaf(x, y, z); }
// Rounded: the compiler fuses `x * y + z`.
DEVICE float product(float x, float y) { return __fmul_rn(x, y); }
// NaN stays NaN.
DEVICE float at_most(float x, float most) {
    float y;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(most));
    return y;
}
DEVICE float larger(float x, float y) { return fmaxf(x, y); }
DEVICE float magnitude(float x) { return fabsf(x); }
DEVICE u32 bits_of(float x) { return __float_as_uint(x); }
DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }

// The 16-bit storage types.
struct Bf16 {
    static constexpr u32 EXPONENT = 0x7f80;
    DEVICE static u32 pack(float low, float high) {
        u32 pair;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
        return pair;
    }
    DEVICE static float low(u32 pair) { return __int_as_float(pair << 16); }
    DEVICE static float high(u32 pair) { return __int_as_float(pair & 0xffff0000u); }
    // c (16 x 8) += a (16 x 16) · b (16 x 8). Lane l has rows l / 4 and l / 4 + 8 of c, columns l % 4 · 2 and the next one.
    DEVICE static void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

struct F16 {
    static constexpr u32 EXPONENT = 0x7c00;
    DEVICE static u32 pack(float low, float high) {
        u32 pair;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
        return pair;
    }
    DEVICE static float widen(u16 half) {
        float wide;
        asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(half));
        return wide;
    }
    DEVICE static float low(u32 pair) { return widen(static_cast<u16>(pair)); }
    DEVICE static float high(u32 pair) { return widen(static_cast<u16>(pair >> 16)); }
    DEVICE static void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};
