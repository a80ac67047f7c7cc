// The functions of the fake driver for memory: allocations, what a pointer points to, copies.
#include "fake.h"

#include <cstdlib>
#include <cstring>
#include <iterator>
#include <sys/mman.h>

using namespace fake;

static const u64 PAGE = 4096;

API cuMemGetInfo_v2(size_t *free, size_t *total) {
    ENTER();
    *total = config().memory_mb << 20;
    *free = *total - current->used;
    return SUCCESS;
}

static int allocate(u64 *address, u64 bytes, bool pooled) {
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
    state().memory[*address] = {bytes, current, pooled};
    state().freed.erase(*address);
    current->used += bytes;
    return SUCCESS;
}

API cuMemAlloc_v2(u64 *address, size_t bytes) {
    ENTER();
    return allocate(address, bytes, false);
}

// From a pool. For callers. The memory may be used at once, not only in the order of the stream.
API cuMemAllocAsync(u64 *address, size_t bytes, Stream *stream) {
    ENTER();
    stream = existing(stream);
    return allocate(address, bytes, true);
}

API cuMemFree_v2(u64 address) {
    ENTER();
    auto at = state().memory.find(address);
    if (at == state().memory.end()) die("memory at %llx was freed, but is none", address);
    drain(held, *at->second.device);
    const u64 bytes = at->second.bytes, first = address / PAGE * PAGE;
    at->second.device->used -= bytes;
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
    return inside(state().memory, address, bytes, [](const Allocation &entry) { return entry.bytes; });
}

static bool is_pinned(u64 address, u64 bytes) {
    return inside(state().pinned, address, bytes, [](u64 pinned) { return pinned; });
}

// --- what a pointer points to -------------------------------------------------------------------------------------------

API cuPointerGetAttribute(void *value, int attribute, u64 address) {
    Held held(state().lock);
    const bool device = on_device(address, 1);
    if (!device && !is_pinned(address, 1)) return INVALID_VALUE;
    if (attribute == 2) {  // memory type
        *static_cast<u32 *>(value) = device ? 2 : 1;
        return SUCCESS;
    }
    if (!device) die("attribute %d of a host pointer was asked for", attribute);
    const Allocation &memory = std::prev(state().memory.upper_bound(address))->second;
    switch (attribute) {
    case 1:  // context
        if (memory.pooled) return INVALID_VALUE;
        *static_cast<Device **>(value) = memory.device;
        return SUCCESS;
    case 9: *static_cast<int *>(value) = memory.device->ordinal; return SUCCESS;  // device
    default: die("attribute %d of a pointer was asked for", attribute);
    }
}

API cuMemGetAddressRange_v2(u64 *base, size_t *bytes, u64 address) {
    ENTER();
    if (!on_device(address, 1)) return NOT_FOUND;
    const auto at = std::prev(state().memory.upper_bound(address));
    *base = at->first;
    *bytes = at->second.bytes;
    return SUCCESS;
}

// Whether a device has this memory. For the fake NCCL; no function of NVIDIA's.
extern "C" __attribute__((visibility("default"))) bool kyklos_fake_has_memory(int ordinal, u64 address, u64 bytes) {
    Held held(state().lock);
    return on_device(address, bytes) && std::prev(state().memory.upper_bound(address))->second.device->ordinal == ordinal;
}

// Bytes that the backend has copied: from the device to the host, or both ways. For tests; no function of NVIDIA's.
extern "C" __attribute__((visibility("default"))) u64 kyklos_fake_copied(bool only_to_host) {
    Held held(state().lock);
    return only_to_host ? state().downloaded : state().copied;
}

// A copy in stream order, which reads and writes when its turn comes.
static void copy(Stream &stream, u64 into, u64 from, u64 bytes, u64 device_side, u64 host_side) {
    const bool by_caller = stream.by_caller;
    submit(stream, [=] {
        Held held(state().lock);
        if (!on_device(device_side, bytes)) die("a copy meets device memory that was freed");
        if (!is_pinned(host_side, bytes)) die("a copy meets pinned memory that was freed");
        if (!by_caller) state().copied += bytes;
        if (!by_caller && from == device_side) state().downloaded += bytes;
        std::memcpy(reinterpret_cast<void *>(into), reinterpret_cast<void *>(from), bytes);
    });
}

API cuMemcpyHtoDAsync_v2(u64 into, const void *from, size_t bytes, Stream *stream) {
    ENTER();
    stream = existing(stream);
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

// Between devices. Reads and writes when its turn comes.
API cuMemcpyPeerAsync(u64 into, Device *into_context, u64 from, Device *from_context, size_t bytes, Stream *stream) {
    ENTER();
    stream = existing(stream);
    const auto is_of = [](u64 address, u64 bytes, const Device *context) {
        return on_device(address, bytes) && std::prev(state().memory.upper_bound(address))->second.device == context;
    };
    // Either context may be the one that is destroyed.
    if (from_context->sticky) return from_context->sticky;
    if (!is_of(into, bytes, into_context) || !is_of(from, bytes, from_context)) return INVALID_VALUE;
    stream->by_nccl = stream->has_copied = true;
    const u64 longer_ms = u64(into_context->ordinal) == config().copy_to ? config().copy_ms : 0;
    submit(*stream, [=] {
        std::this_thread::sleep_for(std::chrono::milliseconds(longer_ms));
        Held held(state().lock);
        if (!is_of(into, bytes, into_context) || !is_of(from, bytes, from_context)) die("a copy between devices meets memory that was freed");
        state().between_devices += bytes;
        std::memcpy(reinterpret_cast<void *>(into), reinterpret_cast<void *>(from), bytes);
    });
    return SUCCESS;
}

API cuMemcpyDtoHAsync_v2(void *into, u64 from, size_t bytes, Stream *stream) {
    ENTER();
    stream = existing(stream);
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
