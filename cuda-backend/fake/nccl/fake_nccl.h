// The fake NCCL: declarations for its parts.
//
// It is stricter than NVIDIA's library where that promises little: the operations of a group reach their stream after a random time,
// a message moves only when both sides have reached it, and new communicators are in progress for a while. Misuse by the host ends
// the process with a message.
#pragma once
#include "settings.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace fake {

typedef unsigned long long u64;

// ncclResult_t
enum Code : int {
    SUCCESS = 0,
    UNHANDLED_CUDA_ERROR = 1,
    SYSTEM_ERROR = 2,
    INTERNAL_ERROR = 3,
    INVALID_ARGUMENT = 4,
    INVALID_USAGE = 5,
    REMOTE_ERROR = 6,
    IN_PROGRESS = 7,
};

// The settings in KYKLOS_FAKE_NCCL, as `name=number,…`.
struct Config {
    u64 seed = 1;
    u64 version = 22105;
    u64 delay_us = 300;     // longest time before a communicator is ready, and before a group reaches its stream
    u64 report = 0;         // print counts at exit
    // Faults of one rank of each communicator. Groups of sends and receives count from 1; 0: never.
    u64 fault_rank = 0;
    u64 faulty_communicators = 0;  // how many communicators of that rank have them in a process; 0: all
    u64 code = INTERNAL_ERROR;  // of the faults
    u64 id_fails = 0;       // ncclGetUniqueId fails
    u64 init_fails = 0;     // the communicator fails while it is made; those of the other ranks are never ready
    u64 init_hangs = 0;     // the communicator is never ready, on no rank
    u64 use_at = 0;         // the communicator reports an error while a group is put together, and refuses the rest of it
    u64 refuse_at = 0;      // the end of a group fails at once
    u64 launch_fails_at = 0;  // a group fails before it reaches its stream
    u64 async_at = 0;       // a group in its stream never ends, and the communicator reports an error
    u64 hang_at = 0;        // a group in its stream never ends
    u64 slow_at = 0, slow_ms = 0;  // a group takes this much longer
    u64 die_at = 0;         // the process ends
    u64 finalize_hangs = 0;  // ncclCommFinalize stays in progress
    // Of all ranks.
    u64 sees_death = 0;     // communicators report an error when the process of another rank has ended
    u64 abort_ms = 0;       // ncclCommAbort takes this long
    u64 move_ms = 0;        // every group takes this much longer once it is in its stream
    u64 launch_ms = 0;      // every group takes this much longer to reach its stream
};
const Config &config();

// Ends the process with a message: the host broke a rule of the API.
[[noreturn]] void die(const char *format, ...) __attribute__((format(printf, 1, 2)));

const int MAX_RANKS = 16;

// ncclUniqueId
struct UniqueId {
    char bytes[128];
};

// The messages from one rank to another, in memory that all processes share. Messages and bytes count over the life of the
// communicator.
struct Mailbox {
    static const u64 CAPACITY = 16 * 1024;
    std::atomic<u64> sends, send_bytes;  // messages whose send has begun; the bytes of the last one
    std::atomic<u64> recvs, recv_bytes;  // the same of receives
    std::atomic<u64> written, read;      // bytes put in and taken out
    unsigned char data[CAPACITY];
};

// The memory that the ranks of a communicator share.
struct Board {
    std::atomic<int> ranks;  // 0 until the first rank is here
    std::atomic<int> present;
    std::atomic<int> ready;  // ranks that have made their end; a rank that fails or hangs never has
    struct {
        std::atomic<int> process;  // 0 until the rank is here
        std::atomic<int> device;
    } rank[MAX_RANKS];
    Mailbox from_to[MAX_RANKS][MAX_RANKS];
};

struct Communicator {
    std::string path;  // of the file with the board
    Board *board = nullptr;
    int rank = 0, ranks = 0, device = 0;
    bool blocking = true;
    bool is_faulty = false;
    std::atomic<int> state{IN_PROGRESS};  // what ncclCommGetAsyncError reports
    std::atomic<bool> aborted{false}, finalized{false};
    std::atomic<int> entered{0};          // calls of the host that have not returned
    std::atomic<int> outstanding{0};      // groups that are not complete
    std::atomic<int> launching{0};        // groups that are not in their stream yet
    std::atomic<int> running{0};          // groups that a stream runs now
    u64 groups = 0, sent[MAX_RANKS] = {}, received[MAX_RANKS] = {};
    ~Communicator();

    // Whether this is the group at which a fault is due.
    bool is_due(u64 at, u64 group) const { return is_faulty && at && at == group; }
    void fail(int code, const char *text);
    // Whether a peer's process has ended.
    bool has_lost_a_peer() const;
};

// One send or receive of a group.
struct Transfer {
    bool is_send;
    u64 address, bytes;
    int peer;
    u64 number = 0, moved = 0;  // which message to or from this peer, from 1 on; bytes
    bool begun = false, complete = false;
};

struct Group {
    std::shared_ptr<Communicator> communicator;
    void *stream = nullptr;
    std::vector<Transfer> transfers;
    u64 number = 0;
};

// Opens the board of a name and takes the place of a rank. Returns an error, or begins to wait for the other ranks.
int join(const std::shared_ptr<Communicator> &communicator, const UniqueId &id);
// Brings a group into its stream, now or soon. Returns an error or whether it is in progress.
int launch(Group group);
void sleep_us(u64 us);
u64 random_below(u64 below);
// Counts for the report at exit.
extern std::atomic<u64> groups_run, bytes_moved, aborts;
// Of the last error of any communicator.
extern std::atomic<const char *> last_error;

}  // namespace fake

// Functions of the fake driver.
extern "C" int kyklos_fake_current_device();
extern "C" int kyklos_fake_enqueue(void *stream, void (*run)(void *), void *data);
extern "C" bool kyklos_fake_has_memory(int ordinal, unsigned long long address, unsigned long long bytes);
extern "C" int cuCtxGetCurrent(void **context);
extern "C" int cuCtxPushCurrent_v2(void *context);
extern "C" int cuCtxPopCurrent_v2(void **context);
