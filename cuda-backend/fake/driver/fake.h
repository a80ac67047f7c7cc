// The fake driver: what its parts know of each other.
//
// It is stricter than a GPU where the API promises little: streams run on threads of their own and dawdle by chance,
// memory comes as NaN, a copy reads and writes as late as it may. What the host may not do ends the process with a word.
#pragma once
#include "arguments.h"

#include <cstddef>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace fake {

enum Code : int {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    LAUNCH_OUT_OF_RESOURCES = 701,
};

// What KYKLOS_FAKE_CUDA says, as `name=number,…`.
struct Config {
    u64 devices = 1, seed = 1, version = 13000, capability = 90, memory_mb = 4096;
    u64 delay_us = 200;     // longest nap before an operation of a stream
    u64 ignore_waits = 0;   // streams for which cuStreamWaitEvent does nothing, the n-th of every three has bit n: planted bugs
    u64 late_parts = 0;     // launches that make states of parts run after the next merge_parts: a planted bug
    u64 ignore_edges = 0;   // nodes of graphs run in the order in which they were not added: a planted bug
    u64 report = 0;         // say at exit what was done
    // Faults befall device 0, at the n-th such call or operation, counted from 1; 0: never.
    u64 oom_at = 0;         // an allocation finds no memory, at the n-th and ever after
    u64 pinned_oom_at = 0;  // the same of pinned memory
    u64 refuse_at = 0;      // a launch is refused, that one only
    u64 sticky_at = 0;      // a launch runs into what `sticky` says
    u64 sticky = ILLEGAL_ADDRESS;
    u64 hang_at = 0;        // a launch never ends
    u64 graph_create_at = 0, graph_instantiate_at = 0, graph_launch_at = 0;  // a call for graphs fails, that one only
    u64 graph_code = OUT_OF_MEMORY;
};
const Config &config();

// Ends the process: the host did what it must not.
[[noreturn]] void die(const char *format, ...) __attribute__((format(printf, 1, 2)));

struct Device;

// One record of an event.
struct Ticket {
    bool done = false;
    Device *device = nullptr;
};

struct Event {
    std::shared_ptr<Ticket> ticket;
};

struct Stream {
    Device *device;
    std::deque<std::function<void()>> queue;
    bool busy = false, closed = false;
    u64 random, number;
};

struct Module {
    Device *device;
};

struct Function {
    const void *kernel;
    Device *device;
    unsigned shared_most = 48 * 1024;
};

// A launch with arguments of its own.
struct Launch {
    const void *kernel;
    u32 grid[3], shared;
    std::string arguments;
};

struct GraphNode {
    Launch launch;
    std::set<size_t> after;
};

struct Graph {
    std::vector<GraphNode> nodes;
};

struct GraphExec {
    Device *device;
    std::vector<Launch> launches;
};

struct Device {
    int ordinal = 0, retained = 0;
    int sticky = 0;  // the error that every call ends with from then on
    u64 used = 0, allocations = 0, pinned = 0, launches = 0;
    std::set<Stream *> streams;
};

// Everything there is, under one lock.
struct World {
    std::mutex lock;
    std::condition_variable changed;
    std::map<int, Device> devices;
    std::map<u64, std::pair<u64, Device *>> memory;  // address: bytes
    std::map<u64, u64> freed;
    std::map<u64, u64> pinned;
    std::set<Stream *> streams;
    std::set<Event *> events;
    std::set<Module *> modules;
    std::map<Function *, std::unique_ptr<Function>> functions;
    std::set<Graph *> graphs;
    std::set<GraphExec *> graph_execs;
    std::map<std::string, u64> launched;  // of each kernel
    u64 launches = 0, waits = 0, pageable = 0, copied = 0, graphs_made = 0, graph_launches = 0, graph_kernels = 0;
};
World &world();

// Has the end of the process look for what was left behind.
void judge_at_exit();

u64 chance(u64 &random, u64 below);
extern thread_local Device *current;
extern thread_local bool on_worker;

// Queues an operation; the lock is held.
void submit(Stream &stream, std::function<void()> operation);
void start(Stream *stream);
// Waits until all streams of a device are idle, or the device is broken.
void drain(std::unique_lock<std::mutex> &held, Device &device);

typedef std::unique_lock<std::mutex> Held;

template <typename T> void alive(const std::set<T *> &all, T *one, const char *what) {
    if (!all.count(one)) die("a call with %s %p, which does not exist (any more)", what, (void *)one);
}

}  // namespace fake

// A call with a current context, unless its device is broken.
#define ENTER()                                \
    Held held(world().lock);                   \
    if (!current) return INVALID_CONTEXT;      \
    if (current->sticky) return current->sticky;

#define API extern "C" __attribute__((visibility("default"))) int
