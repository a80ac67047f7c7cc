// The entry points of `libcuda.so.1` that the CUDA backend uses.
#include "fake.h"
#include "machine.h"

#include <cstdio>
#include <cstring>
#include <sys/mman.h>
#include <vector>

using namespace fake;

typedef std::unique_lock<std::mutex> Held;

// A call with a current context, unless its device is broken.
#define ENTER()                            \
    Held held(world().lock);               \
    if (!current) return INVALID_CONTEXT;  \
    if (current->sticky) return current->sticky;

#define API extern "C" __attribute__((visibility("default"))) int

static const u64 PAGE = 4096;

template <typename T> static void alive(const std::set<T *> &all, T *one, const char *what) {
    if (!all.count(one)) die("a call with %s %p, which does not exist (any more)", what, (void *)one);
}

// --- what there is ----------------------------------------------------------------------------------------------------

API cuInit(unsigned) {
    judge_at_exit();
    return config().devices ? SUCCESS : NO_DEVICE;
}

API cuDriverGetVersion(int *version) {
    *version = int(config().version);
    return SUCCESS;
}

API cuDeviceGetCount(int *count) {
    *count = int(config().devices);
    return SUCCESS;
}

API cuDeviceGet(int *device, int ordinal) {
    if (ordinal < 0 || u64(ordinal) >= config().devices) return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}

API cuDeviceGetName(char *name, int bytes, int device) {
    std::snprintf(name, size_t(bytes), "Fake GPU %d", device);
    return SUCCESS;
}

API cuDeviceGetAttribute(int *value, int attribute, int) {
    switch (attribute) {
    case 75: *value = int(config().capability / 10); return SUCCESS;  // compute capability
    case 76: *value = int(config().capability % 10); return SUCCESS;
    case 16: *value = 8; return SUCCESS;                              // multiprocessors
    case 18: *value = 0; return SUCCESS;                              // integrated
    default: die("attribute %d was asked for", attribute);
    }
}

API cuDeviceTotalMem_v2(size_t *bytes, int) {
    *bytes = config().memory_mb << 20;
    return SUCCESS;
}

API cuGetErrorName(int code, const char **text) {
    switch (code) {
    case INVALID_VALUE: *text = "CUDA_ERROR_INVALID_VALUE"; break;
    case OUT_OF_MEMORY: *text = "CUDA_ERROR_OUT_OF_MEMORY"; break;
    case 46: *text = "CUDA_ERROR_DEVICE_UNAVAILABLE"; break;
    case NO_DEVICE: *text = "CUDA_ERROR_NO_DEVICE"; break;
    case INVALID_IMAGE: *text = "CUDA_ERROR_INVALID_IMAGE"; break;
    case 214: *text = "CUDA_ERROR_ECC_UNCORRECTABLE"; break;
    case ILLEGAL_ADDRESS: *text = "CUDA_ERROR_ILLEGAL_ADDRESS"; break;
    case LAUNCH_OUT_OF_RESOURCES: *text = "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"; break;
    case 719: *text = "CUDA_ERROR_LAUNCH_FAILED"; break;
    default: *text = nullptr; return INVALID_VALUE;
    }
    return SUCCESS;
}

API cuGetErrorString(int code, const char **text) {
    switch (code) {
    case OUT_OF_MEMORY: *text = "out of memory"; break;
    case NO_DEVICE: *text = "no CUDA-capable device is detected"; break;
    case ILLEGAL_ADDRESS: *text = "an illegal memory access was encountered"; break;
    default: *text = "the fake driver was told to fail"; break;
    }
    return SUCCESS;
}

// --- contexts ---------------------------------------------------------------------------------------------------------

API cuDevicePrimaryCtxRetain(void **context, int ordinal) {
    Held held(world().lock);
    Device &device = world().devices[ordinal];
    device.ordinal = ordinal;
    device.retained++;
    *context = &device;
    return SUCCESS;
}

API cuDevicePrimaryCtxRelease_v2(int ordinal) {
    Held held(world().lock);
    if (--world().devices[ordinal].retained < 0) die("a context was released once more than it was retained");
    return SUCCESS;
}

API cuCtxSetCurrent(void *context) {
    current = static_cast<Device *>(context);
    if (current && !current->retained) die("a context was used after its release");
    return SUCCESS;
}

// --- memory -----------------------------------------------------------------------------------------------------------

