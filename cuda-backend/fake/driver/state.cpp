// The fake driver's settings, streams, and checks at exit.
#include "fake.h"
#include "machine.h"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unistd.h>

namespace fake {

thread_local Device *current;
thread_local std::vector<Device *> below;
thread_local bool on_worker;

// Never destroyed: threads of streams use it until the process ends.
State &state() {
    static State *all = new State;
    return *all;
}

const Config &config() {
    static const Config read = [] {
        Config config;
        const std::string unknown = read_settings("KYKLOS_FAKE_CUDA", {
            {"devices", &config.devices},     {"seed", &config.seed},
            {"version", &config.version},     {"capability", &config.capability},
            {"nvrtc", &config.nvrtc},
            {"memory_mb", &config.memory_mb}, {"delay_us", &config.delay_us},
            {"hold_until", &config.hold_until},
            {"copy_ms", &config.copy_ms},     {"copy_to", &config.copy_to},
            {"most_queued", &config.most_queued},
            {"refuse_event_at", &config.refuse_event_at},
            {"report", &config.report},       {"ignore_waits", &config.ignore_waits},
            {"ignore_nccl_waits", &config.ignore_nccl_waits},
            {"late_parts", &config.late_parts},
            {"ignore_caller_waits", &config.ignore_caller_waits},
            {"oom_at", &config.oom_at},       {"pinned_oom_at", &config.pinned_oom_at},
            {"refuse_at", &config.refuse_at}, {"sticky_at", &config.sticky_at},
            {"sticky", &config.sticky},       {"hang_at", &config.hang_at},
            {"ignore_edges", &config.ignore_edges},
            {"graph_create_at", &config.graph_create_at},
            {"graph_instantiate_at", &config.graph_instantiate_at},
            {"graph_launch_at", &config.graph_launch_at},
            {"graph_code", &config.graph_code},
        });
        if (!unknown.empty()) die("KYKLOS_FAKE_CUDA has `%s`", unknown.c_str());
        return config;
    }();
    return read;
}

void die(const char *format, ...) {
    std::va_list list;
    va_start(list, format);
    std::fputs("fake driver: ", stderr);
    std::vfprintf(stderr, format, list);
    std::fputc('\n', stderr);
    va_end(list);
    _exit(86);
}

void submit(Stream &stream, std::function<void()> operation) {
    stream.queue.push_back(std::move(operation));
    state().changed.notify_all();
}

static void work(Stream *stream) {
    on_worker = true;
    State &all = state();
    std::unique_lock<std::mutex> held(all.lock);
    while (true) {
        all.changed.wait(held, [&] { return stream->closed || !stream->queue.empty(); });
        // A destroyed stream ends when its queue is empty.
        if (stream->queue.empty()) break;
        const auto operation = std::move(stream->queue.front());
        stream->queue.pop_front();
        stream->busy = true;
        const u64 longest = config().delay_us;
        // Mostly no sleep, sometimes a long one.
        const u64 nap = longest && chance(stream->random, 3) == 0 ? chance(stream->random, longest + 1) : 0;
        held.unlock();
        if (nap) std::this_thread::sleep_for(std::chrono::microseconds(nap));
        // After the context was destroyed nothing runs any more, and nothing that waits is woken.
        if (!stream->device->sticky) operation();
        held.lock();
        stream->busy = false;
        all.changed.notify_all();
    }
    stream->device->streams.erase(stream);
    delete stream;
}

void start(Stream *stream) { std::thread(work, stream).detach(); }

void drain(std::unique_lock<std::mutex> &held, Device &device) {
    state().changed.wait(held, [&] {
        if (device.sticky) return true;
        for (const Stream *stream : device.streams)
            if (stream->busy || !stream->queue.empty()) return false;
        return true;
    });
}

static void wild(int, siginfo_t *info, void *) {
    char text[128];
    const int bytes = std::snprintf(text, sizeof text, "fake driver: an access to %p, which is not allocated\n", info->si_addr);
    if (write(2, text, size_t(bytes)) < 0) _exit(85);
    _exit(86);
}

__attribute__((constructor)) static void begin() {
    struct sigaction action = {};
    action.sa_sigaction = wild;
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    // The stack of an emulator's fiber is too small for the handler, so it gets its own.
    static char stack[64 * 1024];
    stack_t other = {};
    other.ss_sp = stack;
    other.ss_size = sizeof stack;
    sigaltstack(&other, nullptr);
    sigaction(SIGSEGV, &action, nullptr);
    sigaction(SIGBUS, &action, nullptr);
}

// At exit no object may be left. Threads of the host may still be freeing them for a moment.
static void end(int status, void *) {
    if (on_worker) _exit(status);
    State &all = state();
    const auto left = [&] {
        u64 retained = 0;
        for (const auto &device : all.devices) retained += u64(device.second.retained);
        return all.memory.size() + all.pinned.size() + all.streams.size() + all.events.size() + all.modules.size() +
               all.graphs.size() + all.graph_execs.size() + all.contexts.size() + retained;
    };
    std::unique_lock<std::mutex> held(all.lock);
    bool broken = config().hang_at != 0;
    for (const auto &device : all.devices) broken |= device.second.sticky != 0;
    // Objects of a device that hangs or whose context is destroyed cannot be freed.
    for (int tries = 0; !broken && left() && tries < 5000; tries++) {
        held.unlock();
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        held.lock();
    }
    if (config().report) {
        std::fprintf(stderr, "fake driver: %llu launches, %llu waits, %llu bytes copied, %llu pageable copies\n",
                     all.launches, all.waits, all.copied, all.pageable);
        std::fprintf(stderr, "fake driver: %llu graphs made, %llu launched with %llu kernels\n", all.graphs_made,
                     all.graph_launches, all.graph_kernels);
        std::fprintf(stderr, "fake driver: %llu bytes copied between devices\n", all.between_devices);
        u64 most_ahead = 0;
        for (const auto &device : all.devices) most_ahead = std::max(most_ahead, device.second.most_ahead);
        std::fprintf(stderr, "fake driver: at most %llu launches ahead of a device\n", most_ahead);
        for (const auto &kernel : all.launched)
            std::fprintf(stderr, "fake driver: launched %s %llu times\n", kernel.first.c_str(), kernel.second);
    }
    if (left() && !broken) {
        std::fprintf(stderr,
                     "fake driver: left behind: %zu allocations, %zu pinned, %zu streams, %zu events, %zu modules, %zu graphs\n",
                     all.memory.size(), all.pinned.size(), all.streams.size(), all.events.size(), all.modules.size(),
                     all.graphs.size() + all.graph_execs.size());
        if (!status) status = 87;
    }
    // Streams may still run kernels, so the emulator must not be destroyed before.
    std::fflush(nullptr);
    _exit(status);
}

void judge_at_exit() {
    static std::once_flag once;
    std::call_once(once, [] {
        // Static objects are destroyed in reverse order of their creation. This launch of no blocks creates those of the emulator
        // before `end` is registered, so that they outlive it.
        machine::launch(*machine::Kernel::find("reset_state"), {0, 0, 0}, 0, nullptr, machine::Timing::Eager, 0);
        on_exit(end, nullptr);
    });
}

}  // namespace fake
