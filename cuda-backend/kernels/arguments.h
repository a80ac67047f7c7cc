// Arguments of the kernels, passed by value. `src/kernels/arguments.rs` has the same structs for the host; the tests compare
// their sizes.
//
// Kernel sources include no other headers: NVRTC has no headers of the compiler or of the C library.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef int i32;
typedef long long i64;
typedef unsigned long long u64;

// A strided tensor [batch, rows, heads, ·]. Strides count elements; of a mask tensor 32-bit words, in repack bytes.
struct Tensor {
    const void *data;
    u64 batch_stride, row_stride, head_stride;
};

// The key positions lo..hi that a row sees.
struct RowSpan {
    u32 lo, hi;
};

// Consecutive tiles of keys. full: every row of the query tile sees every key of them.
struct TileRun {
    u32 first, count, full;
};

enum BiasKind : u32 { NO_BIAS = 0, MASK_TENSOR = 1, ADDITIVE_BIAS = 2 };

// One block of queries against one block of keys, into a running state. Grid: (query tiles, heads, batch entries).
struct AttendArguments {
    Tensor q, k, v, bias;
    float *a;                 // [batch, rows, heads, dim]
    float *ml;                // [batch, heads, rows, 2], m in natural units
    const RowSpan *spans;     // [classes, rows]
    const u32 *positions;     // [keys]
    const u32 *starts;        // [classes, q_tiles + 1], into runs
    const TileRun *runs;
    const u32 *kv_head_of;    // [heads]
    u32 rows, keys, heads, dim;
    u32 classes, q_tiles;     // classes: 1 if all batch entries have the same mask, else one for each
    u32 first_tile, first_head, first_batch;  // the beginning of the grid: a long call is several launches
    u32 bias_kind;
    float scale;              // on q·k; with a softcap scale / cap
    float cap;                // 0 without a softcap
    u32 fresh;                // 1: the state is not read. Every row of the grid is written, also one that sees no key
    u32 reserved;
};

// Consecutive query heads that share a KV head and a tile.
struct HeadPack {
    u32 first, count;
};

// The same for few rows: the tiles of keys of each query tile are split into parts, each with a state of its own.
// Grid: (query tiles · tile_blocks, packs, batch entries).
struct DecodeArguments {
    // a and ml: `parts` states, one behind the other, only written; first_head: 0; fresh is not used.
    AttendArguments attend;
    const HeadPack *packs;
    u32 parts, batch;
    u32 tile_rows;           // query rows of a tile, which holds them for each head of a pack
    u32 tile_blocks;         // blocks per query tile: one per part; in f32 one per 8 (row, part) pairs
};

// A tensor as TMA copies it: 128 bytes that the driver encodes. In the emulator they are TensorMap of `src/kernels/hopper.rs`. Aligned
// as CUtensorMap is since CUDA 13.
struct alignas(128) TensorMap {
    u64 words[16];
};

// A query tile of a batch entry.
struct TilePlace {
    u32 tile, batch;
};

// The same by wgmma and TMA. Item n is query tile order[n / heads] of head n % heads. Grid: any, best as many blocks as run at
// a time. A block computes one item of each round of as many items as there are blocks.
struct HopperArguments {
    TensorMap q, k, v;       // of 16-bit elements [dim, rows, heads, batch], boxes of 64 columns by the rows of a tile
    AttendArguments attend;  // q, k, v, bias and the beginning of the grid are not used
    const TilePlace *order;
    u32 first_item, end_item;
    // Of a fresh state: the results of the rows, as StateArguments has them; null: the rows are merged into the state instead.
    void *o;
    float *lse;
    const float *sinks;
};

