// The backward pass for Hopper: TMA copies tiles to shared memory, wgmma multiplies them there.
//
// - As in `backward/tiles.h`, a block has rows of one side, "fixed", and iterates over tiles of the other side, "moving". Each row
//   has two tensors: a query row q and d_o, a key k and v.
// - A block has three warpgroups. The first is the producer: it deallocates registers (setmaxnreg), and one thread of it issues all copies. The
//   other two are consumers with 64 fixed rows each.
// - S and dP are fixed · moving, and their fragments are the A fragments, in registers, of the products that the sums need.
// - The products of the sums of a tile run while those for S and dP of the next one are issued. The scalar work of one consumer
//   overlaps with the products of the other.
#pragma once
#include "backward/tiles.h"
#include "hopper.h"

// Tensors with the rows of a block, or with those that it multiplies at a time.
struct TensorPair {
    const TensorMap &first, &second;
};

// `NUMBERS_`: numbers that each moving row has besides its tensors. Two warps of the producer write them. `HELD`: tensors of the fixed
// rows, 0 to 2, that consumers hold in registers. With both operands in shared memory, products of 64 columns read as much of it as it
// can give.
template <typename T, int DIM, u32 NUMBERS_, int HELD> struct HopperBackward : BackwardTiles<T, DIM, 64, 4> {
    using Base = BackwardTiles<T, DIM, 64, 4>;
    using typename Base::Mine;
    using typename Base::Products;
    static constexpr u32 CONSUMERS = 2, ROWS = 64, FIXED = ROWS * CONSUMERS, STAGES = 3;
    static constexpr int THREADS = 128 * (1 + CONSUMERS);
    // A row in shared memory has 64 elements, 128 bytes. 64 rows of a tensor are such chunks, one behind the other.
    static constexpr u32 CHUNKS = DIM / 64, CHUNK = ROWS * 128, TENSOR_BYTES = CHUNKS * CHUNK, PAIR_BYTES = 2 * TENSOR_BYTES;
    // Behind the numbers of a stage there is a word from each warp that writes them.
    static constexpr u32 NUMBERS = NUMBERS_, WRITERS = NUMBERS ? 2 : 0, NUMBERS_BYTES = (NUMBERS * ROWS + WRITERS) * 4;
    static constexpr u32 SHARED_BYTES = (CONSUMERS + STAGES) * PAIR_BYTES + STAGES * NUMBERS_BYTES + (1 + 2 * STAGES) * 8;
    // Arrivals that free a stage: one for each warp of the consumers.
    static constexpr u32 READERS = 4 * CONSUMERS;
    // Named barriers: the threads of one consumer, the threads of both.
    static constexpr u32 OWN = 1, BOTH = 1 + CONSUMERS;
    using Sums = float[DIM / 8][4];
    using Packed = u32[ROWS / 16][4];
    // Fixed rows as A fragments.
    using Held = u32[HELD ? HELD : 1][DIM / 16][4];

    const HopperBackwardArguments &more;
    using Base::args;
    using Base::attend;
    using Base::lane;

    DEVICE explicit HopperBackward(const HopperBackwardArguments &more) : Base(more.backward), more(more) {}

    // Addresses in shared memory: the rows of a consumer, a stage, its numbers, and the phases.
    DEVICE static u32 fixed(u32 consumer) { return shared_base() + consumer * PAIR_BYTES; }
    DEVICE static u32 moving(u32 stage) { return fixed(CONSUMERS + stage); }
    DEVICE static u32 numbers(u32 stage) { return moving(STAGES) + stage * NUMBERS_BYTES; }
    DEVICE static u32 fixed_full() { return numbers(STAGES); }
    DEVICE static u32 full(u32 stage) { return fixed_full() + 8 + stage * 16; }
    DEVICE static u32 empty(u32 stage) { return full(stage) + 8; }
    // The stage of the `step`-th moving tile, and the parity of the phase in which it is filled.
    DEVICE static u32 stage_of(u32 step) { return step % STAGES; }
    DEVICE static u32 parity_of(u32 step) { return step / STAGES % 2; }

    // Starts copies of 64 rows of a head of two tensors.
    DEVICE static void copy_pair(u32 into, const TensorPair &from, u32 phase, u32 row, u32 head, u32 batch) {
        for (u32 c = 0; c < CHUNKS; c++) {
            copy_box(into + c * CHUNK, from.first, phase, c * 64, row, head, batch);
            copy_box(into + TENSOR_BYTES + c * CHUNK, from.second, phase, c * 64, row, head, batch);
        }
    }
    // The producer, one thread: issues all copies to shared memory. `moving_head` is the head of a moving tile.
    template <typename At, typename MovingHead>
    DEVICE static void produce(const At &at, u32 first, u32 head, const TensorPair &from, HeadTiles tiles,
                               const TensorPair &moving_from, MovingHead moving_head) {
        phase_arrive_expecting(fixed_full(), CONSUMERS * PAIR_BYTES);
        for (u32 c = 0; c < CONSUMERS; c++) copy_pair(fixed(c), from, fixed_full(), first + c * ROWS, head, at.batch);
        for (u32 step = 0; !tiles.done(); tiles.advance(), step++) {
            const u32 stage = stage_of(step);
            // For a new mbarrier, the phase before the first one counts as complete.
            phase_wait(empty(stage), parity_of(step) ^ 1);
            phase_arrive_expecting(full(stage), PAIR_BYTES);
            copy_pair(moving(stage), moving_from, full(stage), tiles.now.tile() * ROWS, moving_head(tiles), at.batch);
        }
    }

    // Splits the block into a producer and two consumers. `produce(warp)` is for each warp of the producer.
    template <typename Produce, typename Consume> DEVICE static void run(Produce produce, Consume consume) {
        if (thread_x() == 0) {
            phase_init(fixed_full(), 1);
            for (u32 stage = 0; stage < STAGES; stage++) {
                phase_init(full(stage), 1 + WRITERS);
                phase_init(empty(stage), READERS);
            }
            phases_are_there();
        }
        barrier_or(false);
        const u32 warpgroup = warp_uniform(thread_x() / 128);
        if (warpgroup == 0) {
            registers_fewer<24>();
            produce(warp_uniform(thread_x() / 32));
        } else {
            registers_more<240>();
            phase_wait(fixed_full(), 0);
            consume(warpgroup - 1);
        }
    }

    // Reads the tensors that this warp holds.
    DEVICE void hold(Held &held, u32 consumer) const {
        const u32 row = this->mine + lane % 16;
        UNROLL for (int tensor = 0; tensor < HELD; tensor++)
            UNROLL for (u32 i = 0; i < DIM / 16; i++) {
                const u32 column = i % 4 * 2 + lane / 16;
                const u32 rows = fixed(consumer) + tensor * TENSOR_BYTES + i / 4 * CHUNK;
                load_matrices(held[tensor][i], rows + row * 128 + ((column ^ row) & 7) * 16);
            }
    }
    // Starts products = rows of this consumer · moving rows, of one of both tensors.
    template <int tensor> DEVICE static void multiply(Products &products, const Held &held, u32 consumer, u32 stage) {
        const u64 left = matrix_at(fixed(consumer) + tensor * TENSOR_BYTES, 16);
        const u64 right = matrix_at(moving(stage) + tensor * TENSOR_BYTES, 16);
        UNROLL for (u32 i = 0; i < DIM / 16; i++) {
            // 16 elements of a row are 32 bytes.
            const u32 from = (i / 4 * CHUNK + i % 4 * 32) / 16;
            if (tensor < HELD)
                Wgmma<T, ROWS>::by_columns(products, held[tensor < HELD ? tensor : 0][i], right + from, i != 0);
            else
                Wgmma<T, ROWS>::shared(products, left + from, right + from, i != 0);
        }
    }
    // Starts sums += weights · moving rows.
    DEVICE static void add(Sums &sums, const Packed &weights, u32 moving) {
        const u64 right = matrix_at(moving, CHUNK);
        UNROLL for (u32 i = 0; i < ROWS / 16; i++) Wgmma<T, DIM>::registers(sums, weights[i], right + i * 16 * 128 / 16);
    }
    DEVICE static void pack(Packed &packed, const Products &weights) {
        UNROLL for (int i = 0; i < int(ROWS / 16); i++) Mine::pack_weights(packed[i], weights, i);
    }

    // Waits for the moving tile of a step and computes S and dP. The sums of the tile before are complete then; its stage is released.
    DEVICE static void multiply_tile(Products &scores, Products &dp, const Held &held, u32 consumer, u32 step) {
        const u32 stage = stage_of(step);
        phase_wait(full(stage), parity_of(step));
        wgmma_fence();
        multiply<0>(scores, held, consumer, stage);
        multiply<1>(dp, held, consumer, stage);
        wgmma_commit();
        wgmma_wait<0>();
        settle(scores);
        settle(dp);
        if (step > 0) release(empty(stage_of(step - 1)));
    }
};

