// Split-KV decoding, for few query rows and many keys: the keys are split over blocks, each of which computes running states of
// its own (`attend.h`). merge_parts merges them, always in the same order.
//
// The query heads of a KV head share its keys. Their rows are in one tile, so keys are read once for all of them.
#pragma once
#include "attend.h"
#include "attend_f32.h"

struct PackedPlace {
    // Each block writes states of its own, which are fresh. Of a row that sees no key only m and l are written.
    static constexpr bool PARTS = true;

    const DecodeArguments &more;
    u32 tile, part, batch, kv_head, mask_class;
    HeadPack pack;

    DEVICE PackedPlace(const DecodeArguments &more, u32 part)
        : more(more), tile(more.attend.first_tile + block_x() / more.tile_blocks), part(part),
          batch(more.attend.first_batch + block_z()),
          mask_class(more.attend.classes > 1 ? batch : 0), pack(more.packs[block_y()]) {
        kv_head = more.attend.kv_head_of[pack.first];
    }

    // The part of the query tile's tiles of keys that this block computes.
    DEVICE Tiles tiles(const AttendArguments &args) const {
        const u32 *starts = args.starts + mask_class * (args.q_tiles + 1) + tile;
        Tiles from{args.runs + starts[0], args.runs + starts[1], 0, 0}, end = from;
        u32 all = 0;
        for (const TileRun *run = from.run; run != from.end; run++) all += run->count;
        from.skip(u32(u64(all) * part / more.parts));
        end.skip(u32(u64(all) * (part + 1) / more.parts));
        from.end = end.run;
        from.end_taken = end.taken;
        return from;
    }
    DEVICE TileRow row(u32, u32 n) const {
        const u32 row = n / pack.count;
        return {row < more.tile_rows ? tile * more.tile_rows + row : ~0u, pack.first + n % pack.count};
    }
    DEVICE RowSpan span(const AttendArguments &args, u32 row) const {
        return row < args.rows ? args.spans[u64(mask_class) * args.rows + row] : RowSpan{0, 0};
    }
    DEVICE float *a(const AttendArguments &args, TileRow at) const {
        return args.a + (((u64(part) * more.batch + batch) * args.rows + at.row) * args.heads + at.head) * args.dim;
    }
    DEVICE float *ml(const AttendArguments &args, TileRow at) const {
        return args.ml + (((u64(part) * more.batch + batch) * args.heads + at.head) * args.rows + at.row) * 2;
    }
};

template <typename T, int DIM> struct Decode : Attention<T, DIM, PackedPlace, 4> {
    DEVICE explicit Decode(const DecodeArguments &args)
        : Attention<T, DIM, PackedPlace, 4>(args.attend, PackedPlace(args, block_x() % args.parts)) {}
};

// In f32 a warp computes one row of one part. The rows of a part are in neighbouring warps, so that keys that one of them reads
// are in a cache for the others.
struct DecodeF32 {
    static constexpr u32 WARPS = 8, THREADS = WARPS * 32;

    DEVICE static void run(const DecodeArguments &args) {
        const u32 warp = block_x() % args.tile_blocks * WARPS + thread_x() / 32;
        const u32 rows = args.tile_rows * args.packs[block_y()].count, part = warp / rows;
        if (part >= args.parts) return;
        const PackedPlace at(args, part);
        AttentionF32::attend(args.attend, at, at.row(rows, warp % rows));
    }
};
