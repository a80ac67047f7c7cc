// Emulates a block of CUDA threads on one CPU thread, as strictly as the PTX ISA permits.
//
// Each thread is a fiber. It runs until it has to wait, then the schedule chooses the next one. Behaviour that the ISA leaves
// open is used against the kernel: copies complete as early or as late as they may, one warp runs far ahead of the others,
// shared memory starts as NaN, and the destination of a copy is NaN until the copy is complete. A deadlock is reported, and an
// address outside of the launch's memory ends the program. Not made for speed.
#pragma once
#include "../kernels/arguments.h"

namespace machine {

// When copies complete, and in which order threads run.
enum class Timing {
    Eager,   // at once; the first warp runs as far ahead as it can
    Late,    // at the wait that needs them; the last warp runs ahead
    Random,  // at any time in between, in any order; threads take turns at random
};

// The first shared address. Not 0, so that an offset that is used as an address is a fault.
constexpr u32 SHARED_BASE = 1024;
constexpr u32 SHARED_MOST = 227 * 1024;

// The indices of the running thread.
struct Here {
    u32 thread, block[3], grid[3];
};
const Here &here();

// A kernel of this program; all are in a linked list.
struct Kernel {
    const char *name;
    u64 argument_bytes;
    u32 threads;
    void (*body)(const void *args);
    const Kernel *next;

    Kernel(const char *name, u64 argument_bytes, u32 threads, void (*body)(const void *args));
    static const Kernel *find(const char *name);
};

// Counts of a run. An access of ldmatrix is 8 rows of 16 bytes. It takes as many passes as there are rows in the busiest bank.
// busiest: products of the block that has the most.
struct Counts {
    u64 accesses, passes, copies, barriers, products, busiest;
};

// Runs all blocks of a launch, one after the other. Ends the program with a message on a fault.
void launch(const Kernel &kernel, const u32 (&grid)[3], u32 shared_bytes, const void *args, Timing timing, u64 seed);
const Counts &counts();
[[noreturn]] void fault(const char *format, ...) __attribute__((format(printf, 1, 2)));

bool barrier_or(bool set);
bool named_or(u32 id, u32 threads, bool set);
void named_arrive(u32 id, u32 threads);
void warp_sync();
float shuffle(float value, u32 from_lane);
u32 vote(bool set);
void copy_async(u32 into, const void *from);  // null: zeros
void copy_async_commit();
void copy_async_wait(u32 later);
void load_matrices(u32 (&r)[4], u32 row, bool transposed);
u32 load_shared(u32 address);
void load_shared(u32 *words, u32 count, u32 address);
void store_shared(u32 address, u32 word);
void multiply(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2], float (*widen)(u16));

// TensorMap of `src/kernels/hopper.rs`: the arguments of cuTensorMapEncodeTiled.
struct TiledTensor {
    u64 data, extent[5], stride[4];  // strides in bytes, of the second and later dimensions
    u32 box[5], rank, type, swizzle;
    u64 reserved[2];
};
static_assert(sizeof(TiledTensor) == sizeof(TensorMap), "as the driver's");

// mbarriers, TMA and wgmma; `hopper.cpp`.
void phase_init(u32 barrier, u32 count);
void phase_arrive(u32 barrier, u32 bytes);
void phase_wait(u32 barrier, u32 parity);
void copy_box(u32 into, const TensorMap *map, u32 barrier, const i32 *at, u32 rank);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(u32 later);
// c (64 x n) = or += a (64 x 16) · b (16 x n). a: registers, or null for `a_matrix`. b_turned: rows of b have n columns in memory.
void wgmma(float *c, u32 n, const u32 *a, u64 a_matrix, u64 b_matrix, bool adds, bool b_turned, float (*widen)(u16));

// Conversions of the 16-bit types; rounding is to nearest, ties to even.
float widen_bf16(u16 bits);
float widen_f16(u16 bits);
u16 narrow_bf16(float value);
u16 narrow_f16(float value);

}  // namespace machine
