// The functions of the fake driver for kernels: modules, tensor maps, launches, graphs.
#include "fake.h"
#include "machine.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

using namespace fake;

// Whether this driver is new enough for an image of the fake NVRTC: a cubin of its major version or an older one, PTX that is no
// newer.
static bool new_enough(const char *image) {
    for (const std::string &kind : {std::string("\x7f" "ELF by "), std::string(".version by ")}) {
        if (std::memcmp(image, kind.data(), kind.size())) continue;
        const u64 toolkit = std::strtoull(image + kind.size(), nullptr, 10), unit = kind[0] == '.' ? 1 : 1000;
        return config().version / unit >= toolkit / unit;
    }
    return true;
}

// A number of `size` bytes in an image.
static u64 number(const char *image, u64 at, u32 size) {
    u64 value = 0;
    std::memcpy(&value, image + at, size);
    return value;
}

// Reads the names of kernels from a cubin by nvcc, and checks its architecture as NVIDIA's driver does.
static int read_cubin(Module &module, const char *image) {
    const u64 flags = number(image, 48, 4), architecture = (image[8] < 8 ? flags : flags >> 8) & 0xff;
    if (architecture / 10 != config().capability / 10 || architecture > config().capability) return NO_BINARY_FOR_GPU;
    module.by_nvcc = true;
    const auto section = [&](u64 index) { return number(image, 40, 8) + index * number(image, 58, 2); };
    const char *names = image + number(image, section(number(image, 62, 2)) + 24, 8);
    for (u64 index = 0; index < number(image, 60, 2); index++) {
        const char *name = names + number(image, section(index), 4);
        if (!std::strncmp(name, ".text.", 6)) module.kernels.insert(name + 6);
    }
    return SUCCESS;
}

// Accepts any image that looks like a cubin or PTX. What a kernel does is compiled into this library.
API cuModuleLoadDataEx(Module **module, const void *data, unsigned, int *, void **) {
    ENTER();
    const char *image = static_cast<const char *>(data);
    if (std::memcmp(image, "\x7f" "ELF", 4) && !std::strstr(image, ".version")) return INVALID_IMAGE;
    if (!new_enough(image)) return INVALID_IMAGE;
    std::unique_ptr<Module> made(new Module);
    made->device = current;
    // As the fake NVRTC makes no ELF header, this is one by nvcc: of 64 bits, little-endian, for CUDA.
    if (!std::memcmp(image, "\x7f" "ELF\2\1", 6) && number(image, 18, 2) == 190)
        if (const int wrong = read_cubin(*made, image)) return wrong;
    *module = made.release();
    state().modules.insert(*module);
    return SUCCESS;
}

API cuModuleUnload(Module *module) {
    ENTER();
    alive(state().modules, module, "module");
    drain(held, *current);
    state().modules.erase(module);
    delete module;
    return SUCCESS;
}

API cuModuleGetFunction(Function **function, Module *module, const char *name) {
    ENTER();
    alive(state().modules, module, "module");
    const machine::Kernel *kernel = machine::Kernel::find(name);
    if (!kernel || (module->by_nvcc && !module->kernels.count(name))) return NOT_FOUND;
    std::unique_ptr<Function> made(new Function);
    if (module->by_nvcc && module->kernels.size() < 20)
        made->module = " of a cubin with " + std::to_string(module->kernels.size());
    made->kernel = kernel;
    made->device = current;
    *function = made.get();
    state().functions[*function] = std::move(made);
    return SUCCESS;
}

API cuFuncSetAttribute(Function *function, int attribute, int value) {
    ENTER();
    if (attribute != 8) die("attribute %d of a function was set", attribute);
    if (value > 227 * 1024) return INVALID_VALUE;
    function->shared_most = unsigned(value);
    return SUCCESS;
}

// The last word of a tensor map that this driver encoded.
static const u64 ENCODED = 0x656e636f64656421;

