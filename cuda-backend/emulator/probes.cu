// Kernels of a few instructions each, for tests that compare the emulator with the definitions of the ISA.
#include "ptx_hopper.h"

struct ProbeArguments {
    const u32 *in;
    u32 *out;
    u32 option;
};

// Copies 512 bytes to shared memory (rows of four 8 x 8 matrices) and returns each lane's registers of ldmatrix.
// Option: 0 plain, 1 transposed.
KERNEL(probe_matrices, ProbeArguments, 32) {
    copy_async(shared_base() + thread_x() * 16, args.in + thread_x() * 4, true);
    copy_async_commit();
    copy_async_wait<0>();
    warp_sync();
    u32 r[4];
    if (args.option)
        load_matrices_transposed(r, shared_base() + thread_x() * 16);
    else
        load_matrices(r, shared_base() + thread_x() * 16);
    for (u32 i = 0; i < 4; i++) args.out[thread_x() * 4 + i] = r[i];
}

// in: a[32][4], b[32][2], c[32][4], each by lane. Option: 0 bf16, 1 f16.
KERNEL(probe_multiply, ProbeArguments, 32) {
    u32 a[4];
    float c[4];
    const u32 *in = args.in, lane = thread_x();
    for (u32 i = 0; i < 4; i++) a[i] = in[lane * 4 + i];
    for (u32 i = 0; i < 4; i++) c[i] = reinterpret_cast<const float *>(in)[192 + lane * 4 + i];
    if (args.option)
        F16::multiply(c, a, in[128 + lane * 2], in[128 + lane * 2 + 1]);
    else
        Bf16::multiply(c, a, in[128 + lane * 2], in[128 + lane * 2 + 1]);
    for (u32 i = 0; i < 4; i++) reinterpret_cast<float *>(args.out)[lane * 4 + i] = c[i];
}

// in: pairs of f32. out: the pairs packed to 16 bits, bf16 then f16.
KERNEL(probe_pack, ProbeArguments, 32) {
    const float *in = reinterpret_cast<const float *>(args.in) + thread_x() * 2;
    args.out[thread_x() * 2] = Bf16::pack(in[0], in[1]);
    args.out[thread_x() * 2 + 1] = F16::pack(in[0], in[1]);
}

// Executes ldmatrix on rows that are `option` bytes apart, to count passes.
KERNEL(probe_banks, ProbeArguments, 32) {
    u32 r[4];
    load_matrices(r, shared_base() + thread_x() % 8 * args.option);
    if (thread_x() == 0) args.out[0] = r[0];
}

// Two groups of copies. out: shared memory before and after each wait.
KERNEL(probe_copies, ProbeArguments, 32) {
    const u32 at = shared_base() + thread_x() * 32;
    copy_async(at, args.in + thread_x() * 8, true);
    copy_async_commit();
    copy_async(at + 16, args.in + thread_x() * 8 + 4, true);
    copy_async_commit();
    args.out[thread_x() * 4] = load_shared(at);
    copy_async_wait<1>();
    args.out[thread_x() * 4 + 1] = load_shared(at);
    args.out[thread_x() * 4 + 2] = load_shared(at + 16);
    copy_async_wait<0>();
    args.out[thread_x() * 4 + 3] = load_shared(at + 16);
}

// Faults of a kernel. Option: 0 none, 1 a warp skips a barrier, 2 lanes execute different instructions, 3 a lane skips a
// shuffle, 4 no wait for a copy, 5 an address outside of shared memory, 6 a misaligned address, 7 a write behind a buffer.
KERNEL(probe_fault, ProbeArguments, 64) {
    const u32 lane = thread_x() % 32;
    if (args.option != 1 || thread_x() < 32) barrier_or(false);
    if (args.option == 2 && lane == 3)
        vote(true);
    else if (args.option != 3 || lane != 7)
        shuffle_xor(1.0f, 1);
    copy_async(shared_base() + (args.option == 5 ? 4096 : thread_x() * 16) + (args.option == 6 ? 4 : 0), args.in, true);
    copy_async_commit();
    if (args.option != 4) copy_async_wait<0>();
    args.out[args.option == 7 ? 2048 : 0] = 1;
}

// Hopper.

struct BoxProbe {
    TensorMap map;
    u32 *out;
    i32 at[4];
    u32 bytes, reserved;
};

// Copies one box. out: the first word of shared memory before the wait, then the bytes of the box.
KERNEL(probe_box, BoxProbe, 32) {
    const u32 box = shared_base(), phase = box + args.bytes;
    if (thread_x() == 0) {
        phase_init(phase, 1);
        phases_are_there();
    }
    barrier_or(false);
    // For a new mbarrier, the phase before the first one counts as complete.
    phase_wait(phase, 1);
    if (elect_one()) {
        phase_arrive_expecting(phase, args.bytes);
        copy_box(box, args.map, phase, args.at[0], args.at[1], args.at[2], args.at[3]);
        args.out[0] = load_shared(box);
    }
    phase_wait(phase, 0);
    for (u32 n = thread_x(); n < args.bytes / 4; n += 32) args.out[1 + n] = load_shared(box + n * 4);
}

