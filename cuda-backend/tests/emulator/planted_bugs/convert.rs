//! Bugs in conversions.

use kyklos::Dtype;
use kyklos::backend::Scales;

use super::{Fault, Planted, fault};
use crate::convert::{judge_codes, judge_types};

const PACKED: &str = "T::pack(x[2 * i], x[2 * i + 1])";

const OF_TYPES: [Fault; 12] = [
    fault("elements swapped where they are written", "convert.h", PACKED, "T::pack(x[2 * i + 1], x[2 * i])"),
    fault(
        "elements swapped where they are read",
        "convert.h",
        "i % 2 ? T::high(unit.words[i / 2])",
        "i % 2 == 0 ? T::high(unit.words[i / 2])",
    ),
    fault("a sign is lost", "convert.h", PACKED, "T::pack(magnitude(x[2 * i]), x[2 * i + 1])"),
    fault(
        "cut off, not rounded",
        "convert.h",
        PACKED,
        "T::pack(float_of(bits_of(x[2 * i]) & 0xffffe000), x[2 * i + 1])",
    ),
    fault("ties go up", "convert.h", PACKED, "T::pack(float_of(bits_of(x[2 * i]) | 1), x[2 * i + 1])"),
    fault(
        "what is too large becomes the largest number",
        "convert.h",
        PACKED,
        "T::pack(x[2 * i] > 65504.0f ? 65504.0f : x[2 * i], x[2 * i + 1])",
    ),
    fault("NaN becomes a number", "convert.h", PACKED, "T::pack(larger(x[2 * i], -65504.0f), x[2 * i + 1])"),
    fault(
        "small numbers become 0",
        "convert.h",
        PACKED,
        "T::pack(magnitude(x[2 * i]) < 6.1e-5f ? 0.0f : x[2 * i], x[2 * i + 1])",
    ),
    fault("the end is not looked for", "convert.h", "if (eight >= args.eights) return;", ""),
    fault(
        "every block takes what the first one takes",
        "convert.h",
        "u64(block_x()) * CONVERT_THREADS + thread_x()",
        "thread_x()",
    ),
    fault(
        "the first half of eight is read twice",
        "convert.h",
        "{units[0], units[1]}",
        "{units[0], units[0]}",
    ),
    fault(
        "the first half of eight is written twice",
        "convert.h",
        "2 * eight + 1] = both[1]",
        "2 * eight + 1] = both[0]",
    ),
];