// The conditions of the call's documentation; also, no stride is 0, and no box is larger than its swizzle permits.
API cuTensorMapEncodeTiled(TensorMap *map, int type, u32 rank, const void *data, const u64 *extent, const u64 *stride,
                           const u32 *box, const u32 *step, int interleave, int swizzle, int, int fill) {
    if (!map || u64(map) % 128 || !data || u64(data) % 16 || rank < 3 || rank > 5) return INVALID_VALUE;
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

// With a map that the driver did not encode, the behaviour of the kernel would be undefined.
static void check_maps(const machine::Kernel &kernel, const void *arguments) {
    if (std::strncmp(kernel.name, "hopper_", 7)) return;
    // The maps come first.
    const u32 count = kernel.argument_bytes == sizeof(HopperBackwardArguments) ? 4 : 3;
    for (u32 n = 0; n < count; n++)
        if (static_cast<const TensorMap *>(arguments)[n].words[15] != ENCODED) die("a tensor map that this driver has not made");
}
static_assert(sizeof(HopperBackwardArguments) != sizeof(HopperArguments), "told apart by their sizes");

// Checks a launch and copies its arguments. Returns the error that the host gets at once.
static int take(Launch *into, Function *function, const u32 (&grid)[3], const u32 (&threads)[3], u32 shared, void **arguments) {
    if (!state().functions.count(function)) die("a launch of a function that does not exist");
    const machine::Kernel &kernel = *static_cast<const machine::Kernel *>(function->kernel);
    if (threads[0] != kernel.threads || threads[1] != 1 || threads[2] != 1)
        die("%s has %u threads and was launched with %u, %u, %u", kernel.name, kernel.threads, threads[0], threads[1], threads[2]);
    const bool fits = grid[0] && grid[1] && grid[2] && grid[0] <= 0x7fffffff && grid[1] <= 65535 && grid[2] <= 65535;
    if (!fits || shared > function->shared_most) return INVALID_VALUE;
    *into = {&kernel, {grid[0], grid[1], grid[2]}, shared, std::string(static_cast<const char *>(arguments[0]), kernel.argument_bytes),
             function->module};
    return SUCCESS;
}

// Runs a kernel, the nth launch of its device.
static void run(const Launch &launch, u64 nth) {
    const machine::Kernel &kernel = *static_cast<const machine::Kernel *>(launch.kernel);
    const u64 seed = config().seed + nth;
    // The emulator can run one launch at a time.
    static std::mutex one;
    std::lock_guard<std::mutex> alone(one);
    static std::vector<std::function<void()>> late;
    const auto runs = [=, &kernel] {
        alignas(128) char aligned[4096];
        std::memcpy(aligned, launch.arguments.data(), launch.arguments.size());
        check_maps(kernel, aligned);
        machine::launch(kernel, launch.grid, launch.shared, aligned, machine::Timing(seed % 3), seed);
    };
    if (config().late_parts && !std::strncmp(kernel.name, "decode_", 7)) return late.push_back(runs);
    runs();
    if (std::strcmp(kernel.name, "merge_parts")) return;
    for (const auto &part : late) part();
    late.clear();
}

// Queues all launches, or none after an error.
static int submit_all(Held &held, Stream &stream, const std::vector<Launch> &launches) {
    Device *device = stream.device;
    if (const u64 most = config().most_queued)
        state().changed.wait(held, [&] { return stream.queue.size() < most || device->sticky; });
    const u64 before = device->launches;
    const bool here = device->ordinal == 0;
    device->launches += launches.size();
    device->most_ahead = std::max(device->most_ahead, device->launches - device->launches_done);
    state().changed.notify_all();
    const auto among = [&](u64 nth) { return here && nth > before && nth <= device->launches; };
    state().launches += launches.size();
    for (const Launch &launch : launches)
        state().launched[static_cast<const machine::Kernel *>(launch.kernel)->name + launch.module]++;
    if (among(config().refuse_at)) return LAUNCH_OUT_OF_RESOURCES;
    u64 nth = before;
    for (const Launch &launch : launches) {
        nth++;
        const bool breaks = here && nth == config().sticky_at, hangs = here && nth == config().hang_at;
        submit(stream, [=] {
            if (config().hold_until) {
                Held held(state().lock);
                state().changed.wait(held, [&] { return device->launches >= config().hold_until || device->sticky; });
            }
            if (!breaks && !hangs) {
                run(launch, nth);
                Held held(state().lock);
                device->launches_done++;
                return;
            }
            Held held(state().lock);
            if (breaks) device->sticky = int(config().sticky);
            state().changed.notify_all();
            if (hangs) state().changed.wait(held, [] { return false; });
        });
    }
    return SUCCESS;
}

API cuLaunchKernel(Function *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y,
                   unsigned threads_z, unsigned shared, Stream *stream, void **arguments, void **) {
    ENTER();
    alive(state().streams, stream, "stream");
    Launch launch;
    const int wrong = take(&launch, function, {x, y, z}, {threads, threads_y, threads_z}, shared, arguments);
    return wrong ? wrong : submit_all(held, *stream, {launch});
}

// --- graphs -----------------------------------------------------------------------------------------------------------

// `graph_code` if this is the call that has to fail, else SUCCESS. The code may destroy the context.
static int planned(u64 &count, u64 at) {
    if (current->ordinal != 0 || ++count != at) return SUCCESS;
    const int code = int(config().graph_code);
    if (code >= ILLEGAL_ADDRESS && code != LAUNCH_OUT_OF_RESOURCES) current->sticky = code;
    return code;
}

API cuGraphCreate(Graph **graph, unsigned flags) {
    ENTER();
    static u64 count;
    if (flags) return INVALID_VALUE;
    if (const int code = planned(count, config().graph_create_at)) return code;
    *graph = new Graph;
    state().graphs.insert(*graph);
    return SUCCESS;
}

// CUDA_KERNEL_NODE_PARAMS_v2
struct NodeParameters {
    Function *function;
    u32 grid[3], threads[3], shared;
    void **arguments, **extra;
    void *kernel, *context;
};

// The handle of a node is its number, from 1 on.
API cuGraphAddKernelNode_v2(u64 *node, Graph *graph, const u64 *after, size_t count, const NodeParameters *parameters) {
    ENTER();
    alive(state().graphs, graph, "graph");
    if (parameters->extra || parameters->kernel || parameters->context) return INVALID_VALUE;
    GraphNode made;
    const int wrong = take(&made.launch, parameters->function, parameters->grid, parameters->threads, parameters->shared,
                           parameters->arguments);
    if (wrong) return wrong;
    for (size_t i = 0; i < count; i++) {
        if (!after[i] || after[i] > graph->nodes.size()) die("a node of a graph depends on what is none of its nodes");
        made.after.insert(after[i] - 1);
    }
    graph->nodes.push_back(made);
    *node = graph->nodes.size();
    return SUCCESS;
}

API cuGraphDestroy(Graph *graph) {
    ENTER();
    alive(state().graphs, graph, "graph");
    state().graphs.erase(graph);
    delete graph;
    return SUCCESS;
}

// Orders nodes by their dependencies. Of the nodes that may run next, the one that was added last runs first, so that a missing
// dependency changes the order.
static std::vector<Launch> ordered(const Graph &graph) {
    std::vector<Launch> order;
    std::set<size_t> done;
    while (order.size() < graph.nodes.size()) {
        size_t next = graph.nodes.size();
        const auto may_run = [&](size_t node) {
            if (done.count(node)) return false;
            if (config().ignore_edges) return true;
            for (size_t before : graph.nodes[node].after)
                if (!done.count(before)) return false;
            return true;
        };
        while (!may_run(--next)) {}
        done.insert(next);
        order.push_back(graph.nodes[next].launch);
    }
    return order;
}

API cuGraphInstantiateWithFlags(GraphExec **exec, Graph *graph, u64 flags) {
    ENTER();
    static u64 count;
    alive(state().graphs, graph, "graph");
    if (flags) return INVALID_VALUE;
    if (const int code = planned(count, config().graph_instantiate_at)) return code;
    *exec = new GraphExec{current, ordered(*graph)};
    state().graph_execs.insert(*exec);
    state().graphs_made++;
    return SUCCESS;
}

API cuGraphLaunch(GraphExec *exec, Stream *stream) {
    ENTER();
    static u64 count;
    alive(state().graph_execs, exec, "executable graph");
    alive(state().streams, stream, "stream");
    if (exec->device != stream->device) die("a graph was launched on a stream of another device");
    if (const int code = planned(count, config().graph_launch_at)) return code;
    state().graph_launches++;
    state().graph_kernels += exec->launches.size();
    return submit_all(held, *stream, exec->launches);
}

// Launches that are queued or running are not affected.
API cuGraphExecDestroy(GraphExec *exec) {
    ENTER();
    alive(state().graph_execs, exec, "executable graph");
    state().graph_execs.erase(exec);
    delete exec;
    return SUCCESS;
}
