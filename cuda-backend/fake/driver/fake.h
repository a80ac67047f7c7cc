// The fake driver: declarations for its parts.
//
// It is stricter than a GPU where the API promises little: each stream is a thread that sleeps at random, new memory is NaN, and
// a copy reads and writes as late as it may. Misuse by the host ends the process with a message.
#pragma once
#include "arguments.h"
#include "settings.h"

#include <chrono>
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
    NO_BINARY_FOR_GPU = 209,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    LAUNCH_OUT_OF_RESOURCES = 701,
};

// The settings in KYKLOS_FAKE_CUDA, as `name=number,…`.
struct Config {
    u64 devices = 1, seed = 1, version = 13000, capability = 90, memory_mb = 4096;
    u64 nvrtc = 13000;      // read by the fake NVRTC: its version
    u64 delay_us = 200;     // longest sleep before an operation of a stream
    u64 ignore_waits = 0;   // planted bug: cuStreamWaitEvent does nothing; bit n: for the n-th of every three streams
    // Planted bug, bit 0: waits of the backend's streams for events of a caller's stream do nothing; bit 1: waits of a caller's
    // stream do nothing.
    u64 ignore_caller_waits = 0;
    u64 late_parts = 0;     // planted bug: launches that compute parts run after the next merge_parts
    u64 ignore_edges = 0;   // planted bug: nodes of graphs run in reverse order
    // Planted bug, bit 0: waits of NCCL's streams do nothing; bit 1: waits for events of NCCL's streams do nothing. A stream is
    // NCCL's from its first operation of NCCL, or copy between devices, on.
    u64 ignore_nccl_waits = 0;
    u64 hold_until = 0;     // no kernel of a device runs before the device has had so many launches
    u64 copy_ms = 0;        // a copy from another device to device `copy_to` takes this much longer
    u64 copy_to = 0;
    u64 most_queued = 0;    // a launch waits while its stream has so many operations
    u64 report = 0;         // print counts at exit
    // Faults of device 0, at the n-th such call or operation, counted from 1; 0: never.
    u64 oom_at = 0;         // an allocation fails: the n-th and all later ones
    u64 pinned_oom_at = 0;  // the same for pinned memory
    u64 refuse_at = 0;      // a launch is refused: only the n-th
    u64 sticky_at = 0;      // a launch fails on the device with the code `sticky`
    u64 sticky = ILLEGAL_ADDRESS;
    u64 hang_at = 0;        // a launch never ends
    // Of device `copy_to`: an event is refused on a stream that has had a copy between devices: the n-th and all later ones.
    u64 refuse_event_at = 0;
    u64 graph_create_at = 0, graph_instantiate_at = 0, graph_launch_at = 0;  // a graph call fails: only the n-th
    u64 graph_code = OUT_OF_MEMORY;
};
const Config &config();

// Ends the process with a message: the host broke a rule of the API.
[[noreturn]] void die(const char *format, ...) __attribute__((format(printf, 1, 2)));

struct Device;

// One cuEventRecord of an event.
struct EventRecord {
    bool done = false, by_caller = false, by_nccl = false;
    Device *device = nullptr;
    std::chrono::steady_clock::time_point time;  // when it was done
};

struct Event {
    bool timed = false;
    std::shared_ptr<EventRecord> record;
};

struct Stream {
    Device *device;
    std::deque<std::function<void()>> queue;
    bool busy = false, closed = false;
    bool by_caller = false;  // made by cuStreamCreate, which the backend does not call
    bool by_nccl = false;    // has had an operation of NCCL, or a copy between devices
    bool has_copied = false;  // has had a copy between devices
    bool capturing = false;
    u64 random, number;
};

struct Module {
    Device *device;
    // Of a cubin by nvcc: its kernels. Other images have all of this library.
    bool by_nvcc = false;
    std::set<std::string> kernels;
};

struct Function {
    const void *kernel;
    Device *device;
    std::string module;  // in reports, of a cubin with few kernels
    unsigned shared_most = 48 * 1024;
};

// A launch with its own copy of the arguments.
struct Launch {
    const void *kernel;
    u32 grid[3], shared;
    std::string arguments, module;
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

// Memory of a device. Memory of a pool belongs to no context.
struct Allocation {
    u64 bytes;
    Device *device;
    bool pooled = false;
};

// A context. The primary one of a device is in `State::devices`; `retained` is 1 for a context of cuCtxCreate.
struct Device {
    int ordinal = 0, retained = 0;
    int sticky = 0;  // the error that destroyed the context; every later call returns it
    u64 used = 0, allocations = 0, pinned = 0, launches = 0;
    u64 launches_done = 0, most_ahead = 0;  // kernels that have run; most launches at one time that had not
    std::set<Stream *> streams;
    Stream *default_stream = nullptr;
};

// All objects of the driver, under one lock.
struct State {
    std::mutex lock;
    std::condition_variable changed;
    std::map<int, Device> devices;
    std::map<u64, Allocation> memory;  // by address
    std::set<Device *> contexts;       // of cuCtxCreate
    std::map<u64, u64> freed;
    std::map<u64, u64> pinned;
    std::set<Stream *> streams;
    std::set<Event *> events;
    std::set<Module *> modules;
    std::map<Function *, std::unique_ptr<Function>> functions;
    std::set<Graph *> graphs;
    std::set<GraphExec *> graph_execs;
    std::map<std::string, u64> launched;  // of each kernel
    u64 launches = 0, waits = 0, pageable = 0, copied = 0, downloaded = 0, between_devices = 0, graphs_made = 0, graph_launches = 0, graph_kernels = 0, events_of_copies = 0;
};
State &state();

// Registers a check at exit for objects that were not freed.
void judge_at_exit();

// The topmost context of the calling thread's stack, and those below it.
extern thread_local Device *current;
extern thread_local std::vector<Device *> below;
extern thread_local bool on_worker;

// The stream of a handle; null is the default stream of the current context. The caller holds the lock.
Stream *existing(Stream *handle);
// Queues an operation. The caller holds the lock.
void submit(Stream &stream, std::function<void()> operation);
void start(Stream *stream);
// Waits until all streams of a device are idle or its context is destroyed.
void drain(std::unique_lock<std::mutex> &held, Device &device);

typedef std::unique_lock<std::mutex> Held;

template <typename T> void alive(const std::set<T *> &all, T *one, const char *what) {
    if (!all.count(one)) die("a call with %s %p, which does not exist (any more)", what, (void *)one);
}

}  // namespace fake

// Locks, and returns an error without a current context or with a destroyed one.
#define ENTER()                                \
    Held held(state().lock);                   \
    if (!current) return INVALID_CONTEXT;      \
    if (current->sticky) return current->sticky;

#define API extern "C" __attribute__((visibility("default"))) int
