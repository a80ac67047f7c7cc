// Copies rows between strided layouts: into a message, out of a message, or on the same rank. Or adds f32 rows to others.
#pragma once
#include "ptx.h"

struct Repack {
    static constexpr int THREADS = 256;

    template <bool ADD> DEVICE static void run(const RepackArguments &args) {
        const u64 row_words = args.row_bytes / 4, words = row_words * args.heads * args.rows * args.batch;
        const u64 step = u64(grid_x()) * THREADS;
        for (u64 n = u64(block_x()) * THREADS + thread_x(); n < words; n += step) {
            const u64 head = n / row_words % args.heads, row = n / row_words / args.heads % args.rows;
            const u64 batch = n / row_words / args.heads / args.rows;
            const u64 from = batch * args.from.batch_stride + row * args.from.row_stride + head * args.from.head_stride;
            const u64 into = batch * args.into.batch_stride + row * args.into.row_stride + head * args.into.head_stride;
            const u32 *source = static_cast<const u32 *>(args.from.data);
            u32 *target = static_cast<u32 *>(const_cast<void *>(args.into.data));
            const u32 word = source[from / 4 + n % row_words];
            u32 &place = target[into / 4 + n % row_words];
            place = ADD ? bits_of(float_of(place) + float_of(word)) : word;
        }
    }
};
