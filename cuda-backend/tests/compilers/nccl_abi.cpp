// What src/nccl/ takes for granted of NCCL, held to its own header by the compiler: scripts/check/nccl.sh.
#include <climits>
#include <cstddef>
#include <type_traits>

#include "nccl.h"

template <typename Declared, typename Used> void same() {
    static_assert(std::is_same<Declared, Used>::value, "another type");
}

static_assert(sizeof(ncclUniqueId) == 128, "UniqueId");
static_assert(sizeof(ncclResult_t) == sizeof(int) && sizeof(ncclDataType_t) == sizeof(int), "enums are ints");
static_assert(ncclSuccess == 0 && ncclInProgress == 7 && ncclInt8 == 0, "codes");
static_assert(NCCL_CONFIG_UNDEF_INT == INT_MIN, "UNDEFINED");
static_assert(sizeof(((ncclUniqueId *)nullptr)->internal) == 128, "an id passed by value is these bytes");

// The first fields of the configuration: `Config` in library.rs, whose own test has the same numbers.
static_assert(offsetof(ncclConfig_t, size) == 0 && offsetof(ncclConfig_t, magic) == 8, "");
static_assert(offsetof(ncclConfig_t, version) == 12 && offsetof(ncclConfig_t, blocking) == 16, "");
static_assert(offsetof(ncclConfig_t, cgaClusterSize) == 20 && offsetof(ncclConfig_t, minCTAs) == 24, "");
static_assert(offsetof(ncclConfig_t, maxCTAs) == 28 && offsetof(ncclConfig_t, netName) == 32, "");
static_assert(offsetof(ncclConfig_t, splitShare) == 40 && sizeof(ncclConfig_t) >= 48, "");

void check() {
    typedef ncclResult_t Code;
    same<decltype(&ncclGetVersion), Code (*)(int *)>();
    same<decltype(&ncclGetUniqueId), Code (*)(ncclUniqueId *)>();
    same<decltype(&ncclGetErrorString), const char *(*)(Code)>();
    same<decltype(&ncclGetLastError), const char *(*)(ncclComm_t)>();
    same<decltype(&ncclCommInitRankConfig), Code (*)(ncclComm_t *, int, ncclUniqueId, int, ncclConfig_t *)>();
    same<decltype(&ncclCommGetAsyncError), Code (*)(ncclComm_t, Code *)>();
    same<decltype(&ncclCommFinalize), Code (*)(ncclComm_t)>();
    same<decltype(&ncclCommDestroy), Code (*)(ncclComm_t)>();
    same<decltype(&ncclCommAbort), Code (*)(ncclComm_t)>();
    same<decltype(&ncclGroupStart), Code (*)()>();
    same<decltype(&ncclGroupEnd), Code (*)()>();
    same<decltype(&ncclSend), Code (*)(const void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t)>();
    same<decltype(&ncclRecv), Code (*)(void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t)>();
    const ncclConfig_t initial = NCCL_CONFIG_INITIALIZER;
    (void)initial;
}