// The backward pass of one block of queries against one block of keys. Kernels of dQ have a tile of query rows of a query head,
// kernels of dK and dV a tile of keys of a KV head, kernels of dBias a tile of keys for a query head. Grid: (tiles, heads, batch
// entries).
struct BackwardArguments {
    // As in the forward pass, except: starts ([classes, q_tiles + 1]) and runs are of this kernel's side, in tiles of
    // BACKWARD_TILE; runs count in tiles of the other side, as many rows or keys as the kernel multiplies at a time; a and ml
    // are not used.
    AttendArguments attend;
    Tensor d_o;              // as q
    Tensor stats;            // f32 [batch, rows, heads, 4]: log-sum-exp, e^-rest, delta, rest
    Tensor d_kv;             // f32 [batch, keys, KV heads, dim]: the strides of dk and dv; data is not used
    Tensor bias_sum;         // f32 [batch, rows, heads, positions]: the strides of d_bias, 0 where shared; data is not used
    float *d_bias;           // or null
    float *dq;               // f32 [batch, rows, heads, dim]
    float *dk, *dv;
    const u32 *readers;      // [KV heads + 1]: the first query head of each KV head
    float scale;             // the factor on q·k
    u32 reserved;
};

// The same by wgmma and TMA: kernels of dQ with tiles of 128 query rows, of dK and dV with tiles of 128 keys, which multiply 64 at a
// time.
struct HopperBackwardArguments {
    TensorMap q, k, v, d_o;      // of 16-bit elements [dim, rows, heads, batch], boxes of 64 columns by 64 rows
    // starts are of tiles of 128; bias_kind is NO_BIAS; q, k, v, bias, d_o, bias_sum and d_bias are not used.
    BackwardArguments backward;
    u64 reserved[12];
};

// A running state. Grid: (⌈rows · heads · batch / 8⌉), one warp for each row of a head.
struct StateArguments {
    float *a, *ml;
    const float *from_a, *from_ml;  // merge: the other state
    const float *sinks;             // finalize: [heads], or null without sinks
    void *o;                        // finalize: [batch, rows, heads, dim]
    float *lse;                     // finalize: [batch, rows, heads, 2], the sum of two numbers
    u32 batch, rows, heads, dim;
};

// Merges `parts` states, one behind the other from from_a and from_ml on, into a state. Grid as above.
struct PartsArguments {
    StateArguments state;
    u32 parts;
    u32 fresh;  // 1: the state is not read, and every row is written
};

// Log-sum-exp and delta of rows, for the backward pass. Grid: (⌈rows / 8⌉), one warp for each row of a head.
struct RowStatsArguments {
    const void *o, *d_o;       // [rows, dim]
    const float *lse, *d_lse;  // [rows, 2] and [rows]; d_lse: null where it is 0
    float *stats;              // [rows, 4]
    u64 rows;                  // rows of all heads and batch entries
    u32 dim, reserved;
};

// Fills words with 0. Any grid.
struct ClearArguments {
    u32 *words;
    u64 count;
};

// Conversion between storage types, eight elements per thread. Grid: (⌈eights / 256⌉).
struct ConvertArguments {
    const void *from;
    void *into;  // both addresses are multiples of 16
    u64 eights;
    u32 *overflow;  // becomes 1 where a finite element is beyond the range of f16; may be null
};

// Elements to 8-bit codes with scales, or back. Grid: with one scale per row (⌈batch · tokens · heads · lanes / 256⌉), with one
// per channel (⌈heads · dim / 128⌉ · ⌈tokens / 64⌉ · batch).
struct CodesArguments {
    void *data;     // [batch, tokens, heads, dim]; the address is a multiple of 16
    void *codes;    // likewise
    float *scales;  // per row [batch, tokens, heads], per channel [batch, ⌈tokens / 64⌉, heads, dim]
    u32 batch, tokens, heads, dim;
    u32 lanes;      // per row: lanes of a row, a power of two; dim is at most 8 · lanes
    u32 reserved;
};

// Copies rows between two strided layouts, or adds f32 rows to others. All sizes are in bytes and multiples of 4. Any grid.
struct RepackArguments {
    Tensor from, into;
    u32 batch, rows, heads, row_bytes;
};
