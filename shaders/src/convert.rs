//! Elements from one storage type to another, one thread for each 8 of them.

use crate::Storage;
use crate::kernel::Kernel;
use crate::text::Text;

/// Elements of one thread: a 16-byte unit of a 16-bit type, two of f32.
const ELEMENTS: u32 = Storage::CONVERTED_TOGETHER;

/// Bindings: source, destination, both arrays of 16-byte units. One of the two types is f32. With
/// `reports` also a word that becomes 1 where a finite element becomes infinite.
pub(crate) fn source(from: Storage, into: Storage, reports: bool) -> String {
    let mut t = Text::default();
    t.line(format!(
        "// convert, {} to {}: one thread for each {ELEMENTS} elements",
        from.name(),
        into.name()
    ));
    t.lines(&Kernel::Convert { from, into, reports }.declarations());
    t.line("");
    t.lines(if into == Storage::F32 { from.unpack_functions() } else { into.round_function() });
    t.line("");
    if reports {
        t.lines(OVERFLOWS);
        t.line("");
    }
    t.line("@compute @workgroup_size(64)");
    t.block(
        "fn main(@builtin(workgroup_id) group_id: vec3<u32>, @builtin(local_invocation_index) thread: u32)",
        |t| {
            t.lines(
                "
let index = (group_id.x + group_id.y * params.grid_width) * 64u + thread;
if (index >= params.count) { return; }",
            );
            t.lines(if into == Storage::F32 {
                "let unit = source[params.from_offset + index];
let at = params.into_offset + 2u * index;
destination[at] = chunk_0(unit);
destination[at + 1u] = chunk_1(unit);"
            } else {
                "let at = params.from_offset + 2u * index;
let x = source[at];
let y = source[at + 1u];
destination[params.into_offset + index] = vec4<u32>(
    rounded(x.x) | (rounded(x.y) << 16u),
    rounded(x.z) | (rounded(x.w) << 16u),
    rounded(y.x) | (rounded(y.y) << 16u),
    rounded(y.z) | (rounded(y.w) << 16u),
);"
            });
            if reports {
                t.line("if (overflows(x) || overflows(y)) { atomicStore(&overflow[0], 1u); }");
            }
        },
    );
    t.finish()
}

/// From this magnitude on `rounded` gives infinity.
const OVERFLOWS: &str = "fn overflows(x: vec4<f32>) -> bool {
    let magnitude = bitcast<vec4<u32>>(x) & vec4<u32>(0x7fffffffu);
    return any((magnitude >= vec4<u32>(0x477ff000u)) & (magnitude < vec4<u32>(0x7f800000u)));
}";
