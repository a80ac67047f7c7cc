// Attention for Hopper: TMA copies tiles to shared memory, wgmma multiplies them there.
//
// - A block has three warpgroups. The first is the producer: it gives registers away, and one thread of it issues all copies.
//   The other two are consumers with 64 query rows each.
// - Blocks are persistent: each computes one item of each round through a list that begins with the longest items. Every second
//   round is given out in reverse, so that the first block does not always get the longest item of a round. Copies for the next
//   item begin while the state of the previous one is written.
// - Keys of a tile are copied before the values of the previous one, in the order in which full tiles need them.
// - Full tiles come last and overlap: while the softmax of one tile is computed, the weights of the previous one are multiplied.
//   The two consumers take turns at issuing products, so that the exponentials of one run during the products of the other.
// - Tiles that need mask tests come first, without overlap. Only there can a hidden key give 0 · NaN.
#pragma once
#include "hopper.h"

// Iterates over the tiles of an item that need mask tests (`tested`), or over the others. In a full run only a tile that reaches
// behind the last key needs tests.
struct Sweep {
    const TileRun *run, *end;
    u32 tile, stop, whole;
    bool tested;

    DEVICE Sweep(const Tiles &tiles, u32 whole, bool tested)
        : run(tiles.run), end(tiles.end), tile(0), stop(0), whole(whole), tested(tested) {
        settle();
    }
    DEVICE bool done() const { return tile >= stop; }
    DEVICE void advance() {
        tile++;
        settle();
    }

private:
    DEVICE void settle() {
        for (; tile >= stop && run != end; run++) {
            const u32 behind = run->first + run->count;
            const u32 border = run->full ? (behind < whole ? behind : whole > run->first ? whole : run->first) : run->first;
            tile = tested ? border : run->first;
            stop = tested ? behind : border;
        }
    }
};

