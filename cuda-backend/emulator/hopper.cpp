// Semantics of the instructions of Hopper: mbarriers, TMA copies of boxes, products of warpgroups.
#include "block.h"

namespace machine {

static Phase &phase_at(u32 barrier) {
    shared_at(barrier, 8);
    const auto found = block->phases.find(barrier);
    if (found == block->phases.end()) fault("no mbarrier was initialised at shared address %u", barrier);
    return found->second;
}

static void turn_if_done(Phase &phase) {
    if (phase.pending || phase.bytes) return;
    phase.pending = phase.count;
    phase.parity ^= 1;
    block->may_run(0, block->threads);
}

void phase_init(u32 barrier, u32 count) {
    shared_at(barrier, 8);
    if (!count || block->phases.count(barrier)) fault("an mbarrier is initialised twice, or for nobody");
    block->phases[barrier] = {count, count, 0, 0};
}

void phase_arrive(u32 barrier, u32 bytes) {
    Phase &phase = phase_at(barrier);
    if (!phase.pending) fault("more arrive at an mbarrier than the %u it waits for", phase.count);
    phase.bytes += bytes;
    phase.pending--;
    turn_if_done(phase);
    // The thread that arrives may be overtaken by the thread that writes next.
    if (!bytes) block->pause();
}

void phase_wait(u32 barrier, u32 parity) {
    Phase &phase = phase_at(barrier);
    // The phase of this parity is complete when the current one has the other parity.
    while (phase.parity == parity) block->wait(phase.parity, parity, "a phase of an mbarrier");
}

static constexpr u32 ELEMENT_BYTES = 2, SWIZZLE_128B = 3;

static const TiledTensor &tensor_of(const TensorMap *map) { return *reinterpret_cast<const TiledTensor *>(map); }

static u32 box_bytes(const TiledTensor &tensor) {
    u32 bytes = ELEMENT_BYTES;
    for (u32 d = 0; d < tensor.rank; d++) bytes *= tensor.box[d];
    return bytes;
}

void copy_box(u32 into, const TensorMap *map, u32 barrier, const i32 *at, u32 rank) {
    const TiledTensor &tensor = tensor_of(map);
    if (tensor.rank != rank) fault("a tensor map of %u dimensions, %u coordinates", tensor.rank, rank);
    if (tensor.swizzle != SWIZZLE_128B || tensor.box[0] * ELEMENT_BYTES != 128)
        fault("a box of rows of %u elements; all here are of 128 bytes, swizzled over 128", tensor.box[0]);
    if (tensor.data % 16 || into % 128) fault("a box from %llu to %u, which are not aligned", tensor.data, into);
    for (u32 d = 0; d < rank; d++)
        if (!tensor.box[d] || tensor.box[d] > 256) fault("a box of %u elements in dimension %u", tensor.box[d], d);
    for (u32 d = 0; d + 1 < rank; d++)
        if (tensor.stride[d] % 16) fault("a stride of %llu bytes in dimension %u", tensor.stride[d], d + 1);
    phase_at(barrier);
    const u32 bytes = box_bytes(tensor);
    shared_at(into, 16);
    shared_at(into + bytes - 16, 16);
    std::memset(block->shared.data() + (into - SHARED_BASE), 0xff, bytes);
    BoxCopy copy{map, into, barrier, {}};
    for (u32 d = 0; d < rank; d++) copy.at[d] = at[d];
    block->boxes.push_back(copy);
    counting().copies++;
    if (block->timing == Timing::Eager) block->land_box(block->boxes.size() - 1);
}

// Swizzled rows of 128 bytes: each of eight rows permutes its 16-byte columns in a different way.
static u32 swizzled(u32 address) { return address ^ (address >> 7 & 7) << 4; }

void Block::land_box(u64 index) {
    const BoxCopy copy = boxes[index];
    boxes.erase(boxes.begin() + index);
    const TiledTensor &tensor = tensor_of(copy.map);
    const u32 bytes = box_bytes(tensor);
    for (u32 row = 0; row < bytes / 128; row++) {
        // The row of the tensor, and whether it is inside of it.
        u64 from = tensor.data;
        bool there = true;
        for (u32 d = 1, rest = row; d < tensor.rank; rest /= tensor.box[d], d++) {
            const i64 at = i64(copy.at[d]) + rest % tensor.box[d];
            there &= at >= 0 && u64(at) < tensor.extent[d];
            from += at * tensor.stride[d - 1];
        }
        for (u32 column = 0; column < tensor.box[0]; column++) {
            const i64 at = i64(copy.at[0]) + column;
            u16 element = 0;
            if (there && at >= 0 && u64(at) < tensor.extent[0])
                std::memcpy(&element, reinterpret_cast<const u8 *>(from) + at * ELEMENT_BYTES, ELEMENT_BYTES);
            std::memcpy(&shared[swizzled(copy.into + row * 128 + column * 2) - SHARED_BASE], &element, ELEMENT_BYTES);
        }
    }
    // Rows outside of the tensor count as copied bytes.
    Phase &phase = phases.at(copy.barrier);
    phase.bytes -= bytes;
    turn_if_done(phase);
}

// The warpgroup of the running thread, for the warpgroup-wide instruction `what`.
static Warpgroup &warpgroup_for(const char *what) {
    if (here().thread / 128 >= block->warpgroups.size()) fault("%s by a warpgroup that is not whole", what);
    Warpgroup &warpgroup = block->warpgroups[here().thread / 128];
    if (warpgroup.arrived == 0) warpgroup.what = what;
    if (warpgroup.what != what)
        fault("a thread is at %s while others of its warpgroup are at %s", what, warpgroup.what);
    return warpgroup;
}

// The last thread to arrive calls `together`.
template <typename Together> static void with_warpgroup(Warpgroup &warpgroup, Together together) {
    if (++warpgroup.arrived == 128) {
        together(warpgroup);
        warpgroup.arrived = 0;
        warpgroup.turn++;
        block->may_run(here().thread / 128 * 128, 128);
    } else {
        block->wait(warpgroup.turn, warpgroup.turn, warpgroup.what);
    }
}

void wgmma_fence() { block->running->fenced = true; }

void wgmma_commit() {
    with_warpgroup(warpgroup_for("wgmma.commit_group"), [](Warpgroup &warpgroup) { warpgroup.committed++; });
}

void wgmma_wait(u32 later) {
    with_warpgroup(warpgroup_for("wgmma.wait_group"), [later](Warpgroup &warpgroup) {
        while (!warpgroup.products.empty() && warpgroup.products[0].group + later < warpgroup.committed)
            block->multiply_next(warpgroup);
    });
    block->running->fenced = false;
}

void wgmma(float *c, u32 n, const u32 *a, u64 a_matrix, u64 b_matrix, bool adds, bool b_turned, float (*widen)(u16)) {
    if (!block->running->fenced) fault("wgmma on registers that no wgmma.fence came after");
    if (n % 8 || n < 8 || n > 256) fault("wgmma of %u columns", n);
    const u32 thread = here().thread % 128;
    Warpgroup &warpgroup = warpgroup_for("wgmma");
    Product &next = warpgroup.next;
    if (warpgroup.arrived == 0) {
        next.n = n;
        next.a_matrix = a_matrix;
        next.b_matrix = b_matrix;
        next.adds = adds;
        next.b_turned = b_turned;
        next.widen = widen;
    }
    if (next.n != n || next.a_matrix != a_matrix || next.b_matrix != b_matrix || next.adds != adds)
        fault("threads of a warpgroup give wgmma different matrices");
    next.c[thread] = c;
    next.a[thread] = a;
    with_warpgroup(warpgroup, [](Warpgroup &warpgroup) {
        Product &next = warpgroup.next;
        next.group = warpgroup.committed;
        bool follows = false;
        for (const Product &product : warpgroup.products) {
            if (product.c[0] != next.c[0]) continue;
            if (product.n != next.n) fault("products of %u and %u columns on the same accumulators", product.n, next.n);
            follows = true;
        }
        next.before.clear();
        // The accumulators are undefined until the wait.
        for (u32 thread = 0; thread < 128; thread++) {
            float *c = next.c[thread];
            if (!follows) next.before.insert(next.before.end(), c, c + next.n / 2);
            std::memset(c, 0xff, next.n / 2 * sizeof(float));
        }
        warpgroup.products.push_back(next);
        counting().products++;
        if (block->timing == Timing::Eager) block->multiply_next(warpgroup);
    });
}

// Eight contiguous elements from (row, k) on, of the matrix of a descriptor. Memory has swizzled rows of 128 bytes. They are along
// k, with a stride between groups of eight rows; or, turned, along the other dimension, with the leading offset between groups of
// 64 elements and the stride between groups of eight k.
static const u16 *eight_of(u64 matrix, u32 row, u32 k, bool turned) {
    const u32 start = (matrix & 0x3fff) << 4, lead = (matrix >> 16 & 0x3fff) << 4, stride = (matrix >> 32 & 0x3fff) << 4;
    if (matrix >> 62 != 1 || matrix >> 49 & 7) fault("a matrix descriptor without swizzling over 128 bytes, or with an offset");
    const u32 at = turned ? start + row / 64 * lead + k / 8 * stride + k % 8 * 128 + row % 64 * 2
                          : start + row / 8 * stride + row % 8 * 128 + k * 2;
    return reinterpret_cast<const u16 *>(shared_at(swizzled(at), 16));
}

// The row and column of element `i` of thread `thread`, by the ISA: of the accumulator, or of a in registers.
static u32 row_of(u32 thread, u32 i) { return thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8; }
static u32 column_of(u32 thread, u32 i) { return i / 4 * 8 + thread % 4 * 2 + i % 2; }

void Block::multiply_next(Warpgroup &warpgroup) {
    if (warpgroup.products.empty()) return;
    const Product product = std::move(warpgroup.products[0]);
    warpgroup.products.erase(warpgroup.products.begin());
    const u32 n = product.n;
    static float a[64][16], b[16][256], c[64][256];
    for (u32 row = 0; row < 64 && !product.a[0]; row++)
        for (u32 k = 0; k < 16; k += 8) {
            const u16 *elements = eight_of(product.a_matrix, row, k, false);
            for (u32 i = 0; i < 8; i++) a[row][k + i] = product.widen(elements[i]);
        }
    for (u32 thread = 0; thread < 128 && product.a[0]; thread++)
        for (u32 i = 0; i < 8; i++)
            a[row_of(thread, i)][column_of(thread, i)] = product.widen(u16(product.a[thread][i / 2] >> i % 2 * 16));
    for (u32 column = 0; column < n; column += product.b_turned ? 8 : 1)
        for (u32 k = 0; k < 16; k += product.b_turned ? 1 : 8) {
            const u16 *elements = eight_of(product.b_matrix, column, k, product.b_turned);
            for (u32 i = 0; i < 8; i++)
                (product.b_turned ? b[k][column + i] : b[k + i][column]) = product.widen(elements[i]);
        }
    for (u32 thread = 0; thread < 128; thread++)
        for (u32 i = 0; i < n / 2; i++)
            c[row_of(thread, i)][column_of(thread, i)] = product.adds ? product.before[thread * (n / 2) + i] : 0.0f;
    // In groups of eight, so that compilers vectorise the loop.
    for (u32 m = 0; m < 64; m++)
        for (u32 column = 0; column < n; column += 8) {
            float sums[8];
            std::memcpy(sums, &c[m][column], sizeof sums);
            for (u32 k = 0; k < 16; k++)
                for (u32 i = 0; i < 8; i++) sums[i] += a[m][k] * b[k][column + i];
            std::memcpy(&c[m][column], sums, sizeof sums);
        }
    // The next product on these accumulators takes the sums: the accumulators are undefined until the last one is computed, and
    // each product that is issued meanwhile overwrites them.
    Product *follower = nullptr;
    for (Product &later : warpgroup.products)
        if (!follower && later.c[0] == product.c[0]) follower = &later;
    if (follower) follower->before.resize(128 * (n / 2));
    for (u32 thread = 0; thread < 128; thread++) {
        float *sums = follower ? &follower->before[thread * (n / 2)] : product.c[thread];
        for (u32 i = 0; i < n / 2; i++) sums[i] = c[row_of(thread, i)][column_of(thread, i)];
    }
}

}  // namespace machine
