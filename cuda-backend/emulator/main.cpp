// Runs a job: launches on buffers. Reads the job from stdin and writes the answer to stdout. All numbers are little-endian.
// `tests/emulator/` writes jobs.
//
//   job     u32 timing, u64 seed, buffers, launches, results
//   buffers u32 count, each: u64 address, u64 bytes, u32 given, the bytes if given (otherwise all bits are 1: NaN)
//   launch  u32 name length, name, u32 grid[3], u32 shared bytes, u32 argument bytes, arguments
//   results u32 count, each: u64 address, u64 bytes
//   answer  the bytes of the results, then u64 accesses, passes, copies, barriers, products, busiest
//
// Buffers are at the addresses that the job gives, so that arguments can contain them. A page without access follows each.
#include "machine.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <sys/mman.h>

static void read(void *into, u64 bytes) {
    if (std::fread(into, 1, bytes, stdin) != bytes) machine::fault("the job ends early");
}
template <typename T> static T number() {
    T value;
    read(&value, sizeof value);
    return value;
}

static void buffer() {
    const u64 address = number<u64>(), bytes = number<u64>(), page = 4096;
    const u64 first = address / page * page, pages = (address + bytes - first + page - 1) / page * page;
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
    void *all = mmap(reinterpret_cast<void *>(first), pages + page, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (all != reinterpret_cast<void *>(first) || mprotect(static_cast<u8 *>(all) + pages, page, PROT_NONE))
        machine::fault("no memory at %llu", address);
    std::memset(all, 0xff, pages);
    if (number<u32>()) read(reinterpret_cast<void *>(address), bytes);
}

static void launch(machine::Timing timing, u64 seed) {
    std::string name(number<u32>(), ' ');
    read(&name[0], name.size());
    u32 grid[3];
    read(grid, sizeof grid);
    const u32 shared = number<u32>();
    alignas(128) u8 args[4096];
    const u32 bytes = number<u32>();
    const machine::Kernel *kernel = machine::Kernel::find(name.c_str());
    if (!kernel) machine::fault("no kernel is called %s", name.c_str());
    if (bytes != kernel->argument_bytes || bytes > sizeof args)
        machine::fault("%s takes %llu bytes of arguments, %u were given", name.c_str(), kernel->argument_bytes, bytes);
    read(args, bytes);
    machine::launch(*kernel, grid, shared, args, timing, seed);
}

int main() {
    const machine::Timing timing = machine::Timing(number<u32>());
    const u64 seed = number<u64>();
    for (u32 left = number<u32>(); left; left--) buffer();
    for (u32 left = number<u32>(); left; left--) launch(timing, seed);
    for (u32 left = number<u32>(); left; left--) {
        const u64 address = number<u64>(), bytes = number<u64>();
        std::fwrite(reinterpret_cast<const void *>(address), 1, bytes, stdout);
    }
    std::fwrite(&machine::counts(), sizeof(machine::Counts), 1, stdout);
    return 0;
}
