// Semantics of the instructions.
#include "block.h"

#include <cmath>
#include <cstring>

namespace machine {

u8 *shared_at(u32 address, u32 bytes) {
    const u64 size = block->shared.size();
    if (address < SHARED_BASE || address - SHARED_BASE + bytes > size || address % bytes)
        fault("%u bytes at shared address %u; there are %llu from %u on", bytes, address, size, SHARED_BASE);
    return block->shared.data() + (address - SHARED_BASE);
}

// A warp-wide instruction: each lane gives `in`, the last one to arrive calls `together` for all, and each takes its `out`.
template <typename Together> static const Lane &with_warp(const char *what, const u32 *in, u32 words, Together together) {
    Warp &warp = block->warps[here().thread / 32];
    Lane &lane = warp.lanes[here().thread % 32];
    if (warp.arrived == 0) warp.what = what;
    if (warp.what != what) fault("a lane is at %s while others of its warp are at %s", what, warp.what);
    std::memcpy(lane.in, in, words * 4);
    if (++warp.arrived == 32) {
        together(warp);
        warp.arrived = 0;
        warp.turn++;
        block->may_run(here().thread / 32 * 32, 32);
    } else {
        block->wait(warp.turn, warp.turn, what);
    }
    return lane;
}

// A thread arrives at a barrier. The last one completes it.
static Barrier &arrive(u32 id, u32 threads, bool set) {
    if (id >= 16 || threads % 32 || threads > block->threads) fault("barrier %u for %u threads", id, threads);
    Barrier &barrier = block->barriers[id];
    if (barrier.arrived == 0) barrier.threads = threads;
    if (barrier.threads != threads) fault("barrier %u for %u threads and for %u", id, barrier.threads, threads);
    barrier.gathered |= set;
    if (++barrier.arrived == threads) {
        barrier.result = barrier.gathered;
        barrier.gathered = false;
        barrier.arrived = 0;
        barrier.turn++;
        block->may_run(0, block->threads);
        counting().barriers++;
    }
    return barrier;
}

bool named_or(u32 id, u32 threads, bool set) {
    const u32 turn = block->barriers[id % 16].turn;
    Barrier &barrier = arrive(id, threads, set);
    if (barrier.turn == turn) block->wait(barrier.turn, turn, id ? "a named barrier" : "the block's barrier");
    return barrier.result;
}

void named_arrive(u32 id, u32 threads) { arrive(id, threads, false); }

bool barrier_or(bool set) { return named_or(0, block->threads, set); }

void warp_sync() {
    with_warp("a warp's barrier", nullptr, 0, [](Warp &) {});
}

float shuffle(float value, u32 from_lane) {
    const u32 in[2] = {bits_of(value), from_lane % 32};
    return float_of(with_warp("a shuffle", in, 2, [](Warp &warp) {
        for (Lane &lane : warp.lanes) lane.out[0] = warp.lanes[lane.in[1]].in[0];
    }).out[0]);
}

u32 vote(bool set) {
    const u32 in[1] = {set};
    return with_warp("a vote", in, 1, [](Warp &warp) {
        u32 all = 0;
        for (u32 lane = 0; lane < 32; lane++) all |= warp.lanes[lane].in[0] << lane;
        for (Lane &lane : warp.lanes) lane.out[0] = all;
    }).out[0];
}

void Block::land(Fiber &fiber, u64 index) {
    Copy &copy = fiber.copies[index];
    if (copy.landed) return;
    copy.landed = true;
    u8 *into = shared.data() + (copy.into - SHARED_BASE);
    if (copy.from)
        std::memcpy(into, copy.from, 16);
    else
        std::memset(into, 0, 16);
}

void copy_async(u32 into, const void *from) {
    if (reinterpret_cast<u64>(from) % 16) fault("a copy from %p, which is no multiple of 16", from);
    Fiber &fiber = *block->running;
    // The destination is undefined until the copy is complete.
    std::memset(shared_at(into, 16), 0xff, 16);
    fiber.copies.push_back({into, from, fiber.committed, false});
    counting().copies++;
    if (block->timing == Timing::Eager) block->land(fiber, fiber.copies.size() - 1);
}

void copy_async_commit() { block->running->committed++; }

void copy_async_wait(u32 later) {
    Fiber &fiber = *block->running;
    for (u64 i = fiber.copies.size(); i-- > 0;) {
        const Copy &copy = fiber.copies[i];
        if (copy.group < fiber.committed && copy.group + later < fiber.committed) {
            block->land(fiber, i);
            fiber.copies.erase(fiber.copies.begin() + i);
        }
    }
}

// Passes for reading 8 rows of 16 bytes: all banks together give 128 bytes per pass, one eighth for each row.
static u32 passes(const Warp &warp, u32 matrix) {
    u32 most = 0;
    for (u32 eighth = 0; eighth < 8; eighth++) {
        u32 rows[8], distinct = 0;
        for (u32 r = 0; r < 8; r++) {
            const u32 address = warp.lanes[8 * matrix + r].in[0];
            bool known = address / 16 % 8 != eighth;
            for (u32 i = 0; i < distinct; i++) known |= rows[i] == address;
            if (!known) rows[distinct++] = address;
        }
        most = distinct > most ? distinct : most;
    }
    return most;
}

void load_matrices(u32 (&r)[4], u32 row, bool transposed) {
    shared_at(row, 16);
    const auto load = [transposed](Warp &warp) {
        for (u32 matrix = 0; matrix < 4; matrix++) {
            u16 rows[8][8];
            for (u32 r = 0; r < 8; r++) std::memcpy(rows[r], shared_at(warp.lanes[8 * matrix + r].in[0], 16), 16);
            for (u32 lane = 0; lane < 32; lane++) {
                const u32 y = lane / 4, x = lane % 4 * 2;
                warp.lanes[lane].out[matrix] = transposed ? rows[x][y] | u32(rows[x + 1][y]) << 16
                                                          : rows[y][x] | u32(rows[y][x + 1]) << 16;
            }
            counting().accesses++;
            counting().passes += passes(warp, matrix);
        }
    };
    const Lane &lane = with_warp(transposed ? "ldmatrix.trans" : "ldmatrix", &row, 1, load);
    std::memcpy(r, lane.out, 16);
}

u32 load_shared(u32 address) {
    u32 word;
    std::memcpy(&word, shared_at(address, 4), 4);
    return word;
}

void load_shared(u32 *words, u32 count, u32 address) { std::memcpy(words, shared_at(address, 4 * count), 4 * count); }

void store_shared(u32 address, u32 word) { std::memcpy(shared_at(address, 4), &word, 4); }

// mma.m16n8k16 from the lanes' registers to the lanes' registers. Products are exact in f32. The ISA leaves the order of sums
// open; this is one of them.
static void multiply_warp(Warp &warp, float (*widen)(u16)) {
    float a[16][16], b[16][8], c[16][8];
    for (u32 lane = 0; lane < 32; lane++) {
        const u32 *in = warp.lanes[lane].in, row = lane / 4, pair = lane % 4 * 2;
        for (u32 e = 0; e < 2; e++) {
            for (u32 i = 0; i < 4; i++) a[row + i % 2 * 8][pair + e + i / 2 * 8] = widen(u16(in[i] >> 16 * e));
            for (u32 i = 0; i < 2; i++) b[pair + e + i * 8][row] = widen(u16(in[4 + i] >> 16 * e));
            for (u32 i = 0; i < 2; i++) c[row + i * 8][pair + e] = float_of(in[6 + 2 * i + e]);
        }
    }
    for (u32 m = 0; m < 16; m++)
        for (u32 k = 0; k < 16; k++)
            for (u32 n = 0; n < 8; n++) c[m][n] += a[m][k] * b[k][n];
    for (u32 lane = 0; lane < 32; lane++)
        for (u32 i = 0; i < 4; i++) warp.lanes[lane].out[i] = bits_of(c[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]);
}

void multiply(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2], float (*widen)(u16)) {
    u32 in[10];
    std::memcpy(in, a, 16);
    std::memcpy(in + 4, b, 8);
    std::memcpy(in + 6, c, 16);
    const Lane &lane = with_warp("mma.m16n8k16", in, 10, [widen](Warp &warp) { multiply_warp(warp, widen); });
    std::memcpy(c, lane.out, 16);
}

