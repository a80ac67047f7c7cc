// The functions of `libcuda.so.1` that the CUDA backend uses, except those for memory (`memory.cpp`) and kernels
// (`kernels.cpp`), and a few that callers use.
#include "fake.h"

#include <cstdio>

using namespace fake;

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
    case NO_BINARY_FOR_GPU: *text = "CUDA_ERROR_NO_BINARY_FOR_GPU"; break;
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
    case NO_BINARY_FOR_GPU: *text = "no kernel image is available for execution on the device"; break;
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

// For callers.
API cuDevicePrimaryCtxGetState(int ordinal, unsigned *flags, int *active) {
    Held held(state().lock);
    *flags = 0;
    *active = state().devices[ordinal].retained > 0;
    return SUCCESS;
}

static Device *usable(void *context) {
    Device *device = static_cast<Device *>(context);
    if (device && !device->retained) die("a context was used after its release");
    return device;
}

API cuCtxPushCurrent_v2(void *context) {
    Held held(state().lock);
    if (!context) return INVALID_CONTEXT;
    below.push_back(current);
    current = usable(context);
    return SUCCESS;
}

API cuCtxPopCurrent_v2(void **context) {
    if (below.empty()) die("a context was popped once more than one was pushed");
    *context = current;
    current = below.back();
    below.pop_back();
    return SUCCESS;
}

// For callers; the backend pushes and pops.
API cuCtxSetCurrent(void *context) {
    Held held(state().lock);
    current = usable(context);
    return SUCCESS;
}

API cuCtxGetCurrent(void **context) {
    *context = current;
    return SUCCESS;
}

// A context that is not the primary one. For callers; unlike NVIDIA's driver this does not make it current.
API cuCtxCreate_v4(void **context, const void *, unsigned, int ordinal) {
    Held held(state().lock);
    Device *made = new Device;
    made->ordinal = ordinal;
    made->retained = 1;
    state().contexts.insert(made);
    *context = made;
    return SUCCESS;
}

API cuCtxDestroy_v2(void *context) {
    Held held(state().lock);
    Device *device = static_cast<Device *>(context);
    alive(state().contexts, device, "context");
    drain(held, *device);
    // Its struct stays: threads of its streams may still end.
    device->retained = 0;
    state().contexts.erase(device);
    if (current == device) current = nullptr;
    return SUCCESS;
}

// --- streams and events -----------------------------------------------------------------------------------------------

static Stream *make_stream(u64 number) {
    Stream *stream = new Stream;
    stream->device = current;
    stream->number = number;
    stream->random = config().seed * 1000 + number;
    current->streams.insert(stream);
    start(stream);
    return stream;
}

// The backend uses no default stream, and its streams do not synchronise with it.
Stream *fake::existing(Stream *handle) {
    if (handle) {
        alive(state().streams, handle, "stream");
        return handle;
    }
    if (!current->default_stream) {
        current->default_stream = make_stream(900 + u64(current->ordinal));
        current->default_stream->by_caller = true;
    }
    return current->default_stream;
}

API cuStreamCreateWithPriority(Stream **stream, unsigned, int) {
    ENTER();
    static u64 count;
    *stream = make_stream(count++);
    state().streams.insert(*stream);
    return SUCCESS;
}

// For callers.
API cuStreamCreate(Stream **stream, unsigned) {
    ENTER();
    static u64 count;
    *stream = make_stream(500 + count++);
    state().streams.insert(*stream);
    (*stream)->by_caller = true;
    return SUCCESS;
}

API cuStreamSynchronize(Stream *stream) {
    ENTER();
    stream = existing(stream);
    state().changed.wait(held, [&] { return stream->device->sticky || (!stream->busy && stream->queue.empty()); });
    return stream->device->sticky;
}

API cuStreamBeginCapture_v2(Stream *stream, int) {
    ENTER();
    stream = existing(stream);
    stream->capturing = true;
    return SUCCESS;
}

API cuStreamIsCapturing(Stream *stream, int *status) {
    ENTER();
    stream = existing(stream);
    *status = stream->capturing;
    return SUCCESS;
}

API cuStreamGetCtx(Stream *stream, void **context) {
    ENTER();
    stream = existing(stream);
    *context = stream->device;
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
    stream = existing(stream);
    alive(state().events, event, "event");
    state().waits++;
    const std::shared_ptr<EventRecord> record = event->record;
    if (!record) return SUCCESS;
    const bool forgets = stream->by_caller ? config().ignore_caller_waits & 2
                                           : (config().ignore_waits >> stream->number % 3 & 1) ||
                                                 (record->by_caller && config().ignore_caller_waits & 1);
    const u64 ignored = config().ignore_nccl_waits;
    if (forgets || (stream->by_nccl && ignored & 1) || (record->by_nccl && ignored & 2)) return SUCCESS;
    submit(*stream, [=] {
        Held held(state().lock);
        state().changed.wait(held, [&] { return record->done || record->device->sticky; });
    });
    return SUCCESS;
}

API cuEventCreate(Event **event, unsigned flags) {
    ENTER();
    *event = new Event;
    (*event)->timed = !(flags & 2);
    state().events.insert(*event);
    return SUCCESS;
}

API cuEventRecord(Event *event, Stream *stream) {
    ENTER();
    stream = existing(stream);
    alive(state().events, event, "event");
    const std::shared_ptr<EventRecord> record = std::make_shared<EventRecord>();
    if (stream->device != current) return INVALID_HANDLE;
    if (stream->capturing) die("an event was recorded on a stream that captures a graph");
    const u64 refused = config().refuse_event_at;
    const bool counts = stream->has_copied && u64(current->ordinal) == config().copy_to;
    if (counts && ++state().events_of_copies >= refused && refused) return OUT_OF_MEMORY;
    record->device = current;
    record->by_caller = stream->by_caller;
    record->by_nccl = stream->by_nccl;
    event->record = record;
    submit(*stream, [=] {
        Held held(state().lock);
        record->done = true;
        record->time = std::chrono::steady_clock::now();
        state().changed.notify_all();
    });
    return SUCCESS;
}

API cuEventQuery(Event *event) {
    ENTER();
    alive(state().events, event, "event");
    return !event->record || event->record->done ? SUCCESS : NOT_READY;
}

API cuEventElapsedTime(float *ms, Event *from, Event *to) {
    ENTER();
    for (Event *event : {from, to}) {
        alive(state().events, event, "event");
        if (!event->timed || !event->record) return INVALID_HANDLE;
        if (!event->record->done) return NOT_READY;
    }
    *ms = std::chrono::duration<float, std::milli>(to->record->time - from->record->time).count();
    return SUCCESS;
}

API cuEventDestroy_v2(Event *event) {
    Held held(state().lock);
    alive(state().events, event, "event");
    state().events.erase(event);
    delete event;
    return SUCCESS;
}

// --- for the fake NCCL; no functions of NVIDIA's ---------------------------------------------------------------------------

#define FOR_NCCL(type) extern "C" __attribute__((visibility("default"))) type

// The index of the device whose context is current, or -1.
FOR_NCCL(int) kyklos_fake_current_device() { return current ? current->ordinal : -1; }

// Queues an operation: `run(data)` on the thread of the stream, which is of the current context.
FOR_NCCL(int) kyklos_fake_enqueue(Stream *stream, void (*run)(void *), void *data) {
    ENTER();
    alive(state().streams, stream, "stream");
    if (stream->device != current) die("NCCL got a stream of another device");
    stream->by_nccl = true;
    submit(*stream, [=] { run(data); });
    return SUCCESS;
}