template <typename T, int DIM, int KEYS> struct Hopper {
    static constexpr u32 CONSUMERS = 2;
    static constexpr int THREADS = 128 * (1 + CONSUMERS);
    static constexpr u32 ROWS = 64 * CONSUMERS;
    static constexpr u32 STAGES = DIM == 64 ? 4 : 2;
    // A row in shared memory has 64 elements, 128 bytes. A tile of more columns is several such chunks, one behind the other.
    static constexpr u32 CHUNKS = DIM / 64, Q_CHUNK = ROWS * 128, KV_CHUNK = KEYS * 128;
    static constexpr u32 Q_BYTES = CHUNKS * Q_CHUNK, TILE_BYTES = CHUNKS * KV_CHUNK;
    static constexpr u32 PHASES = 2 + 4 * STAGES;
    static constexpr u32 SHARED_BYTES = Q_BYTES + 2 * STAGES * TILE_BYTES + PHASES * 8;
    // Arrivals that free a stage: one for each warp of the consumers.
    static constexpr u32 READERS = 4 * CONSUMERS;
    // Named barriers: the turn of a consumer to issue products, the threads of one consumer, the threads of both.
    static constexpr u32 TURN = 1, OWN = 1 + CONSUMERS, BOTH = 1 + 2 * CONSUMERS;

    using Mine = Rows<T, DIM, KEYS, Place>;

    const HopperArguments &more;
    const AttendArguments &args;
    const u32 q, k, v, phases;

    DEVICE explicit Hopper(const HopperArguments &more)
        : more(more), args(more.attend), q(shared_base()), k(q + Q_BYTES), v(k + STAGES * TILE_BYTES),
          phases(v + STAGES * TILE_BYTES) {}

    DEVICE u32 q_full() const { return phases; }
    DEVICE u32 q_empty() const { return phases + 8; }
    DEVICE u32 k_full(u32 stage) const { return phases + 16 + stage * 32; }
    DEVICE u32 k_empty(u32 stage) const { return k_full(stage) + 8; }
    DEVICE u32 v_full(u32 stage) const { return k_full(stage) + 16; }
    DEVICE u32 v_empty(u32 stage) const { return k_full(stage) + 24; }

    // The item of this block in a round; behind the last one if it has none. As `item_of_round` of `src/kernels/hopper.rs`.
    DEVICE u32 item_of(u32 round) const {
        const u32 place = round % 2 ? grid_x() - 1 - block_x() : block_x();
        return more.first_item + round * grid_x() + place;
    }
    DEVICE Place place(u32 item) const {
        const TilePlace at = more.order[item / args.heads];
        return Place(args, at.tile, item % args.heads, at.batch);
    }
    DEVICE Sweep sweep(const Place &at, bool tested) const { return Sweep(at.tiles(args), args.keys / KEYS, tested); }

    // Copies the queries of an item when the consumers have read those of the previous one.
    DEVICE void copy_queries(const Place &at, u32 taken) const {
        // For a new mbarrier, the phase before the first one counts as complete.
        phase_wait(q_empty(), taken % 2 ^ 1);
        phase_arrive_expecting(q_full(), Q_BYTES);
        for (u32 c = 0; c < CHUNKS; c++)
            copy_box(q + c * Q_CHUNK, more.q, q_full(), c * 64, at.tile * ROWS, at.head, at.batch);
    }
    // Copies a tile of keys or values when the consumers have read the previous one of this stage.
    DEVICE void copy_tile(u32 stages, const TensorMap &map, u32 full, u32 empty, u32 step, u32 first, const Place &at) const {
        phase_wait(empty, step / STAGES % 2 ^ 1);
        phase_arrive_expecting(full, TILE_BYTES);
        for (u32 c = 0; c < CHUNKS; c++)
            copy_box(stages + step % STAGES * TILE_BYTES + c * KV_CHUNK, map, full, c * 64, first, at.kv_head, at.batch);
    }
    DEVICE void copy_keys(u32 step, u32 tile, const Place &at) const {
        copy_tile(k, more.k, k_full(step % STAGES), k_empty(step % STAGES), step, tile * KEYS, at);
    }
    DEVICE void copy_values(u32 step, u32 tile, const Place &at) const {
        copy_tile(v, more.v, v_full(step % STAGES), v_empty(step % STAGES), step, tile * KEYS, at);
    }

    // The producer, one thread: issues all copies to shared memory.
    DEVICE void produce() const {
        u32 step = 0;
        for (u32 taken = 0; item_of(taken) < more.end_item; taken++) {
            const Place at = place(item_of(taken));
            u32 tile_before = 0;
            bool first = true;
            for (u32 pass = 0; pass < 2; pass++)
                for (Sweep tiles = sweep(at, pass == 0); !tiles.done(); tiles.advance(), step++) {
                    copy_keys(step, tiles.tile, at);
                    if (first)
                        copy_queries(at, taken);
                    else
                        copy_values(step - 1, tile_before, at);
                    first = false;
                    tile_before = tiles.tile;
                }
            // An item without keys is in the list of a fresh state only.
            if (first)
                copy_queries(at, taken);
            else
                copy_values(step - 1, tile_before, at);
        }
    }

    // Starts scores = q · k.
    DEVICE void multiply_keys(float (&scores)[KEYS / 8][4], u32 consumer, u32 stage) const {
        UNROLL for (u32 i = 0; i < DIM / 16; i++) {
            // 16 elements of a row are 32 bytes.
            const u32 from = i / 4, within = i % 4 * 32;
            Wgmma<T, KEYS>::shared(scores, matrix_at(q + from * Q_CHUNK + consumer * 64 * 128 + within, 16),
                                   matrix_at(k + stage * TILE_BYTES + from * KV_CHUNK + within, 16), i != 0);
        }
        wgmma_commit();
    }

    // To be called before products that read `p` and add to `acc`: registers that are complete here stay as they are.
    DEVICE static void fence(Mine &mine, u32 (&p)[KEYS / 16][4]) {
        settle(mine.acc);
        settle(p);
        wgmma_fence();
    }

    // Starts acc += weights · v.
    DEVICE void multiply_values(Mine &mine, const u32 (&p)[KEYS / 16][4], u32 stage) const {
        UNROLL for (u32 i = 0; i < KEYS / 16; i++)
            Wgmma<T, DIM>::registers(mine.acc, p[i], matrix_at(v + stage * TILE_BYTES + i * 16 * 128, KV_CHUNK));
        wgmma_commit();
    }

    DEVICE static void pack(u32 (&p)[KEYS / 16][4], const float (&weights)[KEYS / 8][4]) {
        UNROLL for (int i = 0; i < KEYS / 16; i++) Mine::pack_weights(p[i], weights, i);
    }

    // A consumer, one warpgroup: computes 64 rows of each item.
    DEVICE void consume(u32 consumer) const {
        // With a scale of 0 the -inf of hidden keys would become NaN. `shape` applies a negative scale itself.
        const float scale = args.scale < 0.0f ? args.scale : larger(args.scale, 1.2e-38f);
        Mine mine(args);
        float scores[KEYS / 8][4], rescale[2];
        u32 p[KEYS / 16][4], step = 0;
        if (consumer == CONSUMERS - 1) named_arrive(TURN, 256);
        for (u32 taken = 0; item_of(taken) < more.end_item; taken++) {
            const Place at = place(item_of(taken));
            mine.begin(at, ROWS, thread_x() / 32 * 16 - 64);
            phase_wait(q_full(), taken % 2);
            for (Sweep tiles = sweep(at, true); !tiles.done(); tiles.advance(), step++) {
                const u32 stage = step % STAGES, parity = step / STAGES % 2, first_key = tiles.tile * KEYS;
                phase_wait(k_full(stage), parity);
                wgmma_fence();
                multiply_keys(scores, consumer, stage);
                wgmma_wait<0>();
                settle(scores);
                release(k_empty(stage));
                mine.weigh(scores, mine.shape(scores, scale, at.batch, first_key, true), rescale);
                mine.scale_sums(rescale);
                phase_wait(v_full(stage), parity);
                // Both consumers find the same.
                const u32 values = v + stage * TILE_BYTES;
                if (odd_in<Mine>(values, TILE_BYTES, OWN + consumer)) {
                    mine.add_odd_values(scores, at.batch, first_key, [&](u32 key, int j) {
                        return load_shared(pair_in(values, KV_CHUNK, key, j));
                    });
                    clear_odd<Mine>(values, TILE_BYTES, consumer, CONSUMERS, BOTH);
                }
                pack(p, scores);
                fence(mine, p);
                multiply_values(mine, p, stage);
                wgmma_wait<0>();
                settle(mine.acc);
                release(v_empty(stage));
            }
            Sweep tiles = sweep(at, false);
            if (!tiles.done()) {
                phase_wait(k_full(step % STAGES), step / STAGES % 2);
                wgmma_fence();
                multiply_keys(scores, consumer, step % STAGES);
                wgmma_wait<0>();
                settle(scores);
                release(k_empty(step % STAGES));
                mine.weigh(scores, mine.shape(scores, scale, at.batch, 0, false), rescale);
                mine.scale_sums(rescale);
                pack(p, scores);
                for (tiles.advance(); !tiles.done(); tiles.advance()) {
                    const u32 before = step % STAGES, parity = step / STAGES % 2;
                    step++;
                    phase_wait(k_full(step % STAGES), step / STAGES % 2);
                    named_sync(TURN + consumer, 256);
                    wgmma_fence();
                    multiply_keys(scores, consumer, step % STAGES);
                    phase_wait(v_full(before), parity);
                    fence(mine, p);
                    multiply_values(mine, p, before);
                    named_arrive(TURN + (consumer ^ 1), 256);
                    wgmma_wait<1>();
                    settle(scores);
                    release(k_empty(step % STAGES));
                    mine.weigh(scores, mine.shape(scores, scale, at.batch, 0, false), rescale);
                    wgmma_wait<0>();
                    settle(mine.acc);
                    release(v_empty(before));
                    mine.scale_sums(rescale);
                    pack(p, scores);
                }
                phase_wait(v_full(step % STAGES), step / STAGES % 2);
                fence(mine, p);
                multiply_values(mine, p, step % STAGES);
                wgmma_wait<0>();
                settle(mine.acc);
                release(v_empty(step % STAGES));
                step++;
            }
            release(q_empty());
            mine.merge(at);
        }
        // Consumes the last turn that the other consumer gave, so that no arrival is left.
        if (consumer == 0) named_sync(TURN, 256);
    }

    DEVICE void run() const {
        if (thread_x() == 0) {
            phase_init(q_full(), 1);
            phase_init(q_empty(), READERS);
            for (u32 stage = 0; stage < STAGES; stage++) {
                phase_init(k_full(stage), 1);
                phase_init(k_empty(stage), READERS);
                phase_init(v_full(stage), 1);
                phase_init(v_empty(stage), READERS);
            }
            phases_are_there();
        }
        barrier_or(false);
        const u32 warpgroup = warp_uniform(thread_x() / 128);
        if (warpgroup == 0) {
            registers_fewer<24>();
            if (warp_uniform(thread_x() / 32) == 0 && elect_one()) produce();
        } else {
            registers_more<240>();
            consume(warpgroup - 1);
        }
    }
};
