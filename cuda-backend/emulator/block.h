// The state of the running block. Only the emulator's own sources include this.
#pragma once
#include "machine.h"

#include <csetjmp>
#include <cstring>
#include <map>
#include <memory>
#include <vector>

namespace machine {

constexpr u64 STACK_BYTES = 128 * 1024;

// A cp.async of 16 bytes to shared memory that no wait has covered yet.
struct Copy {
    u32 into;
    const void *from;
    u32 group;
    bool landed;
};

struct Fiber {
    Here here;
    bool done;
    // The fiber waits while `*word` is `value`; null: it can run.
    const u32 *word;
    u32 value;
    const char *what;
    std::vector<Copy> copies;
    u32 committed;  // groups of copies so far
    bool fenced;    // wgmma.fence was executed since the last wait for wgmma
    jmp_buf resume;
    // Null until the fiber starts. Then it runs the threads of its number of all blocks and launches, one after the other: to start
    // a fiber takes several system calls.
    std::unique_ptr<u8[]> stack;
};

// Inputs and outputs of one lane of a warp-wide instruction.
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

// An mbarrier. The current phase is complete when no arrival is pending and no byte is expected.
struct Phase {
    u32 count, pending, parity;
    i64 bytes;
};

// A TMA copy of a box from a tensor in global memory to shared memory that is not done yet.
struct BoxCopy {
    const TensorMap *map;
    u32 into, barrier;
    i32 at[5];
};

// A wgmma that was issued and has not read or written anything yet.
struct Product {
    u32 n, group;
    float *c[128];
    const u32 *a[128];  // null: `a_matrix`
    u64 a_matrix, b_matrix;
    bool adds, b_turned;
    float (*widen)(u16);
    std::vector<float> before;  // the accumulators; empty while an earlier product on them is not computed
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
    u32 threads;
    std::vector<Fiber> fibers;  // of the threads; there may be more
    // A bit for each thread; of one that can run, it is set. `next` clears it when it finds that the thread waits.
    std::vector<u64> ready;
    std::vector<Warp> warps;
    std::vector<Warpgroup> warpgroups;
    Barrier barriers[16];
    std::map<u32, Phase> phases;
    std::vector<BoxCopy> boxes;
    std::vector<u8> shared;
    Fiber *running;
    u32 left;  // threads that have not ended yet
    u32 slow;  // the warp that is far behind all others when the timing is Random
    bool pausing = false;
    jmp_buf scheduler;

    u32 chance(u32 below);
    // Suspends the running thread while `word` is `value`. Whoever changes `word` calls `may_run` for the threads that may wait for it.
    void wait(const u32 &word, u32 value, const char *what);
    void may_run(u32 first, u32 count);
    // Does the `index`-th copy of a thread, unless it is done.
    void land(Fiber &fiber, u64 index);
    void land_box(u64 index);
    // Computes the oldest product of a warpgroup.
    void multiply_next(Warpgroup &warpgroup);
    // Lets other threads run before the running one continues, unless the timing is Eager.
    void pause();
    void run();
    // The running thread has ended: continues with another one, or with `run` if it was the last.
    void end();

private:
    Fiber *next();
    Fiber *ready_from(u32 start, bool down);
    Fiber &choose();
    [[noreturn]] void resume(Fiber &fiber);
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

// `bytes` of shared memory at an address. A fault if they are outside of the block's memory or misaligned.
u8 *shared_at(u32 address, u32 bytes);

}  // namespace machine