API cuMemGetInfo_v2(size_t *free, size_t *total) {
    ENTER();
    *total = config().memory_mb << 20;
    *free = *total - current->used;
    return SUCCESS;
}

API cuMemAlloc_v2(u64 *address, size_t bytes) {
    ENTER();
    if (!bytes) return INVALID_VALUE;
    current->allocations++;
    const bool planned = current->ordinal == 0 && config().oom_at && current->allocations >= config().oom_at;
    if (planned || bytes > (config().memory_mb << 20) - current->used) return OUT_OF_MEMORY;
    // A page that nobody may touch lies behind, and another one before.
    const u64 pages = (bytes + PAGE - 1) / PAGE * PAGE;
    void *all = mmap(nullptr, pages + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED) return OUT_OF_MEMORY;
    mprotect(static_cast<char *>(all) + PAGE, pages, PROT_READ | PROT_WRITE);
    *address = u64(all) + PAGE + (pages - bytes) / 256 * 256;
    std::memset(reinterpret_cast<void *>(*address), 0xff, bytes);
    world().memory[*address] = {bytes, current};
    world().freed.erase(*address);
    current->used += bytes;
    return SUCCESS;
}

API cuMemFree_v2(u64 address) {
    ENTER();
    auto at = world().memory.find(address);
    if (at == world().memory.end()) die("memory at %llx was freed, but is none", address);
    drain(held, *current);
    const u64 bytes = at->second.first, first = address / PAGE * PAGE;
    at->second.second->used -= bytes;
    world().memory.erase(at);
    // Its addresses are nobody's from now on, so that whoever still uses them is found out.
    const u64 length = (address + bytes - first + PAGE - 1) / PAGE * PAGE;
    madvise(reinterpret_cast<void *>(first), length, MADV_DONTNEED);
    mprotect(reinterpret_cast<void *>(first), length, PROT_NONE);
    return SUCCESS;
}

API cuMemHostAlloc(void **memory, size_t bytes, unsigned) {
    ENTER();
    current->pinned++;
    if (current->ordinal == 0 && config().pinned_oom_at && current->pinned >= config().pinned_oom_at) return OUT_OF_MEMORY;
    *memory = aligned_alloc(PAGE, (bytes + PAGE - 1) / PAGE * PAGE);
    if (!*memory) return OUT_OF_MEMORY;
    std::memset(*memory, 0xff, bytes);
    world().pinned[u64(*memory)] = bytes;
    return SUCCESS;
}

API cuMemFreeHost(void *memory) {
    ENTER();
    auto at = world().pinned.find(u64(memory));
    if (at == world().pinned.end()) die("pinned memory at %p was freed, but is none", memory);
    std::memset(memory, 0xff, at->second);
    world().pinned.erase(at);
    free(memory);
    return SUCCESS;
}

template <typename Map, typename Bytes> static bool inside(const Map &map, u64 address, u64 bytes, Bytes bytes_of) {
    auto after = map.upper_bound(address);
    if (after == map.begin()) return false;
    --after;
    return address + bytes <= after->first + bytes_of(after->second);
}

static bool on_device(u64 address, u64 bytes) {
    return inside(world().memory, address, bytes, [](const std::pair<u64, Device *> &entry) { return entry.first; });
}

static bool is_pinned(u64 address, u64 bytes) {
    return inside(world().pinned, address, bytes, [](u64 pinned) { return pinned; });
}

// A copy in the order of a stream, which reads and writes when it comes to it.
static void copy(Stream &stream, u64 into, u64 from, u64 bytes, u64 device_side, u64 host_side) {
    submit(stream, [=] {
        Held held(world().lock);
        if (!on_device(device_side, bytes)) die("a copy meets device memory that was freed");
        if (!is_pinned(host_side, bytes)) die("a copy meets pinned memory that was freed");
        world().copied += bytes;
        std::memcpy(reinterpret_cast<void *>(into), reinterpret_cast<void *>(from), bytes);
    });
}

API cuMemcpyHtoDAsync_v2(u64 into, const void *from, size_t bytes, Stream *stream) {
    ENTER();
    alive(world().streams, stream, "stream");
    if (!on_device(into, bytes)) return INVALID_VALUE;
    if (is_pinned(u64(from), bytes)) {
        copy(*stream, into, u64(from), bytes, into, u64(from));
        return SUCCESS;
    }
    // Pageable: the driver has read it when it returns, after what the stream does before.
    world().pageable++;
    drain(held, *current);
    std::memcpy(reinterpret_cast<void *>(into), from, bytes);
    return current->sticky;
}

