// Fibers and their schedule.
#include "machine.h"
#include "block.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/resource.h>
#include <ucontext.h>

namespace machine {

Block *block;

const Here &here() { return block->running->here; }

void fault(const char *format, ...) {
    std::va_list list;
    va_start(list, format);
    std::fprintf(stderr, "fault: ");
    std::vfprintf(stderr, format, list);
    if (block && block->running) {
        const Here &at = block->running->here;
        std::fprintf(stderr, " (thread %u of block %u,%u,%u)", at.thread, at.block[0], at.block[1], at.block[2]);
    }
    std::fputc('\n', stderr);
    va_end(list);
    std::exit(3);
}

static const Kernel *kernels;

Kernel::Kernel(const char *name, u64 argument_bytes, u32 threads, void (*body)(const void *args))
    : name(name), argument_bytes(argument_bytes), threads(threads), body(body), next(kernels) {
    kernels = this;
}

const Kernel *Kernel::find(const char *name) {
    const Kernel *kernel = kernels;
    while (kernel && std::strcmp(kernel->name, name)) kernel = kernel->next;
    return kernel;
}

static Counts total;
const Counts &counts() { return total; }
Counts &counting() { return total; }

u32 Block::chance(u32 below) {
    // splitmix64
    u64 z = random += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return (z >> 33) % below;
}

// The entry point of a fiber.
static void enter() {
    while (true) {
        Fiber &fiber = *block->running;
        block->kernel->body(block->args);
        if (!fiber.copies.empty()) fault("%zu copies were not waited for when the thread ended", fiber.copies.size());
        if (!block->warpgroups.empty() && !block->warpgroups[here().thread / 128].products.empty())
            fault("a product was not waited for when the thread ended");
        fiber.done = true;
        block->end();
    }
}

void Block::wait(const u32 &word, u32 value, const char *what) {
    Fiber &fiber = *running;
    fiber.word = &word;
    fiber.value = value;
    fiber.what = what;
    if (!_setjmp(fiber.resume)) resume(choose());
}

void Block::pause() {
    if (timing == Timing::Eager) return;
    Fiber &fiber = *running;
    fiber.word = nullptr;
    pausing = true;
    if (!_setjmp(fiber.resume)) resume(choose());
}

void Block::end() {
    left--;
    if (_setjmp(running->resume)) return;
    if (!left) _longjmp(scheduler, 1);
    resume(choose());
}

void Block::may_run(u32 first, u32 count) {
    for (u32 n = first; n < first + count; n += 32) ready[n / 64] |= u64(0xffffffff) << n % 64;
}

// The first thread that can run, from `start` on in a circle; null if all wait.
Fiber *Block::ready_from(u32 start, bool down) {
    const u32 words = ready.size();
    u32 at = start / 64;
    u64 from_start = down ? ~u64(0) >> (63 - start % 64) : ~u64(0) << start % 64;
    // The word of `start` twice: it has threads on both ends of the circle.
    for (u32 i = 0; i <= words; i++) {
        while (const u64 some = ready[at] & from_start) {
            const u32 bit = down ? 63 - __builtin_clzll(some) : __builtin_ctzll(some), n = 64 * at + bit;
            if (n < threads && !fibers[n].done && (!fibers[n].word || *fibers[n].word != fibers[n].value)) return &fibers[n];
            ready[at] &= ~(u64(1) << bit);
        }
        from_start = ~u64(0);
        at = (at + (down ? words - 1 : 1)) % words;
    }
    return nullptr;
}

// The next thread that can run, in the order of the timing; null if all wait.
Fiber *Block::next() {
    u32 start = 0;
    if (timing == Timing::Random) {
        start = chance(threads);
        // Copies complete at random times.
        Fiber &lucky = fibers[chance(threads)];
        if (!lucky.copies.empty()) land(lucky, chance(lucky.copies.size()));
        if (!boxes.empty() && chance(64) == 0) land_box(chance(boxes.size()));
        if (!warpgroups.empty() && chance(8) == 0) multiply_next(warpgroups[chance(warpgroups.size())]);
    } else if (running && !running->done) {
        start = running->here.thread;
        if (pausing) start = (start + (timing == Timing::Late ? threads - 1 : 1)) % threads;
    } else {
        start = timing == Timing::Eager ? 0 : threads - 1;
    }
    pausing = false;
    // A warp that cannot continue is followed by the next one.
    Fiber *found = ready_from(start, timing == Timing::Late);
    if (timing != Timing::Random || !found || found->here.thread / 32 != slow) return found;
    Fiber *other = ready_from((slow + 1) * 32 % threads, false);
    if (other->here.thread / 32 != slow) return other;
    // Null: a box lands, which lets the others continue.
    return boxes.empty() ? other : nullptr;
}

// The thread that continues. If all wait, boxes land.
Fiber &Block::choose() {
    while (true) {
        if (Fiber *fiber = next()) return *fiber;
        // As late as possible: when no thread can continue without one.
        if (!boxes.empty()) {
            land_box(chance(boxes.size()));
            continue;
        }
        for (u32 n = 0; n < threads; n++) {
            if (fibers[n].done) continue;
            running = &fibers[n];
            fault("deadlock: %u of %u threads wait, this one for %s", left, threads, running->what);
        }
    }
}

void Block::resume(Fiber &fiber) {
    running = &fiber;
    fiber.word = nullptr;
    if (fiber.stack) _longjmp(fiber.resume, 1);
    fiber.stack.reset(new u8[STACK_BYTES]);
    ucontext_t start;
    getcontext(&start);
    start.uc_stack = {fiber.stack.get(), 0, STACK_BYTES};
    start.uc_link = nullptr;
    makecontext(&start, enter, 0);
    setcontext(&start);
    fault("no fiber can be started");
}

void Block::run() {
    left = threads;
    ready.assign((threads + 63) / 64, ~u64(0));
    slow = chance((threads + 31) / 32);
    if (!_setjmp(scheduler)) resume(choose());
    if (!boxes.empty()) fault("%zu boxes were not waited for when the block ended", boxes.size());
    for (u32 id = 0; id < 16; id++)
        if (barriers[id].arrived) fault("%u threads were at barrier %u when the block ended", barriers[id].arrived, id);
    for (const auto &phase : phases)
        if (phase.second.bytes) fault("%lld bytes were expected when the block ended", (long long)phase.second.bytes);
}

// A kernel with a planted bug may have no end; the signal says so. In processor time, so that a busy machine changes nothing.
static bool limit_time() {
    if (const char *seconds = std::getenv("KYKLOS_EMULATOR_CPU_SECONDS")) {
        const rlim_t limit = std::strtoul(seconds, nullptr, 10);
        const rlimit limits = {limit, limit + 1};
        setrlimit(RLIMIT_CPU, &limits);
    }
    return true;
}

void launch(const Kernel &kernel, const u32 (&grid)[3], u32 shared_bytes, const void *args, Timing timing, u64 seed) {
    if (shared_bytes > SHARED_MOST) fault("%u bytes of shared memory, at most %u", shared_bytes, SHARED_MOST);
    [[maybe_unused]] static const bool limited = limit_time();
    // Not destroyed at exit: a fault exits on the stack of a fiber.
    static Block &all = *new Block;
    block = &all;
    all.kernel = &kernel;
    all.args = args;
    all.timing = timing;
    all.random = seed;
    for (u32 z = 0; z < grid[2]; z++)
        for (u32 y = 0; y < grid[1]; y++)
            for (u32 x = 0; x < grid[0]; x++) {
                all.running = nullptr;
                all.shared.assign(shared_bytes, 0xff);
                all.warps.assign(kernel.threads / 32, Warp());
                all.warpgroups.assign(kernel.threads / 128, Warpgroup());
                for (Barrier &barrier : all.barriers) barrier = Barrier();
                all.phases.clear();
                all.boxes.clear();
                all.threads = kernel.threads;
                if (all.fibers.size() < kernel.threads) all.fibers.resize(kernel.threads);
                for (u32 thread = 0; thread < kernel.threads; thread++) {
                    Fiber &fiber = all.fibers[thread];
                    fiber.here = {thread, {x, y, z}, {grid[0], grid[1], grid[2]}};
                    fiber.done = false;
                    fiber.word = nullptr;
                    fiber.committed = 0;
                    fiber.fenced = false;
                }
                const u64 before = total.products;
                all.run();
                total.busiest = std::max(total.busiest, total.products - before);
            }
}

}  // namespace machine
