// Attention for Hopper: TMA copies tiles to shared memory, wgmma multiplies them there.
//
// - The first warpgroup of a block is the producer: it deallocates registers (setmaxnreg), and one thread of it issues all copies. The others are
//   consumers with 64 query rows each.
// - Blocks are persistent: each computes one item of each round through a list that begins with the longest items. Every second
//   round is given out in reverse, so that the first block does not always get the longest item of a round. Copies for the next
//   item begin while the state of the previous one is written.
// - Keys of a tile are copied before the values of the previous one, in the order in which consumers need them.
// - Tiles overlap: while the softmax of one tile is computed, the weights of the previous one are multiplied. The consumers take
//   turns at issuing products, so that the exponentials of one run during the products of the others.
// - Tiles that need mask tests come first. Three warps of the producer, the markers, write the positions of their keys to shared
//   memory, and say whether their values have a NaN or an infinity: only there can a hidden key give 0 · NaN.
#pragma once
#include "hopper.h"

// Iterates over the tiles of an item: first those that need mask tests, then the others. In a full run only a tile that reaches
// past the last key needs tests.
struct Sweep {
    const AttendArguments &args;
    // Indices of runs.
    u32 first, run, end;
    u32 tile, stop;
    // Tiles without a key behind the last one.
    u32 whole;
    bool tested;

    DEVICE Sweep(const AttendArguments &args, const Place &at, u32 keys)
        : args(args), tile(0), stop(0), whole(args.keys / keys), tested(true) {
        const u32 *starts = args.starts + at.mask_class * (args.q_tiles + 1) + at.tile;
        first = run = starts[0];
        end = starts[1];
        settle();
    }
    DEVICE bool done() const { return tile >= stop; }
    DEVICE void advance() {
        tile++;
        settle();
    }

private:
    DEVICE void settle() {
        while (tile >= stop) {
            if (run == end) {
                if (!tested) return;
                tested = false;
                run = first;
                continue;
            }
            const TileRun here = args.runs[run++];
            const u32 behind = here.first + here.count;
            const u32 border = here.full ? (behind < whole ? behind : whole > here.first ? whole : here.first) : here.first;
            tile = tested ? border : here.first;
            stop = tested ? behind : border;
        }
    }
};

