// A program of several ranks that uses the fake driver and the fake NCCL, for the tests of the latter: `probe CASE RANKS`.
// It ends with 0 when what the case says is so, else it prints what is not.
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>
#include <string>
#include <sys/mman.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

typedef unsigned long long u64;
struct Id {
    char bytes[128];
};
struct Config {
    size_t size = sizeof(Config);
    unsigned magic = 0xcafebeef, version = 21800;
    int blocking = 0, cga = INT_MIN, min_ctas = INT_MIN, max_ctas = INT_MIN;
    const char *net = nullptr;
    int split = INT_MIN;
};

extern "C" {
int cuInit(unsigned);
int cuDevicePrimaryCtxRetain(void **, int);
int cuDevicePrimaryCtxRelease_v2(int);
int cuCtxPushCurrent_v2(void *);
int cuCtxPopCurrent_v2(void **);
int cuMemAlloc_v2(u64 *, size_t);
int cuMemFree_v2(u64);
int cuMemcpyHtoDAsync_v2(u64, const void *, size_t, void *);
int cuMemcpyDtoHAsync_v2(void *, u64, size_t, void *);
int cuStreamCreateWithPriority(void **, unsigned, int);
int cuStreamDestroy_v2(void *);
int cuStreamSynchronize(void *);
int cuEventCreate(void **, unsigned);
int cuEventRecord(void *, void *);
int cuEventQuery(void *);
int cuEventDestroy_v2(void *);
int ncclGetUniqueId(Id *);
int ncclCommInitRankConfig(void **, int, Id, int, const Config *);
int ncclCommGetAsyncError(void *, int *);
int ncclCommFinalize(void *);
int ncclCommDestroy(void *);
int ncclCommAbort(void *);
int ncclGroupStart();
int ncclGroupEnd();
int ncclSend(const void *, size_t, int, int, void *, void *);
int ncclRecv(void *, size_t, int, int, void *, void *);
}

static const int IN_PROGRESS = 7;

static void equal(long long got, long long wanted, const char *what, int line) {
    if (got == wanted) return;
    std::fprintf(stderr, "line %d: %s is %lld, not %lld\n", line, what, got, wanted);
    _exit(1);
}

#define EQUAL(what, wanted) equal((what), (wanted), #what, __LINE__)

static void nap() { std::this_thread::sleep_for(std::chrono::microseconds(100)); }

// One rank with a device of its own, unless `shared_device`.
struct Rank {
    int rank, ranks, device;
    void *context = nullptr, *stream = nullptr, *communicator = nullptr;

    Rank(int rank, int ranks, bool shared_device = false) : rank(rank), ranks(ranks), device(shared_device ? 0 : rank) {
        EQUAL(cuInit(0), 0);
        EQUAL(cuDevicePrimaryCtxRetain(&context, device), 0);
        EQUAL(cuCtxPushCurrent_v2(context), 0);
        EQUAL(cuStreamCreateWithPriority(&stream, 1, -5), 0);
    }
    ~Rank() {
        void *popped;
        cuStreamDestroy_v2(stream);
        cuCtxPopCurrent_v2(&popped);
        cuDevicePrimaryCtxRelease_v2(device);
    }
    int state() const {
        int code;
        EQUAL(ncclCommGetAsyncError(communicator, &code), 0);
        return code;
    }
    // The state when it is no longer in progress, or `IN_PROGRESS` after `ms`.
    int settled(int ms = 20000) const {
        for (int left = ms * 10; left && state() == IN_PROGRESS; left--) nap();
        return state();
    }
    int init(const Id &id, int ms = 20000) {
        const Config config;
        EQUAL(ncclCommInitRankConfig(&communicator, ranks, id, rank, &config), IN_PROGRESS);
        return settled(ms);
    }
    void leave() const {
        EQUAL(ncclCommFinalize(communicator), IN_PROGRESS);
        EQUAL(settled(), 0);
        EQUAL(ncclCommDestroy(communicator), 0);
    }
    u64 memory(size_t bytes) const {
        u64 address;
        EQUAL(cuMemAlloc_v2(&address, bytes), 0);
        return address;
    }
    int left() const { return (rank + ranks - 1) % ranks; }
    int right() const { return (rank + 1) % ranks; }
    // Posts one step of a ring. Two messages each way, one of them longer than a mailbox.
    int post(u64 from, u64 into, size_t bytes) const {
        EQUAL(ncclGroupStart(), 0);
        EQUAL(ncclSend((void *)from, 3, 0, right(), communicator, stream), 0);
        EQUAL(ncclRecv((void *)into, 3, 0, left(), communicator, stream), 0);
        EQUAL(ncclSend((void *)(from + 3), bytes - 3, 1, right(), communicator, stream), 0);
        EQUAL(ncclRecv((void *)(into + 3), bytes - 3, 1, left(), communicator, stream), 0);
        return ncclGroupEnd();
    }
};

