// All kernels. The host finds them by these names; `src/kernels/catalog.rs` has their tile shapes and shared memory.
#include "attend_f32.h"
#include "backward/bias.h"
#include "backward/f32.h"
#include "backward/keys.h"
#include "backward/queries.h"
#include "codes.h"
#include "decode.h"
#include "repack.h"
#include "row_stats.h"
#include "state.h"
#if HOPPER
#include "attend_hopper.h"
#include "backward_hopper.h"
#endif

// One macro call per instance, so that a build can leave out the others.
#define ATTEND(type, name, dim) \
    KERNEL(attend_##name##_##dim, AttendArguments, (Attention<type, dim>::THREADS)) { Attention<type, dim>(args, Place(args)).run(); }
#define ATTEND_DIMS(type, name) \
    ATTEND(type, name, 64) ATTEND(type, name, 96) ATTEND(type, name, 128) ATTEND(type, name, 192) ATTEND(type, name, 256)

ATTEND_DIMS(Bf16, bf16)
ATTEND_DIMS(F16, f16)

#define DECODE(type, name, dim) \
    KERNEL(decode_##name##_##dim, DecodeArguments, (Decode<type, dim>::THREADS)) { Decode<type, dim>(args).run(); }
#define DECODE_DIMS(type, name) DECODE(type, name, 64) DECODE(type, name, 128) DECODE(type, name, 256)

DECODE_DIMS(Bf16, bf16)
DECODE_DIMS(F16, f16)
KERNEL(decode_f32, DecodeArguments, DecodeF32::THREADS) { DecodeF32::run(args); }

#if HOPPER
// One block for each multiprocessor. Without that number some versions of ptxas ignore setmaxnreg.
#define HOPPER_ATTEND(name, dim, keys, consumers, type) \
    KERNEL(name##_##dim, HopperArguments, (Hopper<type, dim, keys, consumers>::THREADS), 1) { \
        Hopper<type, dim, keys, consumers>(args).run(); \
    }
#define HOPPER_DIMS(type, name) \
    HOPPER_ATTEND(hopper_##name, 64, 128, 3, type) HOPPER_ATTEND(hopper_##name, 128, 128, 2, type) \
    HOPPER_ATTEND(hopper_##name, 192, 96, 2, type) HOPPER_ATTEND(hopper_##name, 256, 80, 2, type)
#define HOPPER_WIDE_DIMS(type, name) HOPPER_ATTEND(hopper_wide_##name, 128, 176, 2, type)

HOPPER_DIMS(Bf16, bf16)
HOPPER_DIMS(F16, f16)
HOPPER_WIDE_DIMS(Bf16, bf16)
HOPPER_WIDE_DIMS(F16, f16)

#define HOPPER_BACKWARD(Kind, kind, type, name, dim) \
    KERNEL(hopper_##kind##_##name##_##dim, HopperBackwardArguments, (Hopper##Kind<type, dim>::THREADS), 1) { \
        Hopper##Kind<type, dim>(args).run(); \
    }
#define HOPPER_KEYS_DIMS(type, name) \
    HOPPER_BACKWARD(Keys, keys, type, name, 64) HOPPER_BACKWARD(Keys, keys, type, name, 128)
#define HOPPER_QUERIES_DIMS(type, name) \
    HOPPER_BACKWARD(Queries, queries, type, name, 64) HOPPER_BACKWARD(Queries, queries, type, name, 128)

HOPPER_KEYS_DIMS(Bf16, bf16)
HOPPER_KEYS_DIMS(F16, f16)
HOPPER_QUERIES_DIMS(Bf16, bf16)
HOPPER_QUERIES_DIMS(F16, f16)
#endif

#define BACKWARD(type, name, dim) \
    KERNEL(backward_queries_##name##_##dim, BackwardArguments, (BackwardQueries<type, dim>::THREADS), \
           (BackwardQueries<type, dim>::BLOCKS)) { \
        BackwardQueries<type, dim>(args).run(); \
    } \
    KERNEL(backward_keys_##name##_##dim, BackwardArguments, (BackwardKeys<type, dim>::THREADS)) { \
        BackwardKeys<type, dim>(args).run(); \
    } \
    KERNEL(backward_bias_##name##_##dim, BackwardArguments, (BackwardBias<type, dim>::THREADS)) { \
        BackwardBias<type, dim>(args).run(); \
    }
#define BACKWARD_DIMS(type, name) \
    BACKWARD(type, name, 64) BACKWARD(type, name, 96) BACKWARD(type, name, 128) BACKWARD(type, name, 192) \
    BACKWARD(type, name, 256)

BACKWARD_DIMS(Bf16, bf16)
BACKWARD_DIMS(F16, f16)

KERNEL(attend_f32, AttendArguments, AttentionF32::THREADS) { AttentionF32::run(args); }

KERNEL(backward_queries_f32, BackwardArguments, BackwardF32::THREADS) { BackwardF32::queries(args); }
KERNEL(backward_keys_f32, BackwardArguments, BackwardF32::THREADS) { BackwardF32::keys(args); }
KERNEL(backward_bias_f32, BackwardArguments, BackwardF32::THREADS) { BackwardF32::bias(args); }

KERNEL(row_stats_f32, RowStatsArguments, ROW_STATS_THREADS) { row_stats<F32>(args); }
KERNEL(row_stats_f16, RowStatsArguments, ROW_STATS_THREADS) { row_stats<F16>(args); }
KERNEL(row_stats_bf16, RowStatsArguments, ROW_STATS_THREADS) { row_stats<Bf16>(args); }
KERNEL(clear_words, ClearArguments, CLEAR_THREADS) { clear(args); }

KERNEL(reset_state, StateArguments, StateRow::THREADS) { reset(args); }
KERNEL(merge_states, StateArguments, StateRow::THREADS) { merge(args); }
// With a bound for the blocks: without one, ptxas saves registers and reads fewer parts at a time.
KERNEL(merge_parts, PartsArguments, StateRow::THREADS, 1) { Parts(args).run(); }
KERNEL(finalize_f32, StateArguments, StateRow::THREADS) { finalize<F32>(args); }
KERNEL(finalize_f16, StateArguments, StateRow::THREADS) { finalize<F16>(args); }
KERNEL(finalize_bf16, StateArguments, StateRow::THREADS) { finalize<Bf16>(args); }

KERNEL(repack, RepackArguments, Repack::THREADS) { Repack::run<false>(args); }
KERNEL(accumulate, RepackArguments, Repack::THREADS) { Repack::run<true>(args); }

KERNEL(convert_f32_f16, ConvertArguments, CONVERT_THREADS) { convert<F32, F16>(args); }
KERNEL(convert_f32_bf16, ConvertArguments, CONVERT_THREADS) { convert<F32, Bf16>(args); }
KERNEL(convert_f16_f32, ConvertArguments, CONVERT_THREADS) { convert<F16, F32>(args); }
KERNEL(convert_bf16_f32, ConvertArguments, CONVERT_THREADS) { convert<Bf16, F32>(args); }

#define CODES(type, name) \
    KERNEL(to_codes_rows_##name, CodesArguments, RowCodes::THREADS) { RowCodes(args).make<type>(args); } \
    KERNEL(from_codes_rows_##name, CodesArguments, RowCodes::THREADS) { RowCodes(args).read<type>(args); } \
    KERNEL(to_codes_channels_##name, CodesArguments, ChannelCodes::THREADS) { ChannelCodes(args).make<type>(args); } \
    KERNEL(from_codes_channels_##name, CodesArguments, ChannelCodes::THREADS) { ChannelCodes(args).read<type>(args); }

CODES(F32, f32)
CODES(F16, f16)
CODES(Bf16, bf16)