// dK and dV: a block has keys and iterates over the query heads that read them, and over their rows.
template <typename T, int DIM> struct HopperKeys : HopperBackward<T, DIM, 5, DIM == 64 ? 2 : 0> {
    using Base = HopperBackward<T, DIM, 5, DIM == 64 ? 2 : 0>;
    using typename Base::Held;
    using typename Base::Mine;
    using typename Base::Packed;
    using typename Base::Products;
    using typename Base::Sums;
    static constexpr u32 ROWS = Base::ROWS, STAGES = Base::STAGES, CHUNK = Base::CHUNK, TENSOR_BYTES = Base::TENSOR_BYTES;
    using Base::args;
    using Base::attend;
    using Base::lane;
    using Base::more;

    DEVICE explicit HopperKeys(const HopperBackwardArguments &more) : Base(more) {}

    // Number `which` of row `n` of a stage.
    DEVICE static u32 number_at(u32 stage, u32 which, u32 n) { return Base::numbers(stage) + (which * ROWS + n) * 4; }
    // What a writer says of a tile: it needs mask tests; one of the writer's rows counts for no key; logits are not scores · scale.
    static constexpr u32 EDGE = 1, BLIND = 2, BENT = 4;
    DEVICE static u32 kind_at(u32 stage, u32 writer) { return number_at(stage, Base::NUMBERS, writer); }

    // A writer, one warp of the producer: writes what pairs need of 32 rows of each tile.
    DEVICE void write_numbers(u32 writer, const KeyPlace &at, HeadTiles tiles) const {
        const u32 n = writer * 32 + lane;
        for (u32 step = 0; !tiles.done(); tiles.advance(), step++) {
            const u32 stage = Base::stage_of(step);
            const RowNumbers<T> row(args, at.batch, at.mask_class, {tiles.now.tile() * ROWS + n, tiles.head});
            phase_wait(Base::empty(stage), Base::parity_of(step) ^ 1);
            const u32 words[5] = {bits_of(row.lse), bits_of(row.lift), bits_of(row.delta), row.span.lo, row.span.hi};
            UNROLL for (u32 i = 0; i < 5; i++) store_shared(number_at(stage, i, n), words[i]);
            const bool edge = !tiles.now.full() || (tiles.now.tile() + 1) * ROWS > attend.rows;
            const u32 kind = (edge ? EDGE : 0) | (vote(row.span.lo >= row.span.hi) ? BLIND : 0) | (this->bent ? BENT : 0);
            if (lane == 0) store_shared(kind_at(stage, writer), kind);
            release(Base::full(stage));
        }
    }

    // Whether row `n` of a stage sees a key position.
    DEVICE static bool sees(u32 stage, u32 n, u32 position) {
        return position >= load_shared(number_at(stage, 3, n)) && position < load_shared(number_at(stage, 4, n));
    }

    // S becomes P and dP becomes dS.
    template <bool TESTED, bool IS_BENT>
    DEVICE void weigh_tile(Products &p, Products &ds, u32 stage, u32 first_key) const {
        const u32 positions[2] = {TESTED ? position_of(attend, first_key) : 0, TESTED ? position_of(attend, first_key + 8) : 0};
        UNROLL for (int group = 0; group < int(ROWS / 8); group++) {
            const u32 n = 8 * group + lane % 4 * 2;
            u32 lse[2], lift[2], delta[2];
            load_shared(lse, number_at(stage, 0, n));
            load_shared(lift, number_at(stage, 1, n));
            load_shared(delta, number_at(stage, 2, n));
            UNROLL for (int column = 0; column < 2; column++)
                UNROLL for (int half = 0; half < 2; half++) {
                    const int i = 2 * half + column;
                    const float add = TESTED && !sees(stage, n + column, positions[half]) ? -INFINITE : 0.0f;
                    this->template weigh_as<false>(IS_BENT, p[group][i], ds[group][i], float_of(lse[column]),
                                                   float_of(lift[column]), float_of(delta[column]), add);
                }
        }
    }

    // A consumer, one warpgroup: sums for 64 keys. It needs nearly all of its registers, so the writers iterate over the list for it.
    DEVICE void consume(u32 consumer, const KeyPlace &at, u32 tiles) const {
        const u32 first_key = at.first + consumer * ROWS + this->mine + lane / 4;
        Sums dk, dv;
        Products p, ds;
        Packed packed_p, packed_ds;
        Held held;
        this->hold(held, consumer);
        float shrink[2] = {1.0f, 1.0f};
        UNROLL for (int j = 0; j < DIM / 8; j++)
            UNROLL for (int i = 0; i < 4; i++) dk[j][i] = dv[j][i] = 0.0f;

        u32 step = 0;
        do {
            Base::multiply_tile(p, ds, held, consumer, step);
            settle(dv);
            settle(dk);
            const u32 stage = Base::stage_of(step), q_from = Base::moving(stage), d_o_from = q_from + TENSOR_BYTES;
            const u32 kind = warp_uniform(load_shared(kind_at(stage, 0)) | load_shared(kind_at(stage, 1)));
            // Both consumers find the same. In a tile without tests, a row that counts for no key has only logits of -inf; its d_o may
            // be NaN.
            const bool odd = kind & EDGE ? odd_in<Mine>(q_from, Base::PAIR_BYTES, Base::OWN + consumer) : kind & BLIND;
            const bool tested = kind & EDGE || odd;
            if (kind & BENT)
                weigh_tile<true, true>(p, ds, stage, first_key);
            else if (tested)
                weigh_tile<true, false>(p, ds, stage, first_key);
            else
                weigh_tile<false, false>(p, ds, stage, first_key);
            this->template fit<DIM>(ds, dk, shrink);
            if (odd) {
                const auto seen = [&](u32 n, int half) { return sees(stage, n, position_of(attend, first_key + 8 * half)); };
                this->template add_odd<DIM>(dv, p, [&](u32 n, u32 j) { return load_shared(pair_in(d_o_from, CHUNK, n, j)); }, seen);
                this->template add_odd<DIM>(dk, ds, [&](u32 n, u32 j) { return load_shared(pair_in(q_from, CHUNK, n, j)); }, seen);
                clear_odd<Mine>(q_from, Base::PAIR_BYTES, consumer, Base::CONSUMERS, Base::BOTH);
            }
            Base::pack(packed_p, p);
            Base::pack(packed_ds, ds);
            settle(dv);
            settle(dk);
            settle(packed_p);
            settle(packed_ds);
            wgmma_fence();
            Base::add(dv, packed_p, d_o_from);
            wgmma_commit();
            Base::add(dk, packed_ds, q_from);
            wgmma_commit();
            // The next products need the registers of P.
            wgmma_wait<1>();
        } while (++step < tiles);
        wgmma_wait<0>();
        settle(dv);
        settle(dk);
        UNROLL for (int half = 0; half < 2; half++) {
            const u32 key = first_key + 8 * half;
            if (key >= attend.keys) continue;
            const u64 into = at.batch * args.d_kv.batch_stride + key * args.d_kv.row_stride + at.kv_head * args.d_kv.head_stride;
            this->template write<DIM>(args.dk + into, dk, half, 0, Lift<T>::BACK / shrink[half], args.scale);
            this->template write<DIM>(args.dv + into, dv, half, 0, Lift<T>::BACK, 1.0f);
        }
    }

    DEVICE void run() const {
        const KeyPlace at(attend, Base::FIXED);
        const HeadTiles tiles(tiles_of(attend, at.mask_class, at.first / Base::FIXED), args.readers[at.kv_head],
                              args.readers[at.kv_head + 1]);
        if (tiles.done()) return;
        const auto produce = [&](u32 warp) {
            if (warp == 0) {
                if (!elect_one()) return;
                Base::produce(at, at.first, at.kv_head, {more.k, more.v}, tiles, {more.q, more.d_o},
                              [](const HeadTiles &tile) { return tile.head; });
            } else if (warp <= Base::WRITERS) {
                write_numbers(warp - 1, at, tiles);
            }
        };
        Base::run(produce, [&](u32 consumer) { consume(consumer, at, tiles.count()); });
    }
};