static const size_t BYTES = 100001;

// A buffer goes once around the ring and comes back.
static void ring(Rank &self) {
    std::vector<unsigned char> data(BYTES), got(BYTES);
    for (size_t i = 0; i < BYTES; i++) data[i] = (unsigned char)(i * 7 + size_t(self.rank));
    u64 buffers[2] = {self.memory(BYTES), self.memory(BYTES)};
    EQUAL(cuMemcpyHtoDAsync_v2(buffers[0], data.data(), BYTES, self.stream), 0);
    for (int step = 0; step < self.ranks; step++) {
        EQUAL(self.post(buffers[step % 2], buffers[(step + 1) % 2], BYTES), IN_PROGRESS);
        // The group is in the stream from now on, not before.
        EQUAL(self.settled(), 0);
    }
    EQUAL(cuMemcpyDtoHAsync_v2(got.data(), buffers[self.ranks % 2], BYTES, self.stream), 0);
    EQUAL(std::memcmp(got.data(), data.data(), BYTES), 0);
    self.leave();
    for (const u64 buffer : buffers) EQUAL(cuMemFree_v2(buffer), 0);
}

// Ranks, as threads or processes, whose first group is done.
static std::atomic<int> *done = new (mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) std::atomic<int>(0);

// Posts a group that does not end, because of a fault. Ends with `wanted`; then every rank aborts, and its stream is idle.
static void broken(Rank &self, int wanted) {
    const u64 from = self.memory(BYTES), into = self.memory(BYTES);
    void *event;
    EQUAL(cuEventCreate(&event, 2), 0);
    EQUAL(self.post(from, into, BYTES), IN_PROGRESS);
    EQUAL(self.settled(), 0);
    EQUAL(cuStreamSynchronize(self.stream), 0);
    // A rank whose first group is under way would see the end of another one there.
    ++*done;
    for (int i = 0; i < 100000 && *done < self.ranks; i++) nap();
    EQUAL(*done >= self.ranks, true);
    EQUAL(self.post(into, from, BYTES), IN_PROGRESS);
    self.settled();
    EQUAL(cuEventRecord(event, self.stream), 0);
    for (int i = 0; i < 100000 && self.state() != wanted; i++) nap();
    EQUAL(self.state(), wanted);
    EQUAL(cuEventQuery(event), 600);
    EQUAL(ncclCommAbort(self.communicator), 0);
    EQUAL(cuStreamSynchronize(self.stream), 0);
    EQUAL(cuEventQuery(event), 0);
    EQUAL(cuEventDestroy_v2(event), 0);
    for (const u64 buffer : {from, into}) EQUAL(cuMemFree_v2(buffer), 0);
}

static void threads(int ranks, const std::function<void(Rank &)> &run, bool shared_device = false) {
    std::vector<std::thread> all;
    for (int rank = 0; rank < ranks; rank++)
        all.emplace_back([=] {
            Rank self(rank, ranks, shared_device);
            run(self);
        });
    for (std::thread &one : all) one.join();
}

