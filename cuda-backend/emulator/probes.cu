// Kernels of a few instructions each, so that tests can hold the emulator to the ISA's definitions. One warp or two.
#include "ptx.h"

struct ProbeArguments {
    const u32 *in;
    u32 *out;
    u32 option;
};

// Copies 512 bytes to shared memory (rows of four 8 x 8 matrices) and gives each lane's registers of ldmatrix.
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

// in: a[32][4], b[32][2], c[32][4] as lanes hold them. Option: 0 bf16, 1 f16.
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

// in: pairs of f32. out: their packed halves, bf16 then f16.
KERNEL(probe_pack, ProbeArguments, 32) {
    const float *in = reinterpret_cast<const float *>(args.in) + thread_x() * 2;
    args.out[thread_x() * 2] = Bf16::pack(in[0], in[1]);
    args.out[thread_x() * 2 + 1] = F16::pack(in[0], in[1]);
}

// Reads rows of ldmatrix that are `option` bytes apart, for the count of passes.
KERNEL(probe_banks, ProbeArguments, 32) {
    u32 r[4];
    load_matrices(r, shared_base() + thread_x() % 8 * args.option);
    if (thread_x() == 0) args.out[0] = r[0];
}

// Two groups of copies; what is in shared memory before and after each wait.
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

// What a wrong kernel does. Option: 0 nothing wrong, 1 a warp skips a barrier, 2 lanes execute different instructions,
// 3 a lane skips a shuffle, 4 a copy is left behind, 5 an address outside of shared memory, 6 one that is not aligned,
// 7 a write behind a buffer.
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