float widen_bf16(u16 bits) { return float_of(u32(bits) << 16); }

float widen_f16(u16 bits) {
    const u32 exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float size = exponent == 31  ? float_of(0x7f800000 | fraction << 13)
                       : exponent == 0 ? fraction * 0x1p-24f
                                       : float_of((exponent + 112) << 23 | fraction << 13);
    return bits >> 15 ? -size : size;
}

u16 narrow_bf16(float value) {
    const u32 bits = bits_of(value);
    if (value != value) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

u16 narrow_f16(float value) {
    if (value != value) return 0x7fff;
    const u16 sign = bits_of(value) >> 16 & 0x8000;
    const float size = std::fabs(value);
    if (size >= 65520.0f) return sign | 0x7c00;
    // Numbers below 2^-14 are multiples of 2^-24; larger ones of 2^-10 times their power of two. rint rounds ties to even.
    int exponent = 0;
    std::frexp(size, &exponent);
    const float step = std::ldexp(1.0f, (exponent < -13 ? -13 : exponent) - 11);
    const float rounded = std::rint(size / step) * step;
    if (rounded < 0x1p-14f) return sign | u16(rounded * 0x1p24f);
    return sign | u16((bits_of(rounded) >> 13) - (112 << 10));
}

}  // namespace machine