API cuMemcpyDtoHAsync_v2(void *into, u64 from, size_t bytes, Stream *stream) {
    ENTER();
    alive(world().streams, stream, "stream");
    if (!on_device(from, bytes)) return INVALID_VALUE;
    if (is_pinned(u64(into), bytes)) {
        // What is there until the copy is done is nobody's business.
        std::memset(into, 0xff, bytes);
        copy(*stream, u64(into), from, bytes, from, u64(into));
        return SUCCESS;
    }
    world().pageable++;
    drain(held, *current);
    std::memcpy(into, reinterpret_cast<void *>(from), bytes);
    return current->sticky;
}

// --- streams and events -----------------------------------------------------------------------------------------------

API cuStreamCreateWithPriority(Stream **stream, unsigned, int) {
    ENTER();
    static u64 count;
    *stream = new Stream;
    (*stream)->device = current;
    (*stream)->number = count++;
    (*stream)->random = config().seed * 1000 + (*stream)->number;
    current->streams.insert(*stream);
    world().streams.insert(*stream);
    start(*stream);
    return SUCCESS;
}

API cuStreamDestroy_v2(Stream *stream) {
    Held held(world().lock);
    alive(world().streams, stream, "stream");
    world().streams.erase(stream);
    stream->closed = true;
    world().changed.notify_all();
    return SUCCESS;
}

API cuStreamWaitEvent(Stream *stream, Event *event, unsigned) {
    ENTER();
    alive(world().streams, stream, "stream");
    alive(world().events, event, "event");
    world().waits++;
    const std::shared_ptr<Ticket> ticket = event->ticket;
    if (config().ignore_waits >> stream->number % 3 & 1 || !ticket) return SUCCESS;
    submit(*stream, [=] {
        Held held(world().lock);
        world().changed.wait(held, [&] { return ticket->done || ticket->device->sticky; });
    });
    return SUCCESS;
}

API cuEventCreate(Event **event, unsigned) {
    ENTER();
    *event = new Event;
    world().events.insert(*event);
    return SUCCESS;
}

API cuEventRecord(Event *event, Stream *stream) {
    ENTER();
    alive(world().streams, stream, "stream");
    alive(world().events, event, "event");
    const std::shared_ptr<Ticket> ticket = std::make_shared<Ticket>();
    ticket->device = current;
    event->ticket = ticket;
    submit(*stream, [=] {
        Held held(world().lock);
        ticket->done = true;
        world().changed.notify_all();
    });
    return SUCCESS;
}

API cuEventQuery(Event *event) {
    ENTER();
    alive(world().events, event, "event");
    return !event->ticket || event->ticket->done ? SUCCESS : NOT_READY;
}

API cuEventDestroy_v2(Event *event) {
    Held held(world().lock);
    alive(world().events, event, "event");
    world().events.erase(event);
    delete event;
    return SUCCESS;
}

// --- kernels ----------------------------------------------------------------------------------------------------------

// Any image that looks like a cubin or like PTX will do: kernels are the ones that were compiled into this library.
API cuModuleLoadDataEx(Module **module, const void *image, unsigned, int *, void **) {
    ENTER();
    if (std::memcmp(image, "\x7f" "ELF", 4) && !std::strstr(static_cast<const char *>(image), ".version")) return INVALID_IMAGE;
    *module = new Module{current};
    world().modules.insert(*module);
    return SUCCESS;
}

API cuModuleUnload(Module *module) {
    ENTER();
    alive(world().modules, module, "module");
    drain(held, *current);
    world().modules.erase(module);
    delete module;
    return SUCCESS;
}

API cuModuleGetFunction(Function **function, Module *module, const char *name) {
    ENTER();
    alive(world().modules, module, "module");
    const machine::Kernel *kernel = machine::Kernel::find(name);
    if (!kernel) return NOT_FOUND;
    std::unique_ptr<Function> made(new Function);
    made->kernel = kernel;
    made->device = current;
    *function = made.get();
    world().functions[*function] = std::move(made);
    return SUCCESS;
}

API cuFuncSetAttribute(Function *function, int attribute, int value) {
    ENTER();
    if (attribute != 8) die("attribute %d of a function was set", attribute);
    if (value > 227 * 1024) return INVALID_VALUE;
    function->shared_most = unsigned(value);
    return SUCCESS;
}

