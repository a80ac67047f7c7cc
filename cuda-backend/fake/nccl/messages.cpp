// Making communicators, and moving messages between their ranks.
#include "fake_nccl.h"

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <mutex>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>

namespace fake {

std::atomic<u64> groups_run, bytes_moved, aborts;
std::atomic<const char *> last_error{""};

void sleep_us(u64 us) { std::this_thread::sleep_for(std::chrono::microseconds(us)); }

u64 random_below(u64 below) {
    static std::mutex lock;
    static u64 random = config().seed * 1000 + u64(getpid());
    std::lock_guard<std::mutex> held(lock);
    return below ? chance(random, below) : 0;
}

Communicator::~Communicator() {
    if (board) munmap(board, sizeof *board);
}

void Communicator::fail(int code, const char *text) {
    last_error = text;
    state = code;
}

// Whether a process has ended. Its parent may not have noticed yet.
static bool has_ended(int process) {
    if (kill(process, 0) && errno == ESRCH) return true;
    char text[256] = "";
    std::snprintf(text, sizeof text, "/proc/%d/stat", process);
    std::FILE *file = std::fopen(text, "r");
    if (!file) return true;
    const size_t bytes = std::fread(text, 1, sizeof text - 1, file);
    std::fclose(file);
    text[bytes] = 0;
    const char *state = std::strrchr(text, ')');
    return state && state[1] == ' ' && state[2] == 'Z';
}

bool Communicator::has_lost_a_peer() const {
    for (int other = 0; other < ranks; other++) {
        const int process = board->rank[other].process;
        if (process && has_ended(process)) return true;
    }
    return false;
}

// --- making a communicator --------------------------------------------------------------------------------------------

// NCCL refuses two ranks on one device, unless it is told otherwise.
static bool shares_a_device(const Board &board, int ranks) {
    const char *allowed = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    if (allowed && !std::strcmp(allowed, "1")) return false;
    for (int one = 0; one < ranks; one++)
        for (int other = 0; other < one; other++)
            if (board.rank[one].device == board.rank[other].device) return true;
    return false;
}

static void wait_for_ranks(Communicator &communicator) {
    sleep_us(random_below(config().delay_us + 1));
    const auto until = [&](const auto &holds) {
        while (!holds()) {
            if (communicator.aborted) return false;
            sleep_us(100);
        }
        return true;
    };
    const bool hangs = communicator.is_faulty && config().init_hangs;
    if (!until([&] { return !hangs && communicator.board->present >= communicator.ranks; })) return;
    unlink(communicator.path.c_str());
    if (communicator.is_faulty && config().init_fails)
        return communicator.fail(int(config().code), "told to fail during the initialisation");
    if (shares_a_device(*communicator.board, communicator.ranks))
        return communicator.fail(INVALID_USAGE, "Duplicate GPU detected");
    communicator.board->ready++;
    if (!until([&] { return communicator.board->ready >= communicator.ranks; })) return;
    communicator.state = SUCCESS;
}

int join(const std::shared_ptr<Communicator> &communicator, const UniqueId &id) {
    Communicator &self = *communicator;
    if (std::strncmp(id.bytes, "kyklos-fake-nccl-", 17)) return INVALID_ARGUMENT;
    self.path = std::string("/dev/shm/") + std::string(id.bytes, strnlen(id.bytes, sizeof id.bytes));
    const int file = open(self.path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0) return SYSTEM_ERROR;
    void *board = MAP_FAILED;
    // A new file is all zeros. Every rank gives it the same size.
    if (!ftruncate(file, sizeof(Board))) board = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (board == MAP_FAILED) return SYSTEM_ERROR;
    self.board = static_cast<Board *>(board);
    int none = 0;
    if (!self.board->ranks.compare_exchange_strong(none, self.ranks) && none != self.ranks) return INVALID_ARGUMENT;
    none = 0;
    self.board->rank[self.rank].device = self.device;
    if (!self.board->rank[self.rank].process.compare_exchange_strong(none, getpid())) return INVALID_USAGE;
    self.board->present++;
    const auto wait = [communicator] { wait_for_ranks(*communicator); };
    if (self.blocking) {
        wait();
        return self.state;
    }
    std::thread(wait).detach();
    return IN_PROGRESS;
}

// --- moving messages --------------------------------------------------------------------------------------------------

// Moves what can be moved now. Returns whether anything has changed.
static bool advance(const Communicator &self, Transfer &transfer) {
    const int from = transfer.is_send ? self.rank : transfer.peer, to = transfer.is_send ? transfer.peer : self.rank;
    Mailbox &box = self.board->from_to[from][to];
    std::atomic<u64> &mine = transfer.is_send ? box.sends : box.recvs, &theirs = transfer.is_send ? box.recvs : box.sends;
    std::atomic<u64> &my_bytes = transfer.is_send ? box.send_bytes : box.recv_bytes;
    std::atomic<u64> &their_bytes = transfer.is_send ? box.recv_bytes : box.send_bytes;
    if (!transfer.begun) {
        // The message before this one, in the same group, must be complete.
        if (mine != transfer.number - 1) die("rank %d begins message %llu with rank %d out of order", self.rank, transfer.number, transfer.peer);
        my_bytes = transfer.bytes;
        mine = transfer.number;
        transfer.begun = true;
        return true;
    }
    if (theirs < transfer.number) return false;
    if (!transfer.moved && their_bytes != transfer.bytes)
        die("message %llu from rank %d to rank %d: %llu bytes on rank %d, %llu bytes on the other", transfer.number, from, to,
            transfer.bytes, self.rank, their_bytes.load());
    if (transfer.moved == transfer.bytes) {
        // A send is complete when the receiver has all bytes.
        transfer.complete = box.read == box.written;
        return transfer.complete;
    }
    const u64 ready = transfer.is_send ? Mailbox::CAPACITY - (box.written - box.read) : box.written - box.read;
    const u64 left = transfer.bytes - transfer.moved, at = (transfer.is_send ? box.written : box.read) % Mailbox::CAPACITY;
    const u64 most = left < ready ? left : ready, bytes = most < Mailbox::CAPACITY - at ? most : Mailbox::CAPACITY - at;
    if (!bytes) return false;
    if (!kyklos_fake_has_memory(self.device, transfer.address + transfer.moved, bytes))
        die("a message meets memory that is not on device %d", self.device);
    unsigned char *memory = reinterpret_cast<unsigned char *>(transfer.address + transfer.moved);
    if (transfer.is_send) {
        std::memcpy(box.data + at, memory, bytes);
        box.written += bytes;
    } else {
        std::memcpy(memory, box.data + at, bytes);
        box.read += bytes;
        bytes_moved += bytes;
    }
    transfer.moved += bytes;
    return true;
}

// Whether transfer `index` is the first with its peer, in its direction, that is not done. Messages keep their order.
static bool is_next(const std::vector<Transfer> &all, size_t index) {
    for (size_t before = 0; before < index; before++)
        if (all[before].is_send == all[index].is_send && all[before].peer == all[index].peer && !all[before].complete)
            return false;
    return true;
}

static void run(Group &group) {
    Communicator &self = *group.communicator;
    const auto due = [&](u64 at) { return self.is_due(at, group.number); };
    if (due(config().async_at)) self.fail(int(config().code), "told to fail");
    sleep_us(config().move_ms * 1000);
    if (due(config().slow_at)) sleep_us(config().slow_ms * 1000);
    u64 idle = 0;
    while (!self.aborted) {
        bool progress = false, done = !due(config().hang_at) && !due(config().async_at);
        for (size_t index = 0; index < group.transfers.size() && done; index++) {
            Transfer &transfer = group.transfers[index];
            if (!transfer.complete && is_next(group.transfers, index)) progress |= advance(self, transfer);
        }
        for (const Transfer &transfer : group.transfers) done &= transfer.complete;
        if (done) break;
        if (progress) {
            idle = 0;
            continue;
        }
        sleep_us(50);
        // Every 5 ms or so.
        if (++idle % 100 == 0 && config().sees_death && self.has_lost_a_peer())
            self.fail(REMOTE_ERROR, "the connection to another rank was closed");
    }
    groups_run++;
}

static void run_in_stream(void *data) {
    const std::unique_ptr<Group> group(static_cast<Group *>(data));
    Communicator &self = *group->communicator;
    self.running++;
    if (!self.aborted) run(*group);
    self.running--;
    self.outstanding--;
}

int launch(Group group) {
    Communicator &self = *group.communicator;
    const auto due = [&](u64 at) { return self.is_due(at, group.number); };
    if (due(config().die_at)) {
        std::fprintf(stderr, "fake NCCL: rank %d was told to die\n", self.rank);
        _exit(9);
    }
    if (due(config().refuse_at)) {
        self.fail(int(config().code), "told to fail at the end of a group");
        return int(config().code);
    }
    // A communicator that has failed launches no group, and keeps its error.
    int state = SUCCESS;
    if (!self.state.compare_exchange_strong(state, IN_PROGRESS)) return self.blocking ? state : IN_PROGRESS;
    for (Transfer &transfer : group.transfers)
        transfer.number = ++(transfer.is_send ? self.sent : self.received)[transfer.peer];
    void *context = nullptr;
    cuCtxGetCurrent(&context);
    self.outstanding++;
    self.launching++;
    const bool fails = due(config().launch_fails_at);
    const auto queue = [group, context, fails] {
        Communicator &self = *group.communicator;
        if (!self.blocking) sleep_us(config().launch_ms * 1000 + random_below(config().delay_us + 1));
        struct Launched {
            Communicator &self;
            ~Launched() { self.launching--; }
        } launched{self};
        if (fails || self.aborted) {
            self.outstanding--;
            return self.fail(int(config().code), "told to fail before a group is in its stream");
        }
        void *popped;
        cuCtxPushCurrent_v2(context);
        const int failed = kyklos_fake_enqueue(group.stream, run_in_stream, new Group(group));
        cuCtxPopCurrent_v2(&popped);
        if (failed) return self.fail(UNHANDLED_CUDA_ERROR, "the driver refused an operation");
        // Unless the group has failed already.
        int in_progress = IN_PROGRESS;
        self.state.compare_exchange_strong(in_progress, SUCCESS);
    };
    if (self.blocking) {
        queue();
        return self.state;
    }
    std::thread(queue).detach();
    return IN_PROGRESS;
}

}  // namespace fake
