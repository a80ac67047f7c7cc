// What kernels are given, by value. `src/arguments.rs` has the same structs for the host; the tests compare their sizes.
//
// Sources of kernels include no header but these: NVRTC has none of the compiler's or the C library's.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef int i32;
typedef long long i64;
typedef unsigned long long u64;

// A strided tensor [batch, rows, heads, ·]. Strides count elements, 32-bit words of a boolean pair tensor, bytes in repack.
struct Tensor {
    const void *data;
    u64 batch_stride, row_stride, head_stride;
};

// The key positions lo..hi that a row sees.
struct RowSpan {
    u32 lo, hi;
};

// Consecutive tiles of keys. In full ones every row of the query tile sees every key.
struct TileRun {
    u32 first, count, full;
};

enum PairKind : u32 { NO_PAIRS = 0, VISIBLE_PAIRS = 1, BIAS_PAIRS = 2 };

// One block of queries against one block of keys, into a running state. Grid: (query tiles, heads, batch entries).
struct AttendArguments {
    Tensor q, k, v, pairs;
    float *a;                 // [batch, rows, heads, dim]
    float *ml;                // [batch, heads, rows, 2], m in natural units
    const RowSpan *spans;     // [classes, rows]
    const u32 *positions;     // [keys]
    const u32 *starts;        // [classes, q_tiles + 1], into runs
    const TileRun *runs;
    const u32 *kv_head_of;    // [heads]
    u32 rows, keys, heads, dim;
    u32 classes, q_tiles;     // classes: 1, or one for each batch entry
    u32 first_tile, first_head, first_batch;  // where the grid begins: a long call is several launches
    u32 pair_kind;
    float scale;              // of base-2 logits: scale · log2 e; under a softcap scale / cap
    float cap;                // cap · log2 e; 0: no softcap
};

// Query heads that share a KV head and lie side by side in a tile.
struct HeadPack {
    u32 first, count;
};

// As above for few rows: the tiles of keys of each query tile are cut into parts, each with a state of its own.
// Grid: (query tiles · tile_blocks, packs, batch entries).
struct DecodeArguments {
    AttendArguments attend;  // a and ml: `parts` states, one behind the other, written and not read; first_head: 0
    const HeadPack *packs;
    u32 parts, batch;
    u32 tile_rows;           // query rows of a tile; it has room for them times the heads of a pack
    u32 tile_blocks;         // blocks of a query tile: one for each part; in f32 for 8 rows of parts
};

// What TMA knows of a tensor: 128 bytes that the driver encodes. The emulator reads `src/hopper.rs`'s TensorMap in it.
struct alignas(64) TensorMap {
    u64 words[16];
};

// A query tile of a batch entry.
struct TilePlace {
    u32 tile, batch;
};

// As above by wgmma and TMA. Item n is the query tile of order[n / heads] of head n % heads. Grid: any, at best as many
// blocks as run at a time; each takes every so many items.
struct HopperArguments {
    TensorMap q, k, v;       // of 16-bit elements [dim, rows, heads, batch], boxes of 64 columns by the rows of a tile
    AttendArguments attend;  // without the tensors, the pairs and the first tile, head and batch entry
    const TilePlace *order;
    u32 first_item, end_item;
    u64 reserved;
};

// A running state. Grid: (⌈rows · heads · batch / 8⌉), a warp for each row of a head.
struct StateArguments {
    float *a, *ml;
    const float *from_a, *from_ml;  // merge: the other state
    const float *sinks;             // finalize: [heads], or null
    void *o;                        // finalize: [batch, rows, heads, dim]
    float *lse;                     // finalize: [batch, rows, heads]
    u32 batch, rows, heads, dim;
};

// Merges states that lie one behind the other from from_a and from_ml on into a state. Grid as above.
struct PartsArguments {
    StateArguments state;
    u32 parts, reserved;
};

// Elements from one storage type to another, eight for each thread. Grid: (⌈eights / 256⌉).
struct ConvertArguments {
    const void *from;
    void *into;  // both at multiples of 16 bytes
    u64 eights;
};

// Elements to 8-bit codes with scales, or back. Grid: of scales over rows (⌈batch · tokens · heads · lanes / 256⌉), over
// channels (⌈heads · dim / 128⌉ · ⌈tokens / 64⌉ · batch).
struct CodesArguments {
    void *data;     // [batch, tokens, heads, dim], at a multiple of 16 bytes
    void *codes;    // likewise
    float *scales;  // over rows [batch, tokens, heads], over channels [batch, ⌈tokens / 64⌉, heads, dim]
    u32 batch, tokens, heads, dim;
    u32 lanes;      // over rows: lanes of a row, a power of two; dim is at most 8 times that
    u32 reserved;
};

// Copies rows between two strided layouts; all in bytes and multiples of 4. Any grid.
struct RepackArguments {
    Tensor from, into;
    u32 batch, rows, heads, row_bytes;
};
