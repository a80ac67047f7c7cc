// The functions of `libnccl.so.2` that the CUDA backend uses, the settings, and the check at exit.
#include "fake_nccl.h"

#include <cstdarg>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <unistd.h>

using namespace fake;

#define API extern "C" __attribute__((visibility("default"))) int

const Config &fake::config() {
    static const Config read = [] {
        Config config;
        const std::string unknown = read_settings("KYKLOS_FAKE_NCCL", {
            {"seed", &config.seed},
            {"version", &config.version},
            {"delay_us", &config.delay_us},
            {"report", &config.report},
            {"fault_rank", &config.fault_rank},
            {"faulty_communicators", &config.faulty_communicators},
            {"code", &config.code},
            {"id_fails", &config.id_fails},
            {"init_fails", &config.init_fails},
            {"init_hangs", &config.init_hangs},
            {"use_at", &config.use_at},
            {"refuse_at", &config.refuse_at},
            {"launch_fails_at", &config.launch_fails_at},
            {"async_at", &config.async_at},
            {"hang_at", &config.hang_at},
            {"slow_at", &config.slow_at},
            {"slow_ms", &config.slow_ms},
            {"die_at", &config.die_at},
            {"finalize_hangs", &config.finalize_hangs},
            {"sees_death", &config.sees_death},
            {"abort_ms", &config.abort_ms},
            {"move_ms", &config.move_ms},
            {"launch_ms", &config.launch_ms},
        });
        if (!unknown.empty()) die("KYKLOS_FAKE_NCCL has `%s`", unknown.c_str());
        return config;
    }();
    return read;
}

void fake::die(const char *format, ...) {
    std::va_list list;
    va_start(list, format);
    std::fputs("fake NCCL: ", stderr);
    std::vfprintf(stderr, format, list);
    std::fputc('\n', stderr);
    va_end(list);
    _exit(86);
}

// All communicators of this process. Never destroyed: threads of streams use them until the process ends.
static std::mutex &lock() {
    static std::mutex *made = new std::mutex;
    return *made;
}

static std::map<Communicator *, std::shared_ptr<Communicator>> &communicators() {
    static auto *made = new std::map<Communicator *, std::shared_ptr<Communicator>>;
    return *made;
}

static std::shared_ptr<Communicator> existing(Communicator *handle, const char *call) {
    std::lock_guard<std::mutex> held(lock());
    const auto at = communicators().find(handle);
    if (at == communicators().end()) die("%s with communicator %p, which does not exist (any more)", call, (void *)handle);
    return at->second;
}

// A call of the host on a communicator, which one thread at a time may make.
struct Call {
    std::shared_ptr<Communicator> communicator;
    Call(Communicator *handle, const char *call) : communicator(existing(handle, call)) {
        if (communicator->entered++) die("%s while another thread is in a call with the same communicator", call);
    }
    ~Call() { communicator->entered--; }
    Communicator *operator->() const { return communicator.get(); }
};

// At exit no communicator may be left. Threads of the host may still be destroying them for a moment.
static void end(int status, void *) {
    size_t left = 1;
    for (int tries = 0; left && tries < 5000; tries++) {
        {
            std::lock_guard<std::mutex> held(lock());
            left = communicators().size();
        }
        if (left) sleep_us(1000);
    }
    if (config().report)
        std::fprintf(stderr, "fake NCCL: %llu groups run, %llu bytes received, %llu communicators aborted\n", groups_run.load(),
                     bytes_moved.load(), aborts.load());
    if (!left) return;
    std::fprintf(stderr, "fake NCCL: left behind: %zu communicators\n", left);
    std::fflush(nullptr);
    if (!status) _exit(87);
}

// --- the library ------------------------------------------------------------------------------------------------------

API ncclGetVersion(int *version) {
    *version = int(config().version);
    return SUCCESS;
}