// In the last words of a tensor map: it came from this driver.
static const u64 ENCODED = 0x656e636f64656421;

// As the documentation of the call has it; and that no stride is 0, and no box larger than what its swizzling permits.
API cuTensorMapEncodeTiled(TensorMap *map, int type, u32 rank, const void *data, const u64 *extent, const u64 *stride,
                           const u32 *box, const u32 *step, int interleave, int swizzle, int, int fill) {
    if (!map || u64(map) % 64 || !data || u64(data) % 16 || rank < 3 || rank > 5) return INVALID_VALUE;
    if ((type != 6 && type != 9) || interleave || swizzle != 3 || fill) return INVALID_VALUE;
    machine::TiledTensor tensor = {};
    tensor.data = u64(data);
    tensor.rank = rank;
    tensor.type = u32(type);
    tensor.swizzle = u32(swizzle);
    for (u32 d = 0; d < rank; d++) {
        if (!extent[d] || extent[d] > u64(1) << 32 || !box[d] || box[d] > 256 || step[d] != 1) return INVALID_VALUE;
        tensor.extent[d] = extent[d];
        tensor.box[d] = box[d];
        if (d + 1 == rank) break;
        if (!stride[d] || stride[d] % 16 || stride[d] >> 40) return INVALID_VALUE;
        tensor.stride[d] = stride[d];
    }
    if (box[0] * 2 > 128) return INVALID_VALUE;
    tensor.reserved[0] = tensor.reserved[1] = ENCODED;
    std::memcpy(map, &tensor, sizeof tensor);
    return SUCCESS;
}

// A kernel that was given what the host had for the driver would do anything.
static void check_maps(const HopperArguments &args) {
    for (const TensorMap *map : {&args.q, &args.k, &args.v})
        if (map->words[15] != ENCODED) die("a tensor map that this driver has not made");
}

API cuLaunchKernel(Function *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y,
                   unsigned threads_z, unsigned shared, Stream *stream, void **arguments, void **) {
    ENTER();
    alive(world().streams, stream, "stream");
    if (!world().functions.count(function)) die("a launch of a function that does not exist");
    const machine::Kernel &kernel = *static_cast<const machine::Kernel *>(function->kernel);
    if (threads != kernel.threads || threads_y != 1 || threads_z != 1)
        die("%s has %u threads and was launched with %u, %u, %u", kernel.name, kernel.threads, threads, threads_y, threads_z);
    if (!x || !y || !z || x > 0x7fffffff || y > 65535 || z > 65535 || shared > function->shared_most) return INVALID_VALUE;
    world().launches++;
    world().launched[kernel.name]++;
    const u64 nth = ++current->launches;
    const bool here = current->ordinal == 0;
    if (here && nth == config().refuse_at) return LAUNCH_OUT_OF_RESOURCES;
    const std::string bytes(static_cast<const char *>(arguments[0]), kernel.argument_bytes);
    Device *device = current;
    const bool breaks = here && nth == config().sticky_at, hangs = here && nth == config().hang_at;
    const u64 seed = config().seed + nth;
    const bool parts = !std::strncmp(kernel.name, "decode_", 7), merge = !std::strcmp(kernel.name, "merge_parts");
    submit(*stream, [=, &kernel] {
        if (breaks || hangs) {
            Held held(world().lock);
            if (breaks) device->sticky = int(config().sticky);
            world().changed.notify_all();
            if (hangs) world().changed.wait(held, [] { return false; });
            return;
        }
        // The emulator runs one launch at a time.
        static std::mutex one;
        std::lock_guard<std::mutex> alone(one);
        static std::vector<std::function<void()>> late;
        const auto runs = [=, &kernel] {
            alignas(64) char aligned[4096];
            std::memcpy(aligned, bytes.data(), bytes.size());
            if (!std::strncmp(kernel.name, "hopper_", 7)) check_maps(*reinterpret_cast<const HopperArguments *>(aligned));
            const u32 grid[3] = {x, y, z};
            machine::launch(kernel, grid, shared, aligned, machine::Timing(seed % 3), seed);
        };
        if (config().late_parts && parts) return late.push_back(runs);
        runs();
        if (!merge) return;
        for (const auto &part : late) part();
        late.clear();
    });
    return SUCCESS;
}
