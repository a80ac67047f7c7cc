// The state of a block that runs; `machine.cpp` and `instructions.cpp` only.
#pragma once
#include "machine.h"

#include <csetjmp>
#include <cstring>
#include <map>
#include <memory>
#include <ucontext.h>
#include <vector>

namespace machine {

constexpr u64 STACK_BYTES = 128 * 1024;

// 16 bytes on their way to shared memory, until they are waited for.
struct Copy {
    u32 into;
    const void *from;
    u32 group;
    bool landed;
};

struct Fiber {
    Here here;
    bool begun, done;
    // It waits while `*word` is `value`; null: it can run.
    const u32 *word;
    u32 value;
    const char *what;
    std::vector<Copy> copies;
    u32 committed;  // groups of copies so far
    bool fenced;    // since it last waited for wgmma
    ucontext_t start;
    jmp_buf resume;
    std::unique_ptr<u8[]> stack;
};

// What the lanes of a warp give to an instruction that they execute together, and what it gives them.
struct Lane {
    u32 in[10], out[4];
};
struct Warp {
    Lane lanes[32];
    u32 arrived = 0, turn = 0;
    const char *what = nullptr;
};

struct Barrier {
    u32 threads = 0, arrived = 0, turn = 0;
    bool gathered = false, result = false;
};

// An mbarrier: its current phase ends when nothing is pending and all expected bytes have come.
struct Phase {
    u32 count, pending, parity;
    i64 bytes;
};

// A box on its way from a tensor in global memory to shared memory.
struct BoxCopy {
    const TensorMap *map;
    u32 into, barrier;
    i32 at[5];
};

// A wgmma that has been issued and has read and written nothing yet.
struct Product {
    u32 n, group;
    float *c[128];
    const u32 *a[128];  // null: `a_matrix`
    u64 a_matrix, b_matrix;
    bool adds, b_turned;
    float (*widen)(u16);
    std::vector<float> before;  // what the accumulators held, unless another product leaves it to this one
};

struct Warpgroup {
    u32 arrived = 0, turn = 0, committed = 0;
    const char *what = nullptr;
    Product next;
    std::vector<Product> products;
};

struct Block {
    const Kernel *kernel;
    const void *args;
    Timing timing;
    u64 random;
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    std::vector<Warpgroup> warpgroups;
    Barrier barriers[16];
    std::map<u32, Phase> phases;
    std::vector<BoxCopy> boxes;
    std::vector<u8> shared;
    Fiber *running;
    u32 left;  // threads that have not ended
    bool pausing = false;
    jmp_buf scheduler;

    u32 chance(u32 below);
    // The running thread waits while `word` is `value`.
    void wait(const u32 &word, u32 value, const char *what);
    // The `index`-th copy of a thread lands, unless it has.
    void land(Fiber &fiber, u64 index);
    void land_box(u64 index);
    // The oldest product of a warpgroup is made.
    void multiply_next(Warpgroup &warpgroup);
    // Others go on before the running thread does, unless all is eager.
    void pause();
    void run();

private:
    Fiber *next();
};

extern Block *block;
Counts &counting();

inline u32 bits_of(float value) {
    u32 bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
inline float float_of(u32 bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// `bytes` of shared memory at an address, which must be theirs and aligned.
u8 *shared_at(u32 address, u32 bytes);

}  // namespace machine