extern "C" __attribute__((visibility("default"))) const char *ncclGetErrorString(int code) {
    switch (code) {
    case SUCCESS: return "no error";
    case UNHANDLED_CUDA_ERROR: return "unhandled cuda error";
    case SYSTEM_ERROR: return "unhandled system error";
    case INTERNAL_ERROR: return "internal error";
    case INVALID_ARGUMENT: return "invalid argument";
    case INVALID_USAGE: return "invalid usage";
    case REMOTE_ERROR: return "remote process exited or there was a network error";
    case IN_PROGRESS: return "NCCL operation in progress";
    default: return "unknown result code";
    }
}

extern "C" __attribute__((visibility("default"))) const char *ncclGetLastError(Communicator *) { return last_error; }

API ncclGetUniqueId(UniqueId *id) {
    if (config().id_fails) return SYSTEM_ERROR;
    std::random_device random;
    std::memset(id->bytes, 0, sizeof id->bytes);
    std::snprintf(id->bytes, sizeof id->bytes, "kyklos-fake-nccl-%08x%08x%08x", random(), random(), random());
    return SUCCESS;
}

// --- communicators ----------------------------------------------------------------------------------------------------

// ncclConfig_t of NCCL 2.18; later versions add fields behind these.
struct CommunicatorConfig {
    size_t size;
    unsigned magic, version;
    int blocking, cga_cluster_size, min_ctas, max_ctas;
    const char *net_name;
    int split_share;
};

static const int UNDEFINED = INT_MIN;

API ncclCommInitRankConfig(Communicator **made, int ranks, UniqueId id, int rank, const CommunicatorConfig *given) {
    static std::once_flag once;
    std::call_once(once, [] { on_exit(end, nullptr); });
    *made = nullptr;
    const int device = kyklos_fake_current_device();
    if (device < 0) return UNHANDLED_CUDA_ERROR;
    if (ranks < 1 || ranks > MAX_RANKS || rank < 0 || rank >= ranks) return INVALID_ARGUMENT;
    const auto communicator = std::make_shared<Communicator>();
    communicator->rank = rank;
    communicator->ranks = ranks;
    communicator->device = device;
    static std::atomic<u64> of_fault_rank;
    if (u64(rank) == config().fault_rank) {
        const u64 count = ++of_fault_rank, most = config().faulty_communicators;
        communicator->is_faulty = !most || count <= most;
    }
    if (given) {
        const bool known = given->size == sizeof *given && given->magic == 0xcafebeef && given->version == 21800;
        const auto in = [](int value, int least, int most) { return value == UNDEFINED || (value >= least && value <= most); };
        if (!known || !in(given->blocking, 0, 1) || !in(given->cga_cluster_size, 0, 8) || !in(given->min_ctas, 1, 64) ||
            !in(given->max_ctas, 1, 64) || given->net_name || !in(given->split_share, 0, 1))
            return INVALID_ARGUMENT;
        if (given->min_ctas != UNDEFINED && given->max_ctas != UNDEFINED && given->min_ctas > given->max_ctas) return INVALID_ARGUMENT;
        if (given->blocking != UNDEFINED) communicator->blocking = given->blocking;
    }
    const int code = join(communicator, id);
    if (code != SUCCESS && code != IN_PROGRESS) return code;
    std::lock_guard<std::mutex> held(lock());
    *made = communicator.get();
    communicators()[*made] = communicator;
    return code;
}

API ncclCommGetAsyncError(Communicator *handle, int *code) {
    const Call call(handle, "ncclCommGetAsyncError");
    *code = call->state;
    return SUCCESS;
}

API ncclCommCount(Communicator *handle, int *ranks) {
    *ranks = Call(handle, "ncclCommCount")->ranks;
    return SUCCESS;
}

API ncclCommUserRank(Communicator *handle, int *rank) {
    *rank = Call(handle, "ncclCommUserRank")->rank;
    return SUCCESS;
}

