// The instructions of Hopper (sm_90a), for nvcc and NVRTC. `emulator/ptx_hopper.h` has the same names for a CPU.
#pragma once
#include "ptx.h"

// An mbarrier, 8 bytes in shared memory. A phase is complete when `count` arrivals were made and all expected bytes were copied.
// Phases have parity 0, 1, 0 and so on. A wait for a parity returns when the phase of that parity is complete.
DEVICE void phase_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// Makes initialised mbarriers visible to TMA. Call it before the block's barrier.
DEVICE void phases_are_there() {
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}
DEVICE void phase_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
DEVICE void phase_arrive_expecting(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void phase_wait(u32 barrier, u32 parity) {
    asm volatile("{\n.reg .pred over;\nagain: mbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n"
                 "@!over bra again;\n}" ::"r"(barrier), "r"(parity) : "memory");
}

// Copies a box of a tensor to shared memory, from element (x, y, z, w) on, with zeros outside of the tensor. Its bytes count for
// those that `barrier` expects.
DEVICE void copy_box(u32 into, const TensorMap &map, u32 barrier, i32 x, i32 y, i32 z, i32 w) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];"
                 ::"r"(into), "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

// Named barriers 1 to 15 of the block, for some of its threads. `threads` is the sum of those that arrive and those that wait.
DEVICE void named_sync(u32 id, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
DEVICE void named_arrive(u32 id, u32 threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
DEVICE bool named_or(u32 id, u32 threads, bool set) {
    u32 any;
    asm volatile("{\n.reg .pred mine, any;\nsetp.ne.u32 mine, %3, 0;\nbar.red.or.pred any, %1, %2, mine;\n"
                 "selp.u32 %0, 1, 0, any;\n}" : "=r"(any) : "r"(id), "r"(threads), "r"(u32(set)) : "memory");
    return any;
}

// The value of lane 0, for branches that are uniform in a warp.
DEVICE u32 warp_uniform(u32 value) { return __shfl_sync(~0u, value, 0); }
// True in one lane of the warp.
DEVICE bool elect_one() {
    u32 elected;
    asm volatile("{\n.reg .pred mine;\nelect.sync _|mine, 0xffffffff;\nselp.u32 %0, 1, 0, mine;\n}" : "=r"(elected));
    return elected;
}

// Sets the registers per thread of this warpgroup to `count`: releases registers to the block's pool, or takes them from it.
template <u32 count> DEVICE void registers_fewer() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}
template <u32 count> DEVICE void registers_more() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count)); }

// Makes this thread's stores to shared memory visible to wgmma and TMA. Call it before the barrier between both.
DEVICE void stores_are_there() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// wgmma may read and write its registers at any time between the fence before it and the wait for its group.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most `later` groups are incomplete.
template <int later> DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(later) : "memory");
}
// What follows is not before the computation of `x`, which must be above -2. ptxas moves a wait up as far as it can: without this, above
// the softmax that should overlap with the products.
DEVICE void not_before(float x) {
    asm volatile("{\n.reg .pred never;\nsetp.lt.f32 never, %0, 0fC0000000;\n@never nanosleep.u32 1;\n}" ::"f"(x) : "memory");
}
// Tells the compiler that these registers change here. It does not know that wgmma reads and writes them between its fence and the
// wait, and might compute them later, or use them earlier.
template <int rows> DEVICE void settle(float (&c)[rows][4]) {
    UNROLL for (int j = 0; j < rows; j++)
        UNROLL for (int i = 0; i < 4; i++) asm volatile("" : "+f"(c[j][i])::"memory");
}
template <int rows> DEVICE void settle(u32 (&a)[rows][4]) {
    UNROLL for (int j = 0; j < rows; j++)
        UNROLL for (int i = 0; i < 4; i++) asm volatile("" : "+r"(a[j][i])::"memory");
}

// c (64 x N, of a warpgroup) = or += a (64 x 16) · b (16 x N). Warp w has rows 16 w to 16 w + 15, in fragments of mma.m16n8k16.
// shared: a and b in shared memory; rows of a and columns of b are rows of 128 bytes there. registers: a is in the fragments of
// each warp; rows of b have N columns in shared memory. by_columns: a is in registers, and b as in `shared`.
template <typename T, int N> struct Wgmma;

// Operand lists name each register: those of c, eight at a time.
#define C0 "%0,%1,%2,%3,%4,%5,%6,%7"
#define C8 "%8,%9,%10,%11,%12,%13,%14,%15"
#define C16 "%16,%17,%18,%19,%20,%21,%22,%23"
#define C24 "%24,%25,%26,%27,%28,%29,%30,%31"
#define C32 "%32,%33,%34,%35,%36,%37,%38,%39"
#define C40 "%40,%41,%42,%43,%44,%45,%46,%47"
#define C48 "%48,%49,%50,%51,%52,%53,%54,%55"
#define C56 "%56,%57,%58,%59,%60,%61,%62,%63"
#define C64 "%64,%65,%66,%67,%68,%69,%70,%71"
#define C72 "%72,%73,%74,%75,%76,%77,%78,%79"
#define C80 "%80,%81,%82,%83,%84,%85,%86,%87"
#define C88 "%88,%89,%90,%91,%92,%93,%94,%95"
#define C96 "%96,%97,%98,%99,%100,%101,%102,%103"
#define C104 "%104,%105,%106,%107,%108,%109,%110,%111"
#define C112 "%112,%113,%114,%115,%116,%117,%118,%119"
#define C120 "%120,%121,%122,%123,%124,%125,%126,%127"
#define CR(j) "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3]), "+f"(c[j + 1][0]), "+f"(c[j + 1][1]), \
              "+f"(c[j + 1][2]), "+f"(c[j + 1][3])
