//! Conversion of elements to 8-bit codes and back. There is one thread for each eight channels of
//! the tokens that share their scales, or one for each row that shares one scale.

use crate::kernel::Kernel;
use crate::text::Text;
use crate::{Scales, Storage};

/// Bindings: source in 16-byte units, codes four to a word, scales.
pub(crate) fn to_codes(storage: Storage, scales: Scales) -> String {
    let mut t = begin(Kernel::ToCodes { storage, scales });
    t.lines(storage.unpack_functions());
    t.lines(
        "
// Bits of the magnitude, by which it can be compared; 0 of what is not finite.
fn sizes(x: vec4<f32>) -> vec4<u32> {
    let bits = bitcast<vec4<u32>>(x) & vec4<u32>(0x7fffffffu);
    return select(bits, vec4<u32>(0u), bits >= vec4<u32>(0x7f800000u));
}

fn scales_for(largest: vec4<u32>) -> vec4<f32> {
    let scale = bitcast<vec4<f32>>(largest) / 127.0f;
    // Below the normal numbers.
    return select(scale, vec4<f32>(0.0f), bitcast<vec4<u32>>(scale) < vec4<u32>(0x00800000u));
}

fn word(x: vec4<f32>, scale: vec4<f32>) -> u32 {
    let bits = bitcast<vec4<u32>>(x) & vec4<u32>(0x7fffffffu);
    let finite = bits < vec4<u32>(0x7f800000u);
    let divisor = select(scale, vec4<f32>(1.0f), scale == vec4<f32>(0.0f));
    let rounded = round(clamp(select(vec4<f32>(0.0f), x, finite) / divisor, vec4<f32>(-127.0f), vec4<f32>(127.0f)));
    let whole = select(vec4<i32>(rounded), vec4<i32>(0), scale == vec4<f32>(0.0f));
    let codes = bitcast<vec4<u32>>(select(vec4<i32>(-128), whole, finite)) & vec4<u32>(0xffu);
    return codes.x | (codes.y << 8u) | (codes.z << 16u) | (codes.w << 24u);
}
",
    );
    main(&mut t, scales, |t| {
        let read = if storage == Storage::F32 {
            "let unit = params.data_offset + 2u * chunk;
let x = source[unit];
let y = source[unit + 1u];"
        } else {
            "let unit = source[params.data_offset + chunk];
let x = chunk_0(unit);
let y = chunk_1(unit);"
        };
        t.line("var largest_x = vec4<u32>(0u);");
        t.line("var largest_y = vec4<u32>(0u);");
        t.block("for (var step = 0u; step < steps; step += 1u)", |t| {
            t.line("let chunk = begin + step * stride;");
            t.lines(read);
            t.line("largest_x = max(largest_x, sizes(x));");
            t.line("largest_y = max(largest_y, sizes(y));");
        });
        t.lines(match scales {
            Scales::Channels => {
                "let scale_x = scales_for(largest_x);
let scale_y = scales_for(largest_y);
let scale_at = params.scales_offset + 8u * group;
for (var i = 0u; i < 4u; i += 1u) {
    scales[scale_at + i] = scale_x[i];
    scales[scale_at + 4u + i] = scale_y[i];
}"
            }
            Scales::Rows => {
                "let both = max(largest_x, largest_y);
let scale_x = scales_for(vec4<u32>(max(max(both.x, both.y), max(both.z, both.w))));
let scale_y = scale_x;
scales[params.scales_offset + group] = scale_x.x;"
            }
        });
        t.block("for (var step = 0u; step < steps; step += 1u)", |t| {
            t.line("let chunk = begin + step * stride;");
            t.lines(read);
            t.line("let at = params.codes_offset + 2u * chunk;");
            t.line("codes[at] = word(x, scale_x);");
            t.line("codes[at + 1u] = word(y, scale_y);");
        });
    });
    t.finish()
}

/// Bindings: codes, scales, destination in 16-byte units.
pub(crate) fn from_codes(storage: Storage, scales: Scales) -> String {
    let mut t = begin(Kernel::FromCodes { storage, scales });
    t.lines(storage.round_function());
    t.lines(
        "
fn numbers(word: u32, scale: vec4<f32>) -> vec4<f32> {
    let codes = (vec4<i32>(bitcast<i32>(word)) << vec4<u32>(24u, 16u, 8u, 0u)) >> vec4<u32>(24u);
    let bits = bitcast<vec4<u32>>(vec4<f32>(codes) * scale);
    return bitcast<vec4<f32>>(select(bits, vec4<u32>(0x7fc00000u), codes == vec4<i32>(-128)));
}
",
    );
    main(&mut t, scales, |t| {
        t.lines(match scales {
            Scales::Channels => {
                "let scale_at = params.scales_offset + 8u * group;
let scale_x = vec4<f32>(scales[scale_at], scales[scale_at + 1u], scales[scale_at + 2u], scales[scale_at + 3u]);
let scale_y = vec4<f32>(scales[scale_at + 4u], scales[scale_at + 5u], scales[scale_at + 6u], scales[scale_at + 7u]);"
            }
            Scales::Rows => {
                "let scale_x = vec4<f32>(scales[params.scales_offset + group]);
let scale_y = scale_x;"
            }
        });
        t.block("for (var step = 0u; step < steps; step += 1u)", |t| {
            t.lines(
                "let chunk = begin + step * stride;
let at = params.codes_offset + 2u * chunk;
let x = numbers(codes[at], scale_x);
let y = numbers(codes[at + 1u], scale_y);",
            );
            t.lines(if storage == Storage::F32 {
                "let unit = params.data_offset + 2u * chunk;
destination[unit] = x;
destination[unit + 1u] = y;"
            } else {
                "destination[params.data_offset + chunk] = vec4<u32>(
    rounded(x.x) | (rounded(x.y) << 16u),
    rounded(x.z) | (rounded(x.w) << 16u),
    rounded(y.x) | (rounded(y.y) << 16u),
    rounded(y.z) | (rounded(y.w) << 16u),
);"
            });
        });
    });
    t.finish()
}

fn begin(kernel: Kernel) -> Text {
    let mut t = Text::default();
    t.line(format!("// {}: one thread for each group of elements", kernel.name()));
    t.lines(&kernel.declarations());
    t.line("");
    t
}

/// The entry point: computes which chunks of eight elements belong to the thread, then runs `body`.
fn main(t: &mut Text, scales: Scales, body: impl FnOnce(&mut Text)) {
    t.line("@compute @workgroup_size(64)");
    t.block(
        "fn main(@builtin(workgroup_id) group_id: vec3<u32>, @builtin(local_invocation_index) thread: u32)",
        |t| {
            t.lines(
                "
let index = (group_id.x + group_id.y * params.grid_width) * 64u + thread;
if (index >= params.count) { return; }
let group = params.first + index;",
            );
            t.lines(match scales {
                Scales::Channels => {
                    "let part = group / params.lanes;
let parts = (params.tokens + params.together - 1u) / params.together;
let token = (part % parts) * params.together;
let steps = min(params.together, params.tokens - token);
let stride = params.lanes;
let begin = ((part / parts) * params.tokens + token) * params.lanes + group % params.lanes;"
                }
                Scales::Rows => {
                    "let steps = params.lanes;
let stride = 1u;
let begin = group * params.lanes;"
                }
            });
            body(t);
        },
    );
}