// c (64 x 128) = or += a (64 x 16) · b (16 x 128). in: shared memory from a on, then registers of a [128][4], then c [128][64].
// Option: bit 0 f16, bit 1 a in registers and b turned, bit 2 `=` instead of `+=`. out: c [128][64], then one accumulator of each
// thread before the wait.
template <typename T> DEVICE void multiply_group(const ProbeArguments &args) {
    const u32 a = shared_base(), b = a + 8192, words = (8192 + 16384) / 4, thread = thread_x();
    for (u32 n = thread; n < words / 4; n += 128) copy_async(a + n * 16, args.in + n * 4, true);
    copy_async_commit();
    copy_async_wait<0>();
    barrier_or(false);
    u32 p[4];
    float c[16][4];
    for (u32 i = 0; i < 4; i++) p[i] = args.in[words + thread * 4 + i];
    for (u32 i = 0; i < 64; i++)
        c[i / 4][i % 4] = reinterpret_cast<const float *>(args.in)[words + 512 + thread * 64 + i];
    // Eight rows are 1024 bytes. In turned b, 64 columns are 2048.
    const u64 swizzle = u64(1) << 62, rows = u64(1024 / 16) << 32;
    wgmma_fence();
    if (args.option & 2)
        Wgmma<T, 128>::registers(c, p, swizzle | rows | u64(2048 / 16) << 16 | b / 16);
    else
        // Elements 16 to 31 of the 64 elements of a row.
        Wgmma<T, 128>::shared(c, swizzle | rows | (a + 32) / 16, swizzle | rows | (b + 32) / 16, !(args.option & 4));
    wgmma_commit();
    reinterpret_cast<float *>(args.out)[8192 + thread] = c[15][3];
    wgmma_wait<0>();
    for (u32 i = 0; i < 64; i++) reinterpret_cast<float *>(args.out)[thread * 64 + i] = c[i / 4][i % 4];
}

KERNEL(probe_wgmma, ProbeArguments, 128) {
    if (args.option & 1)
        multiply_group<F16>(args);
    else
        multiply_group<Bf16>(args);
}

// 32 products on the same accumulators in one group, by the first of eight warpgroups. The random schedule computes a product
// of one of the eight at a time, so some of these are computed while others are issued. All elements are 1.
KERNEL(probe_wgmma_chain, ProbeArguments, 1024) {
    const u32 thread = thread_x();
    // 16 rows of 64 elements.
    if (thread < 512) store_shared(shared_base() + thread * 4, 0x3f803f80);
    stores_are_there();
    barrier_or(false);
    if (thread >= 128) return;
    float c[8][4] = {};
    const u32 p[4] = {0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80};
    wgmma_fence();
    for (u32 n = 0; n < 32; n++) Wgmma<Bf16, 64>::registers(c, p, u64(1) << 62 | u64(1024 / 16) << 32 | shared_base() / 16);
    wgmma_commit();
    reinterpret_cast<float *>(args.out)[4096 + thread] = c[7][3];
    wgmma_wait<0>();
    for (u32 i = 0; i < 32; i++) reinterpret_cast<float *>(args.out)[thread * 32 + i] = c[i / 4][i % 4];
}

// Faults of a kernel. Option: 0 none, 1 one arrival too many, 2 more expected bytes than copied ones, 3 an mbarrier that is not
// initialised, 4 a phase that is never complete, 5 no fence, 6 no wait for a product, 7 a warp skips wgmma, 8 threads stay at a
// named barrier, 9 a named barrier of two sizes, 10 no wait for a box, 11 a misaligned box, 12 a register of a changes while it is
// read, 13 an accumulator changes.
KERNEL(probe_hopper_fault, BoxProbe, 128) {
    const u32 option = args.at[3], phase = shared_base() + 16384, thread = thread_x();
    if (thread == 0) {
        phase_init(phase, 2);
        phases_are_there();
        for (u32 n = 0; n < (option == 1 ? 3 : option == 4 ? 1 : 2); n++) {
            if (n) phase_arrive(option == 3 ? phase + 8 : phase);
            else phase_arrive_expecting(phase, args.bytes + (option == 2 ? 16 : 0));
        }
        copy_box(shared_base() + (option == 11 ? 16 : 0), args.map, phase, 0, 0, 0, 0);
    }
    barrier_or(false);
    if (option != 10) phase_wait(phase, 0);
    if (option == 8 && thread < 32) named_arrive(3, 64);
    if (option == 9) named_sync(3, thread < 32 ? 128 : 96);
    float c[8][4] = {};
    u32 p[4] = {0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80};
    if (option != 5) wgmma_fence();
    if (option != 7 || thread < 96)
        Wgmma<Bf16, 64>::registers(c, p, u64(1) << 62 | u64(1024 / 16) << 32 | shared_base() / 16);
    wgmma_commit();
    if (option == 12) p[thread % 4] = 0;
    if (option == 13) c[0][0] = 1.0f;
    if (option != 6) wgmma_wait<0>();
    reinterpret_cast<float *>(args.out)[thread] = c[0][0];
}