#define CS64 C0 "," C8 "," C16 "," C24
#define CRS64 CR(0), CR(2), CR(4), CR(6)
#define CS80 C0 "," C8 "," C16 "," C24 "," C32
#define CRS80 CR(0), CR(2), CR(4), CR(6), CR(8)
#define CS96 C0 "," C8 "," C16 "," C24 "," C32 "," C40
#define CRS96 CR(0), CR(2), CR(4), CR(6), CR(8), CR(10)
#define CS128 C0 "," C8 "," C16 "," C24 "," C32 "," C40 "," C48 "," C56
#define CRS128 CR(0), CR(2), CR(4), CR(6), CR(8), CR(10), CR(12), CR(14)
#define CS176 C0 "," C8 "," C16 "," C24 "," C32 "," C40 "," C48 "," C56 "," C64 "," C72 "," C80
#define CRS176 CR(0), CR(2), CR(4), CR(6), CR(8), CR(10), CR(12), CR(14), CR(16), CR(18), CR(20)
#define CS192 C0 "," C8 "," C16 "," C24 "," C32 "," C40 "," C48 "," C56 "," C64 "," C72 "," C80 "," C88
#define CRS192 CR(0), CR(2), CR(4), CR(6), CR(8), CR(10), CR(12), CR(14), CR(16), CR(18), CR(20), CR(22)
#define CS256 C0 "," C8 "," C16 "," C24 "," C32 "," C40 "," C48 "," C56 "," C64 "," C72 "," C80 "," C88 "," \
    C96 "," C104 "," C112 "," C120
#define CRS256 CR(0), CR(2), CR(4), CR(6), CR(8), CR(10), CR(12), CR(14), CR(16), CR(18), CR(20), CR(22), CR(24), \
    CR(26), CR(28), CR(30)

#define WGMMA_SHARED(type, name, N, a, b, adds) \
    DEVICE static void shared(float (&c)[N / 8][4], u64 left, u64 right, bool add) { \
        asm volatile("{\n.reg .pred sums;\nsetp.ne.b32 sums, " adds ", 0;\n" \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." name "." name " {" CS##N "}, " a ", " b \
                     ", sums, 1, 1, 0, 0;\n}" \
                     : CRS##N : "l"(left), "l"(right), "r"(u32(add)) : "memory"); \
    }
#define WGMMA_REGISTERS(type, name, N, a, b) \
    DEVICE static void registers(float (&c)[N / 8][4], const u32 (&left)[4], u64 right) { \
        asm volatile("{\n.reg .pred sums;\nsetp.ne.b32 sums, 1, 0;\n" \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." name "." name " {" CS##N "}, {" a "}, " b \
                     ", sums, 1, 1, 1;\n}" \
                     : CRS##N : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right) : "memory"); \
    }
#define WGMMA_BY_COLUMNS(type, name, N, a, b, adds) \
    DEVICE static void by_columns(float (&c)[N / 8][4], const u32 (&left)[4], u64 right, bool add) { \
        asm volatile("{\n.reg .pred sums;\nsetp.ne.b32 sums, " adds ", 0;\n" \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." name "." name " {" CS##N "}, {" a "}, " b \
                     ", sums, 1, 1, 0;\n}" \
                     : CRS##N : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right), "r"(u32(add)) : "memory"); \
    }
// For the numbers of columns N that kernels use: keys of a tile, elements of a head, or both.
#define WGMMA_TYPE(type, name) \
    template <> struct Wgmma<type, 64> { \
        WGMMA_SHARED(type, name, 64, "%32", "%33", "%34") \
        WGMMA_REGISTERS(type, name, 64, "%32,%33,%34,%35", "%36") \
        WGMMA_BY_COLUMNS(type, name, 64, "%32,%33,%34,%35", "%36", "%37") \
    }; \
    template <> struct Wgmma<type, 80> { WGMMA_SHARED(type, name, 80, "%40", "%41", "%42") }; \
    template <> struct Wgmma<type, 96> { WGMMA_SHARED(type, name, 96, "%48", "%49", "%50") }; \
    template <> struct Wgmma<type, 128> { \
        WGMMA_SHARED(type, name, 128, "%64", "%65", "%66") \
        WGMMA_REGISTERS(type, name, 128, "%64,%65,%66,%67", "%68") \
    }; \
    template <> struct Wgmma<type, 176> { WGMMA_SHARED(type, name, 176, "%88", "%89", "%90") }; \
    template <> struct Wgmma<type, 192> { WGMMA_REGISTERS(type, name, 192, "%96,%97,%98,%99", "%100") }; \
    template <> struct Wgmma<type, 256> { WGMMA_REGISTERS(type, name, 256, "%128,%129,%130,%131", "%132") };

WGMMA_TYPE(Bf16, "bf16")
WGMMA_TYPE(F16, "f16")
