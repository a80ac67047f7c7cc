// Common to the kernels for Hopper: tiles that TMA writes into shared memory and wgmma multiplies there.
#pragma once
#include "ptx_hopper.h"
#include "rows.h"

// The wgmma descriptor of a matrix in rows of 128 bytes, swizzled by TMA. Eight rows are 1024 bytes.
DEVICE u64 matrix_at(u32 address, u32 chunk) {
    return u64((address & 0x3ffff) >> 4) | u64(chunk >> 4) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62;
}

// Arrives at `phase` when all lanes of this warp have read or written.
DEVICE void release(u32 phase) {
    warp_sync();
    if (thread_x() % 32 == 0) phase_arrive(phase);
}

// The address of this lane's pair of the `j`-th 8 elements of a row, in a tile whose chunks of 64 elements are `chunk` bytes apart.
DEVICE u32 pair_in(u32 tile, u32 chunk, u32 row, u32 j) {
    return tile + j / 8 * chunk + row * 128 + ((j ^ row) & 7) * 16 + thread_x() % 4 * 4;
}

// Whether `bytes` of shared memory have a NaN or an infinity; the same for the whole warpgroup, whose named barrier `own` is.
template <typename Mine> DEVICE bool odd_in(u32 from, u32 bytes, u32 own) {
    bool odd = false;
    for (u32 at = thread_x() % 128 * 4; at < bytes; at += 512) odd |= Mine::odd_pair(load_shared(from + at));
    return warp_uniform(named_or(own, 128, odd));
}

// Replaces NaN and infinities in `bytes` of shared memory by zeros. `consumers` warpgroups call this for the same memory, of which
// this is number `consumer`. Each clears a part, after all have read it; their named barrier is `all`.
template <typename Mine> DEVICE void clear_odd(u32 from, u32 bytes, u32 consumer, u32 consumers, u32 all) {
    named_sync(all, 128 * consumers);
    for (u32 at = consumer * 512 + thread_x() % 128 * 4; at < bytes; at += 512 * consumers) {
        const u32 pair = load_shared(from + at);
        const u32 low = Mine::odd(u16(pair)) ? 0 : 0xffffu, high = Mine::odd(u16(pair >> 16)) ? 0 : 0xffff0000u;
        store_shared(from + at, pair & (low | high));
    }
    stores_are_there();
    named_sync(all, 128 * consumers);
}
