// The functions of `libcuda.so.1` that the CUDA backend uses, except those for kernels (`kernels.cpp`).
#include "fake.h"

#include <cstdio>
#include <cstring>
#include <sys/mman.h>

using namespace fake;

static const u64 PAGE = 4096;

// --- devices ---------------------------------------------------------------------------------------------------------

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
    Held held(state().lock);
    Device &device = state().devices[ordinal];
    device.ordinal = ordinal;
    device.retained++;
    *context = &device;
    return SUCCESS;
}

API cuDevicePrimaryCtxRelease_v2(int ordinal) {
    Held held(state().lock);
    if (--state().devices[ordinal].retained < 0) die("a context was released once more than it was retained");
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
    // A page without access before and one behind.
    const u64 pages = (bytes + PAGE - 1) / PAGE * PAGE;
    void *all = mmap(nullptr, pages + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED) return OUT_OF_MEMORY;
    mprotect(static_cast<char *>(all) + PAGE, pages, PROT_READ | PROT_WRITE);
    *address = u64(all) + PAGE + (pages - bytes) / 256 * 256;
    std::memset(reinterpret_cast<void *>(*address), 0xff, bytes);
    state().memory[*address] = {bytes, current};
    state().freed.erase(*address);
    current->used += bytes;
    return SUCCESS;
}

API cuMemFree_v2(u64 address) {
    ENTER();
    auto at = state().memory.find(address);
    if (at == state().memory.end()) die("memory at %llx was freed, but is none", address);
    drain(held, *current);
    const u64 bytes = at->second.first, first = address / PAGE * PAGE;
    at->second.second->used -= bytes;
    state().memory.erase(at);
    // The addresses stay reserved without access, so that every later access is a fault.
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
    state().pinned[u64(*memory)] = bytes;
    return SUCCESS;
}

API cuMemFreeHost(void *memory) {
    ENTER();
    auto at = state().pinned.find(u64(memory));
    if (at == state().pinned.end()) die("pinned memory at %p was freed, but is none", memory);
    std::memset(memory, 0xff, at->second);
    state().pinned.erase(at);
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
    return inside(state().memory, address, bytes, [](const std::pair<u64, Device *> &entry) { return entry.first; });
}

static bool is_pinned(u64 address, u64 bytes) {
    return inside(state().pinned, address, bytes, [](u64 pinned) { return pinned; });
}

// A copy in stream order, which reads and writes when its turn comes.
static void copy(Stream &stream, u64 into, u64 from, u64 bytes, u64 device_side, u64 host_side) {
    submit(stream, [=] {
        Held held(state().lock);
        if (!on_device(device_side, bytes)) die("a copy meets device memory that was freed");
        if (!is_pinned(host_side, bytes)) die("a copy meets pinned memory that was freed");
        state().copied += bytes;
        std::memcpy(reinterpret_cast<void *>(into), reinterpret_cast<void *>(from), bytes);
    });
}

API cuMemcpyHtoDAsync_v2(u64 into, const void *from, size_t bytes, Stream *stream) {
    ENTER();
    alive(state().streams, stream, "stream");
    if (!on_device(into, bytes)) return INVALID_VALUE;
    if (is_pinned(u64(from), bytes)) {
        copy(*stream, into, u64(from), bytes, into, u64(from));
        return SUCCESS;
    }
    // Pageable: the driver reads it before it returns, after earlier operations of the stream.
    state().pageable++;
    drain(held, *current);
    std::memcpy(reinterpret_cast<void *>(into), from, bytes);
    return current->sticky;
}

API cuMemcpyDtoHAsync_v2(void *into, u64 from, size_t bytes, Stream *stream) {
    ENTER();
    alive(state().streams, stream, "stream");
    if (!on_device(from, bytes)) return INVALID_VALUE;
    if (is_pinned(u64(into), bytes)) {
        // The destination is undefined until the copy is done.
        std::memset(into, 0xff, bytes);
        copy(*stream, u64(into), from, bytes, from, u64(into));
        return SUCCESS;
    }
    state().pageable++;
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
    state().streams.insert(*stream);
    start(*stream);
    return SUCCESS;
}

API cuStreamDestroy_v2(Stream *stream) {
    Held held(state().lock);
    alive(state().streams, stream, "stream");
    state().streams.erase(stream);
    stream->closed = true;
    state().changed.notify_all();
    return SUCCESS;
}

API cuStreamWaitEvent(Stream *stream, Event *event, unsigned) {
    ENTER();
    alive(state().streams, stream, "stream");
    alive(state().events, event, "event");
    state().waits++;
    const std::shared_ptr<EventRecord> record = event->record;
    if (config().ignore_waits >> stream->number % 3 & 1 || !record) return SUCCESS;
    submit(*stream, [=] {
        Held held(state().lock);
        state().changed.wait(held, [&] { return record->done || record->device->sticky; });
    });
    return SUCCESS;
}

API cuEventCreate(Event **event, unsigned) {
    ENTER();
    *event = new Event;
    state().events.insert(*event);
    return SUCCESS;
}

API cuEventRecord(Event *event, Stream *stream) {
    ENTER();
    alive(state().streams, stream, "stream");
    alive(state().events, event, "event");
    const std::shared_ptr<EventRecord> record = std::make_shared<EventRecord>();
    record->device = current;
    event->record = record;
    submit(*stream, [=] {
        Held held(state().lock);
        record->done = true;
        state().changed.notify_all();
    });
    return SUCCESS;
}

API cuEventQuery(Event *event) {
    ENTER();
    alive(state().events, event, "event");
    return !event->record || event->record->done ? SUCCESS : NOT_READY;
}

API cuEventDestroy_v2(Event *event) {
    Held held(state().lock);
    alive(state().events, event, "event");
    state().events.erase(event);
    delete event;
    return SUCCESS;
}