// Ends with the exit codes of the processes.
static std::vector<int> processes(int ranks, const std::function<void(Rank &)> &run) {
    std::vector<int> ids, codes;
    for (int rank = 0; rank < ranks; rank++) {
        const int id = fork();
        if (!id) {
            {
                Rank self(rank, ranks);
                run(self);
            }
            std::exit(0);
        }
        ids.push_back(id);
    }
    for (const int id : ids) {
        int status;
        waitpid(id, &status, 0);
        codes.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : -1);
    }
    return codes;
}

int main(int, char **arguments) {
    const std::string name = arguments[1];
    const int ranks = std::atoi(arguments[2]);
    Id id;
    EQUAL(ncclGetUniqueId(&id), 0);
    const auto in_a_ring = [&](Rank &self) {
        EQUAL(self.init(id), 0);
        ring(self);
    };
    const auto broken_with = [&](int wanted) {
        return [=](Rank &self) {
            EQUAL(self.init(id), 0);
            broken(self, wanted);
        };
    };
    if (name == "threads") threads(ranks, in_a_ring);
    if (name == "processes") for (const int code : processes(ranks, in_a_ring)) EQUAL(code, 0);
    if (name == "hang") threads(ranks, broken_with(0));
    if (name == "error") threads(ranks, [&](Rank &self) { broken_with(self.rank == 1 ? 6 : 0)(self); });
    // Rank 1 ends at its second group; the others see it.
    if (name == "death") {
        const std::vector<int> codes = processes(ranks, broken_with(6));
        for (int rank = 0; rank < ranks; rank++) EQUAL(codes[size_t(rank)], rank == 1 ? 9 : 0);
    }
    if (name == "init-fails")
        threads(ranks, [&](Rank &self) {
            // The others wait for it.
            EQUAL(self.init(id, 3000), self.rank == 1 ? 2 : IN_PROGRESS);
            EQUAL(ncclCommAbort(self.communicator), 0);
        });
    if (name == "init-hangs")
        threads(ranks, [&](Rank &self) {
            EQUAL(self.init(id, 300), IN_PROGRESS);
            EQUAL(ncclCommAbort(self.communicator), 0);
        });
    if (name == "one-device")
        threads(ranks, [&](Rank &self) {
            EQUAL(self.init(id), 5);
            EQUAL(ncclCommAbort(self.communicator), 0);
        }, true);
    if (name == "refused")
        threads(ranks, [&](Rank &self) {
            const u64 memory = self.memory(64);
            EQUAL(self.init(id), 0);
            // While a group is not in its stream yet, there can be no other.
            EQUAL(ncclGroupStart(), 0);
            EQUAL(ncclSend((void *)memory, 8, 0, self.right(), self.communicator, self.stream), 0);
            EQUAL(ncclRecv((void *)(memory + 8), 8, 0, self.left(), self.communicator, self.stream), 0);
            EQUAL(ncclSend((void *)memory, 8, 0, self.rank, self.communicator, self.stream), 4);
            EQUAL(ncclGroupEnd(), IN_PROGRESS);
            EQUAL(ncclGroupStart(), 0);
            EQUAL(ncclSend((void *)memory, 8, 0, self.right(), self.communicator, self.stream), 4);
            EQUAL(ncclGroupEnd(), 0);
            EQUAL(self.settled(), 0);
            self.leave();
            EQUAL(cuMemFree_v2(memory), 0);
        });
    // Misuse: each ends the process.
    if (name == "no-memory")
        threads(ranks, [&](Rank &self) {
            EQUAL(self.init(id), 0);
            self.post(self.memory(50), self.memory(50), BYTES);
        });
    if (name == "other-size")
        threads(ranks, [&](Rank &self) {
            EQUAL(self.init(id), 0);
            self.post(self.memory(BYTES), self.memory(BYTES), BYTES - size_t(self.rank));
            for (;;) nap();
        });
    if (name == "used-after-abort")
        threads(ranks, [&](Rank &self) {
            EQUAL(self.init(id), 0);
            EQUAL(ncclCommAbort(self.communicator), 0);
            self.state();
        });
    if (name == "left") threads(ranks, [&](Rank &self) { EQUAL(self.init(id), 0); });
    return 0;
}
