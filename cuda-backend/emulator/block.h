// The state of a block that runs; `machine.cpp` and `instructions.cpp` only.
#pragma once
#include "machine.h"

#include <csetjmp>
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
    u32 arrived = 0, turn = 0;
    bool gathered = false, result = false;
};

struct Block {
    const Kernel *kernel;
    const void *args;
    Timing timing;
    u64 random;
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    Barrier barrier;
    std::vector<u8> shared;
    Fiber *running;
    u32 left;  // threads that have not ended
    jmp_buf scheduler;

    u32 chance(u32 below);
    // The running thread waits while `word` is `value`.
    void wait(const u32 &word, u32 value, const char *what);
    // The `index`-th copy of a thread lands, unless it has.
    void land(Fiber &fiber, u64 index);
    void run();

private:
    Fiber *next();
};

extern Block *block;
Counts &counting();

}  // namespace machine