// dQ: a block has query rows and iterates over keys.
template <typename T, int DIM> struct HopperQueries : HopperBackward<T, DIM, 0, DIM == 64 ? 2 : 1> {
    using Base = HopperBackward<T, DIM, 0, DIM == 64 ? 2 : 1>;
    using typename Base::Held;
    using typename Base::Mine;
    using typename Base::Packed;
    using typename Base::Products;
    using typename Base::Sums;
    static constexpr u32 KEYS = Base::ROWS, STAGES = Base::STAGES, CHUNK = Base::CHUNK, TENSOR_BYTES = Base::TENSOR_BYTES;
    using Base::args;
    using Base::attend;
    using Base::lane;
    using Base::more;

    DEVICE explicit HopperQueries(const HopperBackwardArguments &more) : Base(more) {}

    DEVICE static bool sees(const RowNumbers<T> &row, u32 position) {
        return position >= row.span.lo && position < row.span.hi;
    }

    // S becomes P and dP becomes dS.
    template <bool TESTED, bool IS_BENT>
    DEVICE void weigh_tile(Products &p, Products &ds, const RowNumbers<T> (&rows)[2], u32 first_key) const {
        UNROLL for (int group = 0; group < int(KEYS / 8); group++)
            UNROLL for (int column = 0; column < 2; column++) {
                const u32 position = TESTED ? position_of(attend, first_key + 8 * group + lane % 4 * 2 + column) : 0;
                UNROLL for (int half = 0; half < 2; half++) {
                    const int i = 2 * half + column;
                    const float add = TESTED && !sees(rows[half], position) ? -INFINITE : 0.0f;
                    this->template weigh_as<false>(IS_BENT, p[group][i], ds[group][i],
                                                   rows[half].lse, rows[half].lift, rows[half].delta, add);
                }
            }
    }

    // A consumer, one warpgroup: sums for 64 query rows.
    DEVICE void consume(u32 consumer, const Place &at, u32 first_row, HeadTiles tiles) const {
        TileRow rows[2];
        RowNumbers<T> numbers[2];
        UNROLL for (int half = 0; half < 2; half++) {
            rows[half] = {first_row + consumer * Base::ROWS + this->mine + lane / 4 + 8 * half, at.head};
            numbers[half] = RowNumbers<T>(args, at.batch, at.mask_class, rows[half]);
        }
        Sums dq;
        Products p, ds;
        Packed packed;
        Held held;
        this->hold(held, consumer);
        float shrink[2] = {1.0f, 1.0f};
        UNROLL for (int j = 0; j < DIM / 8; j++)
            UNROLL for (int i = 0; i < 4; i++) dq[j][i] = 0.0f;

        for (u32 step = 0; !tiles.done(); tiles.advance(), step++) {
            Base::multiply_tile(p, ds, held, consumer, step);
            settle(dq);
            const u32 k_from = Base::moving(Base::stage_of(step)), first_key = tiles.now.tile() * KEYS;
            const bool tested = !tiles.now.full() || first_key + KEYS > attend.keys;
            // Both consumers find the same.
            const bool odd = tested && odd_in<Mine>(k_from, TENSOR_BYTES, Base::OWN + consumer);
            if (this->bent)
                weigh_tile<true, true>(p, ds, numbers, first_key);
            else if (tested)
                weigh_tile<true, false>(p, ds, numbers, first_key);
            else
                weigh_tile<false, false>(p, ds, numbers, first_key);
            this->template fit<DIM>(ds, dq, shrink);
            if (odd) {
                this->template add_odd<DIM>(
                    dq, ds, [&](u32 n, u32 j) { return load_shared(pair_in(k_from, CHUNK, n, j)); },
                    [&](u32 n, int half) { return sees(numbers[half], position_of(attend, first_key + n)); });
                clear_odd<Mine>(k_from, TENSOR_BYTES, consumer, Base::CONSUMERS, Base::BOTH);
            }
            Base::pack(packed, ds);
            settle(dq);
            settle(packed);
            wgmma_fence();
            Base::add(dq, packed, k_from);
            wgmma_commit();
        }
        wgmma_wait<0>();
        settle(dq);
        UNROLL for (int half = 0; half < 2; half++) {
            // Rows behind the last, and rows without visible keys: their sums may be anything.
            if (numbers[half].span.lo >= numbers[half].span.hi) continue;
            float *into = args.dq + ((u64(at.batch) * attend.rows + rows[half].row) * attend.heads + at.head) * attend.dim;
            this->template write<DIM>(into, dq, half, 0, Lift<T>::BACK / shrink[half], args.scale);
        }
    }

    DEVICE void run() const {
        // The last tiles come first: under a causal mask they have the most keys.
        const Place at(attend, attend.first_tile + grid_x() - 1 - block_x(), attend.first_head + block_y(),
                       attend.first_batch + block_z());
        const u32 first_row = at.tile * Base::FIXED;
        const HeadTiles tiles(at.tiles(attend), at.head, at.head + 1);
        if (tiles.done()) return;
        const auto produce = [&](u32 warp) {
            if (warp == 0 && elect_one())
                Base::produce(at, first_row, at.head, {more.q, more.d_o}, tiles, {more.k, more.v},
                              [&](const HeadTiles &) { return at.kv_head; });
        };
        Base::run(produce, [&](u32 consumer) { consume(consumer, at, first_row, tiles); });
    }
};
