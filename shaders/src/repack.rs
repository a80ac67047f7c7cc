//! A strided copy or addition of `[batch, rows, heads, row_units]`, one thread for each unit.

use crate::kernel::Kernel;
use crate::text::Text;

/// Bindings: source, destination, both arrays of units of `words` 32-bit words.
pub(crate) fn source(words: u32) -> String {
    strided(
        "repack",
        words,
        Kernel::Repack { words },
        "destination[into_at + unit] = source[from_at + unit];",
    )
}

/// Bindings: source, destination, both arrays of `words` f32. Adds the one to the other.
pub(crate) fn accumulate(words: u32) -> String {
    let kernel = Kernel::Accumulate { words };
    let add = "destination[into_at + unit] = destination[into_at + unit] + source[from_at + unit];";
    strided("accumulate", words, kernel, add)
}

fn strided(name: &str, words: u32, kernel: Kernel, statement: &str) -> String {
    let mut t = Text::default();
    t.line(format!("// {name}, units of {words} words: one thread for each unit"));
    t.lines(&kernel.declarations());
    t.line("");
    t.line("@compute @workgroup_size(64)");
    t.block(
        "fn main(@builtin(workgroup_id) group_id: vec3<u32>, @builtin(local_invocation_index) thread: u32)",
        |t| {
            t.lines(
                "
let index = (group_id.x + group_id.y * params.grid_width) * 64u + thread;
if (index >= params.units) { return; }
let unit = index % params.row_units;
let row_head = index / params.row_units;
let head = row_head % params.heads;
let row = (row_head / params.heads) % params.rows;
let batch = row_head / params.heads / params.rows;
let from_at = params.from_offset + batch * params.from_batch + row * params.from_row + head * params.from_head;
let into_at = params.into_offset + batch * params.into_batch + row * params.into_row + head * params.into_head;",
            );
            t.line(statement);
        },
    );
    t.finish()
}
