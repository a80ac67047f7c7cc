//! Planted bugs in conversions.

use kyklos::Dtype;
use kyklos::backend::Scales;

use super::{Bug, Planted, bug};
use crate::convert::{judge_codes, judge_types};

const PACKED: &str = "T::pack(x[2 * i], x[2 * i + 1])";

const OF_TYPES: [Bug; 14] = [
    bug("elements swapped where they are written", "convert.h", PACKED, "T::pack(x[2 * i + 1], x[2 * i])"),
    bug(
        "elements swapped where they are read",
        "convert.h",
        "i % 2 ? T::high(unit.words[i / 2])",
        "i % 2 == 0 ? T::high(unit.words[i / 2])",
    ),
    bug("a sign is lost", "convert.h", PACKED, "T::pack(magnitude(x[2 * i]), x[2 * i + 1])"),
    bug(
        "cut off, not rounded",
        "convert.h",
        PACKED,
        "T::pack(float_of(bits_of(x[2 * i]) & 0xffffe000), x[2 * i + 1])",
    ),
    bug("ties go up", "convert.h", PACKED, "T::pack(float_of(bits_of(x[2 * i]) | 1), x[2 * i + 1])"),
    bug(
        "a value that is too large becomes the largest number",
        "convert.h",
        PACKED,
        "T::pack(x[2 * i] > 65504.0f ? 65504.0f : x[2 * i], x[2 * i + 1])",
    ),
    bug("NaN becomes a number", "convert.h", PACKED, "T::pack(larger(x[2 * i], -65504.0f), x[2 * i + 1])"),
    bug(
        "small numbers become 0",
        "convert.h",
        PACKED,
        "T::pack(magnitude(x[2 * i]) < 6.1e-5f ? 0.0f : x[2 * i], x[2 * i + 1])",
    ),
    bug("the end of the elements is not checked", "convert.h", "if (eight >= args.eights) return;", ""),
    bug(
        "every block converts the elements of the first one",
        "convert.h",
        "u64(block_x()) * CONVERT_THREADS + thread_x()",
        "thread_x()",
    ),
    bug("the first half of eight is read twice", "convert.h", "{units[0], units[1]}", "{units[0], units[0]}"),
    bug(
        "the first half of eight is written twice",
        "convert.h",
        "2 * eight + 1] = both[1]",
        "2 * eight + 1] = both[0]",
    ),
    bug("the first number beyond f16 is not reported", "convert.h", "65520.0f", "65536.0f"),
    bug("infinity is reported", "convert.h", " && magnitude(x) < INFINITE", ""),
];

const OF_CODES: [Bug; 29] = [
    bug(
        "an infinite element counts for a scale",
        "codes.h",
        "magnitude(x) < INFINITE ? magnitude(x) : 0.0f",
        "magnitude(x)",
    ),
    bug("a scale is a 128th of the largest magnitude", "codes.h", "largest / 127.0f", "largest / 128.0f"),
    bug(
        "a scale is a product with the inverse of 127",
        "codes.h",
        "largest / 127.0f",
        "largest * (1.0f / 127.0f)",
    ),
    bug(
        "scales that are subnormal are kept",
        "codes.h",
        "return scale < 1.17549435e-38f ? 0.0f : scale;",
        "return scale;",
    ),
    bug(
        "a product with the inverse instead of a quotient",
        "codes.h",
        "fused(fused(-about, scale, x), inverse, about)",
        "about",
    ),
    bug("cut off, not rounded", "codes.h", "bits_of(quotient + 12582912.0f)", "u32(i32(quotient))"),
    bug("ties go up", "codes.h", "bits_of(quotient + 12582912.0f)", "u32(i32(quotient + 128.5f) - 128)"),
    bug(
        "a sign is lost",
        "codes.h",
        "bits_of(quotient + 12582912.0f)",
        "bits_of(magnitude(quotient) + 12582912.0f)",
    ),
    bug(
        "an element that is not finite gets a code of a number",
        "codes.h",
        "magnitude(x) < INFINITE ? code : CODE_NOT_FINITE",
        "code",
    ),
    bug(
        "the code of elements that are not finite comes back as a number",
        "codes.h",
        "code == CODE_NOT_FINITE ? float_of(0x7fc00000) : ",
        "",
    ),
    bug("codes come back without a sign", "codes.h", "float(i32(code << 24) >> 24)", "float(code)"),
    bug("codes in the wrong order", "codes.h", "<< i % 4 * 8;", "<< (3 - i % 4) * 8;"),
    bug("the maximum of half of a row", "codes.h", "apart = args.lanes / 2", "apart = args.lanes / 4"),
    bug("lanes behind the end of a row read on", "codes.h", " && lane < args.dim / 8;", ";"),
    bug(
        "rows behind the last one are written",
        "codes.h",
        "row < u64(args.batch) * args.tokens * args.heads && lane",
        "lane",
    ),
    bug(
        "lanes behind the last row take no part in shuffles",
        "codes.h",
        "        float x[8] = {}, scales[8], inverses[8], largest",
        "        if (!there) return;\n        float x[8] = {}, scales[8], inverses[8], largest",
    ),
    bug(
        "scales of rows one too far",
        "codes.h",
        "args.scales[row] = scale;",
        "args.scales[row + 1] = scale;",
    ),
    bug(
        "all heads have the scale of the first one",
        "codes.h",
        "= args.scales[row];",
        "= args.scales[row / args.heads * args.heads];",
    ),
    bug("a short group of tokens reads on", "codes.h", "there && token + i * APART < tokens", "there"),
    bug("channels behind the last one", "codes.h", "there = column < stride;", "there = true;"),
    bug(
        "scales of the first batch entry",
        "codes.h",
        "(u64(batch) * groups + group) * stride",
        "u64(group) * stride",
    ),
    bug(
        "scales of the first group of tokens",
        "codes.h",
        "(u64(batch) * groups + group) * stride",
        "u64(batch) * groups * stride",
    ),
    bug(
        "batch entries begin with a group of tokens",
        "codes.h",
        "u64(batch) * args.tokens + first",
        "u64(batch) * groups * TOKENS + first",
    ),
    bug(
        "the tokens of a thread are adjacent",
        "codes.h",
        "eight + u64(i * APART) * stride",
        "eight + u64(i) * stride",
    ),
    bug(
        "the maximum of every second token",
        "codes.h",
        "most[e] = larger(most[e], shuffle_xor(most[e], LANES));",
        "",
    ),
    bug(
        "the maximum without a warp's tokens",
        "codes.h",
        "int warp = 0; warp < WARPS",
        "int warp = 1; warp < WARPS",
    ),
    bug(
        "no barrier before the maxima of other warps are read",
        "codes.h",
        "barrier_or(false);\n        // Half",
        "// Half",
    ),
    bug(
        "no barrier before scales are read",
        "codes.h",
        "barrier_or(false);\n        UNROLL for (int e = 0; e < 8; e++) {\n            most[e] = float_of",
        "UNROLL for (int e = 0; e < 8; e++) {\n            most[e] = float_of",
    ),
    bug(
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
    Planted { name: "types", instance: TYPES, bugs: &OF_TYPES, judge }
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
    Planted { name: "codes", instance: CODES, bugs: &OF_CODES, judge }
}