static void forget(Communicator *handle) {
    std::lock_guard<std::mutex> held(lock());
    communicators().erase(handle);
}

// Completes when all groups are complete.
API ncclCommFinalize(Communicator *handle) {
    const Call call(handle, "ncclCommFinalize");
    if (call->state != SUCCESS) return INVALID_ARGUMENT;
    if (call->finalized.exchange(true)) die("a communicator was finalized twice");
    const bool hangs = call->is_faulty && config().finalize_hangs;
    const auto wait = [communicator = call.communicator, hangs] {
        while (hangs || communicator->outstanding) {
            if (communicator->aborted) return;
            sleep_us(100);
        }
        communicator->state = SUCCESS;
    };
    call->state = IN_PROGRESS;
    if (call->blocking) {
        wait();
        return call->state;
    }
    std::thread(wait).detach();
    return IN_PROGRESS;
}

API ncclCommDestroy(Communicator *handle) {
    {
        const Call call(handle, "ncclCommDestroy");
        if (call->outstanding || call->state != SUCCESS)
            die("ncclCommDestroy of a communicator with %d groups that are not complete, state %d: finalize it or abort it",
                call->outstanding.load(), call->state.load());
    }
    forget(handle);
    return SUCCESS;
}

API ncclCommAbort(Communicator *handle) {
    {
        const Call call(handle, "ncclCommAbort");
        call->aborted = true;
        unlink(call->path.c_str());
        sleep_us(config().abort_ms * 1000);
        while (call->running || call->launching) sleep_us(100);
        aborts++;
    }
    forget(handle);
    return SUCCESS;
}

// --- messages ---------------------------------------------------------------------------------------------------------

// The open group of a thread. It is for one communicator and one stream.
static thread_local int depth;
static thread_local Group open_group;

API ncclGroupStart() {
    depth++;
    return SUCCESS;
}

API ncclGroupEnd() {
    if (!depth) return INVALID_USAGE;
    if (--depth) return SUCCESS;
    Group group = std::move(open_group);
    open_group = Group();
    if (group.transfers.empty()) return SUCCESS;
    const Call call(group.communicator.get(), "ncclGroupEnd");
    group.number = ++call->groups;
    return launch(std::move(group));
}

static int add(Communicator *handle, const char *name, bool is_send, u64 address, size_t bytes, int type, int peer, void *stream) {
    const Call call(handle, name);
    if (!open_group.transfers.empty() && call->is_due(config().use_at, call->groups + 1)) call->fail(int(config().code), "told to fail");
    // As in NVIDIA's library: the operation before this one must be in its stream.
    if (call->state != SUCCESS) return INVALID_ARGUMENT;
    if (call->finalized) die("%s after ncclCommFinalize", name);
    if (type != 0 && type != 1) die("%s of elements of type %d, which are not bytes", name, type);
    if (peer < 0 || peer >= call->ranks || peer == call->rank || !bytes) return INVALID_ARGUMENT;
    if (!depth) die("%s outside of a group", name);
    if (kyklos_fake_current_device() != call->device) die("%s in a context of another device", name);
    if (!kyklos_fake_has_memory(call->device, address, bytes)) die("%s of memory that is not on device %d", name, call->device);
    if (open_group.communicator && (open_group.communicator != call.communicator || open_group.stream != stream))
        die("a group with two communicators or two streams");
    open_group.communicator = call.communicator;
    open_group.stream = stream;
    open_group.transfers.push_back({is_send, address, bytes, peer});
    return SUCCESS;
}

API ncclSend(const void *memory, size_t count, int type, int peer, Communicator *handle, void *stream) {
    return add(handle, "ncclSend", true, u64(memory), count, type, peer, stream);
}

API ncclRecv(void *memory, size_t count, int type, int peer, Communicator *handle, void *stream) {
    return add(handle, "ncclRecv", false, u64(memory), count, type, peer, stream);
}