const OF_CODES: [Fault; 29] = [
    fault(
        "what is infinite counts for a scale",
        "codes.h",
        "magnitude(x) < INFINITE ? magnitude(x) : 0.0f",
        "magnitude(x)",
    ),
    fault("a 128th of the largest", "codes.h", "largest / 127.0f", "largest / 128.0f"),
    fault("by the inverse of 127", "codes.h", "largest / 127.0f", "largest * (1.0f / 127.0f)"),
    fault(
        "scales that are subnormal are kept",
        "codes.h",
        "return scale < 1.17549435e-38f ? 0.0f : scale;",
        "return scale;",
    ),
    fault(
        "a product with the inverse for a quotient",
        "codes.h",
        "fused(fused(-about, scale, x), inverse, about)",
        "about",
    ),
    fault("cut off, not rounded", "codes.h", "bits_of(quotient + 12582912.0f)", "u32(i32(quotient))"),
    fault("ties go up", "codes.h", "bits_of(quotient + 12582912.0f)", "u32(i32(quotient + 128.5f) - 128)"),
    fault(
        "a sign is lost",
        "codes.h",
        "bits_of(quotient + 12582912.0f)",
        "bits_of(magnitude(quotient) + 12582912.0f)",
    ),
    fault(
        "what is not finite has a code as if it were",
        "codes.h",
        "magnitude(x) < INFINITE ? code : CODE_NOT_FINITE",
        "code",
    ),
    fault(
        "what was not finite comes back as a number",
        "codes.h",
        "code == CODE_NOT_FINITE ? float_of(0x7fc00000) : ",
        "",
    ),
    fault("codes come back without a sign", "codes.h", "float(i32(code << 24) >> 24)", "float(code)"),
    fault("codes in the wrong order", "codes.h", "<< i % 4 * 8;", "<< (3 - i % 4) * 8;"),
    fault(
        "the maximum of a row without half of it",
        "codes.h",
        "apart = args.lanes / 2",
        "apart = args.lanes / 4",
    ),
    fault("lanes behind the end of a row read on", "codes.h", " && lane < args.dim / 8;", ";"),
    fault(
        "rows behind the last one",
        "codes.h",
        "row < u64(args.batch) * args.tokens * args.heads && lane",
        "lane",
    ),
    fault(
        "lanes behind the last row are gone",
        "codes.h",
        "        float x[8] = {}, scales[8], inverses[8], largest",
        "        if (!there) return;\n        float x[8] = {}, scales[8], inverses[8], largest",
    ),
    fault(
        "scales of rows one too far",
        "codes.h",
        "args.scales[row] = scale;",
        "args.scales[row + 1] = scale;",
    ),
    fault(
        "all heads have the scale of the first one",
        "codes.h",
        "= args.scales[row];",
        "= args.scales[row / args.heads * args.heads];",
    ),
    fault("a short group of tokens reads on", "codes.h", "there && token + i * APART < tokens", "there"),
    fault("channels behind the last one", "codes.h", "there = column < stride;", "there = true;"),
    fault(
        "scales of the first batch entry",
        "codes.h",
        "(u64(batch) * groups + group) * stride",
        "u64(group) * stride",
    ),
    fault(
        "scales of the first group of tokens",
        "codes.h",
        "(u64(batch) * groups + group) * stride",
        "u64(batch) * groups * stride",
    ),
    fault(
        "batch entries begin with a group of tokens",
        "codes.h",
        "u64(batch) * args.tokens + first",
        "u64(batch) * groups * TOKENS + first",
    ),
    fault(
        "tokens of a thread lie side by side",
        "codes.h",
        "eight + u64(i * APART) * stride",
        "eight + u64(i) * stride",
    ),
    fault(
        "the maximum of every second token",
        "codes.h",
        "most[e] = larger(most[e], shuffle_xor(most[e], LANES));",
        "",
    ),
    fault(
        "the maximum without a warp's tokens",
        "codes.h",
        "int warp = 0; warp < WARPS",
        "int warp = 1; warp < WARPS",
    ),
    fault(
        "no barrier before what warps found is read",
        "codes.h",
        "barrier_or(false);\n        // Half",
        "// Half",
    ),
    fault(
        "no barrier before scales are read",
        "codes.h",
        "barrier_or(false);\n        UNROLL for (int e = 0; e < 8; e++) {\n            most[e] = float_of",
        "UNROLL for (int e = 0; e < 8; e++) {\n            most[e] = float_of",
    ),
    fault(
        "the scale of another channel",
        "codes.h",
        "float_of(load_shared(place(0, e)))",
        "float_of(load_shared(place(0, 0)))",
    ),
];

const TYPES: &str = "#include \"convert.h\"\n\
    KERNEL(convert_f32_f16, ConvertArguments, CONVERT_THREADS) { convert<F32, F16>(args); }\n\
    KERNEL(convert_f16_f32, ConvertArguments, CONVERT_THREADS) { convert<F16, F32>(args); }\n";

pub(super) fn types() -> Planted {
    let judge = Box::new(|program: &_, timing| judge_types(program, Dtype::F16, timing));
    Planted { name: "types", instance: TYPES, faults: &OF_TYPES, judge }
}

const CODES: &str = "#include \"codes.h\"\n\
    KERNEL(to_codes_rows_f32, CodesArguments, RowCodes::THREADS) { RowCodes(args).make<F32>(args); }\n\
    KERNEL(from_codes_rows_f32, CodesArguments, RowCodes::THREADS) { RowCodes(args).read<F32>(args); }\n\
    KERNEL(to_codes_channels_f32, CodesArguments, ChannelCodes::THREADS) { ChannelCodes(args).make<F32>(args); }\n\
    KERNEL(from_codes_channels_f32, CodesArguments, ChannelCodes::THREADS) { ChannelCodes(args).read<F32>(args); }\n";

pub(super) fn codes() -> Planted {
    let judge = Box::new(|program: &_, timing| {
        [Scales::Rows, Scales::Channels]
            .into_iter()
            .try_for_each(|of| judge_codes(program, of, Dtype::F32, [2, 150, 3, 24], timing))
    });
    Planted { name: "codes", instance: CODES, faults: &OF_CODES, judge }
}