template <typename T, int DIM, int Bc, int CONSUMERS_> struct Hopper {
    static constexpr u32 CONSUMERS = CONSUMERS_;
    static constexpr int THREADS = 128 * (1 + CONSUMERS);
    static constexpr u32 Br = 64 * CONSUMERS;
    // Registers of a thread of the producer and of a consumer. The block has all 65536 of a multiprocessor.
    static constexpr u32 FEWER = CONSUMERS == 2 ? 24 : 32, MORE = CONSUMERS == 2 ? 240 : 160;
    static constexpr u32 STAGES = DIM == 64 ? 4 : 2;
    // A row in shared memory has 64 elements, 128 bytes. A tile of more columns is several such chunks, one behind the other.
    static constexpr u32 CHUNKS = DIM / 64, Q_CHUNK = Br * 128, KV_CHUNK = Bc * 128;
    static constexpr u32 Q_BYTES = CHUNKS * Q_CHUNK, TILE_BYTES = CHUNKS * KV_CHUNK;
    // What a tile with mask tests has: the positions of its keys, a word of each marker, its first key and its step.
    static constexpr u32 MARKERS = 3, MARKS_BYTES = (Bc + 8) * 4;
    // mbarriers: two for queries; for each stage four for keys and values, and three for marks.
    static constexpr u32 PHASES = 2 + 7 * STAGES;
    static constexpr u32 SHARED_BYTES = Q_BYTES + 2 * STAGES * TILE_BYTES + STAGES * MARKS_BYTES + PHASES * 8;
    // Arrivals that free a stage: one for each warp of the consumers.
    static constexpr u32 READERS = 4 * CONSUMERS;
    // Named barriers: the turn of a consumer to issue products, the threads of all consumers.
    static constexpr u32 TURN = 1, ALL = 1 + CONSUMERS;

    using Mine = Rows<T, DIM, Bc, Place>;

    const HopperArguments &more;
    const AttendArguments &args;
    const u32 q, k, v, marks, phases;

    DEVICE explicit Hopper(const HopperArguments &more)
        : more(more), args(more.attend), q(shared_base()), k(q + Q_BYTES), v(k + STAGES * TILE_BYTES),
          marks(v + STAGES * TILE_BYTES), phases(marks + STAGES * MARKS_BYTES) {}

    DEVICE u32 q_full() const { return phases; }
    DEVICE u32 q_empty() const { return phases + 8; }
    DEVICE u32 k_full(u32 stage) const { return phases + 16 + stage * 56; }
    DEVICE u32 k_empty(u32 stage) const { return k_full(stage) + 8; }
    DEVICE u32 v_full(u32 stage) const { return k_full(stage) + 16; }
    DEVICE u32 v_empty(u32 stage) const { return k_full(stage) + 24; }
    // The `n`-th tile with mask tests has marks `n % STAGES`. They are requested, then positions are written, then values are checked.
    DEVICE u32 requested(u32 n) const { return k_full(n % STAGES) + 32; }
    DEVICE u32 located(u32 n) const { return k_full(n % STAGES) + 40; }
    DEVICE u32 checked(u32 n) const { return k_full(n % STAGES) + 48; }
    DEVICE u32 positions(u32 n) const { return marks + n % STAGES * MARKS_BYTES; }
    DEVICE u32 verdict(u32 n, u32 marker) const { return positions(n) + (Bc + marker) * 4; }
    DEVICE u32 request(u32 n) const { return positions(n) + (Bc + MARKERS) * 4; }
    // The parity of the phases in which the `n`-th use of a ring of stages begins to be full.
    DEVICE static u32 parity_of(u32 n) { return n / STAGES % 2; }

    // The item of this block in a round; behind the last one if it has none. As `item_of_round` of `src/kernels/hopper.rs`.
    DEVICE u32 item_of(u32 round) const {
        const u32 place = round % 2 ? grid_x() - 1 - block_x() : block_x();
        return more.first_item + round * grid_x() + place;
    }
    DEVICE Place place(u32 item) const {
        const TilePlace at = more.order[item / args.heads];
        return Place(args, at.tile, item % args.heads, at.batch);
    }
    DEVICE Sweep sweep(const Place &at) const { return Sweep(args, at, Bc); }

    // Copies the queries of an item when the consumers have read those of the previous one.
    DEVICE void copy_queries(const Place &at, u32 taken) const {
        // For a new mbarrier, the phase before the first one counts as complete.
        phase_wait(q_empty(), taken % 2 ^ 1);
        phase_arrive_expecting(q_full(), Q_BYTES);
        for (u32 c = 0; c < CHUNKS; c++)
            copy_box(q + c * Q_CHUNK, more.q, q_full(), c * 64, at.tile * Br, at.head, at.batch);
    }
    // Copies a tile of keys or values when the consumers have read the previous one of this stage.
    DEVICE void copy_tile(u32 stages, const TensorMap &map, u32 full, u32 empty, u32 step, u32 first, const Place &at) const {
        phase_wait(empty, parity_of(step) ^ 1);
        phase_arrive_expecting(full, TILE_BYTES);
        for (u32 c = 0; c < CHUNKS; c++)
            copy_box(stages + step % STAGES * TILE_BYTES + c * KV_CHUNK, map, full, c * 64, first, at.kv_head, at.batch);
    }
    DEVICE void copy_keys(u32 step, u32 tile, const Place &at) const {
        copy_tile(k, more.k, k_full(step % STAGES), k_empty(step % STAGES), step, tile * Bc, at);
    }
    DEVICE void copy_values(u32 step, u32 tile, const Place &at) const {
        copy_tile(v, more.v, v_full(step % STAGES), v_empty(step % STAGES), step, tile * Bc, at);
    }

    // Requests the `n`-th marks: of the tile that begins with `first_key`, whose values were copied in `step`. Nobody needs the marks
    // that were here before: these values are where those of that tile or later ones were, which the consumers have multiplied.
    DEVICE void request_marks(u32 n, u32 first_key, u32 step) const {
        store_shared(request(n), first_key);
        store_shared(request(n) + 4, step);
        phase_arrive(requested(n));
    }
    static constexpr u32 NO_MORE = ~0u;

    // The number of a tile, and whether it needs mask tests.
    static constexpr u32 TESTED = 1u << 31;
    DEVICE static u32 named(const Sweep &tiles) { return tiles.tile | (tiles.tested ? TESTED : 0); }

    // The producer, one thread: issues all copies to shared memory.
    DEVICE void produce() const {
        // `before`: the previous tile.
        u32 step = 0, marked = 0, before = 0;
        const auto copy_previous = [&](const Place &at) {
            const u32 tile = before & ~TESTED;
            copy_values(step - 1, tile, at);
            if (before & TESTED) request_marks(marked++, tile * Bc, step - 1);
        };
        for (u32 taken = 0; item_of(taken) < more.end_item; taken++) {
            const Place at = place(item_of(taken));
            bool first = true;
            for (Sweep tiles = sweep(at); !tiles.done(); tiles.advance(), step++) {
                copy_keys(step, tiles.tile, at);
                if (first)
                    copy_queries(at, taken);
                else
                    copy_previous(at);
                first = false;
                before = named(tiles);
            }
            // An item without keys is in the list of a fresh state only.
            if (first)
                copy_queries(at, taken);
            else
                copy_previous(at);
        }
        // No values were copied for this request, so the markers may not have read the one that was here before.
        phase_wait(checked(marked), parity_of(marked) ^ 1);
        request_marks(marked, NO_MORE, 0);
    }

    // A marker, one warp of the producer: writes the marks of all tiles with mask tests.
    DEVICE void mark(u32 marker) const {
        for (u32 n = 0;; n++) {
            phase_wait(requested(n), parity_of(n));
            const u32 first_key = warp_uniform(load_shared(request(n))), step = load_shared(request(n) + 4);
            if (first_key == NO_MORE) return;
            const u32 mine = marker * 32 + thread_x() % 32;
            // A thread of the producer has few registers.
            ROLLED for (u32 key = mine; key < Bc; key += 32 * MARKERS)
                store_shared(positions(n) + key * 4, position_of(args, first_key + key));
            release(located(n));
            phase_wait(v_full(step % STAGES), parity_of(step));
            const u32 values = v + step % STAGES * TILE_BYTES;
            bool odd = false;
            ROLLED for (u32 at = mine * 16; at < TILE_BYTES; at += 512 * MARKERS) {
                u32 words[4];
                load_shared(words, values + at);
                UNROLL for (int i = 0; i < 4; i++) odd |= Mine::odd_pair(words[i]);
            }
            odd = vote(odd);
            if (thread_x() % 32 == 0) store_shared(verdict(n, marker), odd);
            release(checked(n));
        }
    }

    // Starts scores = q · k.
    DEVICE void multiply_keys(float (&scores)[Bc / 8][4], u32 consumer, u32 step) const {
        const u64 left = matrix_at(q + consumer * 64 * 128, 16), right = matrix_at(k + step % STAGES * TILE_BYTES, 16);
        UNROLL for (u32 i = 0; i < DIM / 16; i++) {
            // 16 elements of a row are 32 bytes.
            const u32 from = i / 4, within = i % 4 * 32;
            Wgmma<T, Bc>::shared(scores, left + (from * Q_CHUNK + within) / 16, right + (from * KV_CHUNK + within) / 16, i != 0);
        }
        wgmma_commit();
    }

    // Starts O += weights · v. Registers that are complete here stay as they are.
    DEVICE void multiply_values(Mine &mine, u32 (&p)[Bc / 16][4], u32 step) const {
        phase_wait(v_full(step % STAGES), parity_of(step));
        settle(mine.O);
        settle(p);
        wgmma_fence();
        const u64 right = matrix_at(v + step % STAGES * TILE_BYTES, KV_CHUNK);
        UNROLL for (u32 i = 0; i < Bc / 16; i++) Wgmma<T, DIM>::registers(mine.O, p[i], right + i * 16 * 128 / 16);
        wgmma_commit();
    }

    DEVICE static void pack(u32 (&p)[Bc / 16][4], const float (&weights)[Bc / 8][4]) {
        UNROLL for (int i = 0; i < Bc / 16; i++) Mine::pack_weights(p[i], weights, i);
    }

    // Turns scores into weights. `marked` counts the tiles with mask tests.
    DEVICE void weigh(Mine &mine, float (&scores)[Bc / 8][4], float (&corr)[2], float scale, bool tested, u32 &marked) const {
        const float factor = mine.bend(scores, scale);
        if (tested) {
            phase_wait(located(marked), parity_of(marked));
            const u32 from = positions(marked) + mine.lane % 4 * 8;
            mine.hide(scores, [&](u32 (&pair)[2], u32 n) { load_shared(pair, from + n * 32); });
            marked++;
        }
        mine.weigh(scores, factor, corr);
    }

    // Adds values that are NaN or infinite, in a tile and step with the `n`-th marks, to the rows that see them, and replaces them by
    // zeros. All consumers find the same. `p` is packed again from the weights, so that it needs no registers here.
    DEVICE void add_odd(Mine &mine, const float (&weights)[Bc / 8][4], u32 (&p)[Bc / 16][4], u32 consumer, u32 batch, u32 tile,
                        u32 step, u32 n) const {
        phase_wait(checked(n), parity_of(n));
        u32 odd = 0;
        UNROLL for (u32 marker = 0; marker < MARKERS; marker++) odd |= load_shared(verdict(n, marker));
        if (!warp_uniform(odd)) return;
        const u32 values = v + step % STAGES * TILE_BYTES;
        mine.add_odd_values(weights, batch, tile * Bc, [&](u32 key, int j) {
            return load_shared(pair_in(values, KV_CHUNK, key, j));
        });
        clear_odd<Mine>(values, TILE_BYTES, consumer, CONSUMERS, ALL);
        pack(p, weights);
    }

    // A consumer, one warpgroup: computes 64 rows of each item.
    DEVICE void consume(u32 consumer) const {
        // With a scale of 0 the -inf of hidden keys would become NaN. `bend` applies a negative scale itself.
        const float scale = args.scale < 0.0f ? args.scale : larger(args.scale, 1.2e-38f);
        Mine mine(args);
        float scores[Bc / 8][4], corr[2];
        u32 p[Bc / 16][4], step = 0, marked = 0;
        if (consumer == CONSUMERS - 1) named_arrive(TURN, 256);
        for (u32 taken = 0; item_of(taken) < more.end_item; taken++) {
            const Place at = place(item_of(taken));
            mine.begin(at, Br, thread_x() / 32 * 16 - 64);
            phase_wait(q_full(), taken % 2);
            Sweep tiles = sweep(at);
            if (!tiles.done()) {
                phase_wait(k_full(step % STAGES), parity_of(step));
                wgmma_fence();
                multiply_keys(scores, consumer, step);
                wgmma_wait<0>();
                settle(scores);
                release(k_empty(step % STAGES));
                weigh(mine, scores, corr, scale, tiles.tested, marked);
                pack(p, scores);
                u32 before = named(tiles);
                for (tiles.advance(); !tiles.done(); tiles.advance()) {
                    if (before & TESTED) add_odd(mine, scores, p, consumer, at.batch, before & ~TESTED, step, marked - 1);
                    step++;
                    phase_wait(k_full(step % STAGES), parity_of(step));
                    named_sync(TURN + consumer, 256);
                    wgmma_fence();
                    multiply_keys(scores, consumer, step);
                    multiply_values(mine, p, step - 1);
                    named_arrive(TURN + (consumer + 1) % CONSUMERS, 256);
                    wgmma_wait<1>();
                    settle(scores);
                    release(k_empty(step % STAGES));
                    weigh(mine, scores, corr, scale, tiles.tested, marked);
                    not_before(mine.l[0] + mine.l[1]);
                    wgmma_wait<0>();
                    settle(mine.O);
                    release(v_empty((step - 1) % STAGES));
                    mine.scale_sums(corr);
                    pack(p, scores);
                    before = named(tiles);
                }
                if (before & TESTED) add_odd(mine, scores, p, consumer, at.batch, before & ~TESTED, step, marked - 1);
                multiply_values(mine, p, step);
                wgmma_wait<0>();
                settle(mine.O);
                release(v_empty(step % STAGES));
                step++;
            }
            release(q_empty());
            if (more.o)
                mine.finish(at, more.o, more.lse, more.sinks);
            else
                mine.merge(at);
        }
        // Consumes the last turn that another consumer gave, so that no arrival is left.
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
                phase_init(requested(stage), 1);
                phase_init(located(stage), MARKERS);
                phase_init(checked(stage), MARKERS);
            }
            phases_are_there();
        }
        barrier_or(false);
        const u32 warpgroup = warp_uniform(thread_x() / 128);
        if (warpgroup == 0) {
            registers_fewer<FEWER>();
            const u32 warp = warp_uniform(thread_x() / 32);
            if (warp != 0)
                mark(warp - 1);
            else if (elect_one())
                produce();
        } else {
            registers_more<MORE>();
            consume(warpgroup - 1);
        }
    }
};
