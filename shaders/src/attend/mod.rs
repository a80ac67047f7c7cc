//! Attention of one block of queries against one block of keys, into a running state.
//!
//! For a query row with running state (m, l, a), and for each key j that it sees:
//!
//! ```text
//! x  = scale · q·k_j          (softcap c: c · tanh(x / c))
//! m' = max(m, x),  l' = l·e^(m − m') + e^(x − m'),  a' = a·e^(m − m') + e^(x − m')·v_j
//! ```
//!
//! (Milakov & Gimelshein 2018, §3.1.)
//!
//! # Bindings
//!
//! | number | name | holds |
//! |---|---|---|
//! | 0 | params | [`AttendParams`](crate::AttendParams) |
//! | 1 | q | `[batch, rows, heads, dim]`, strided, in 16-byte units |
//! | 2, 3 | k, v | the same; in the broadcast variant textures whose texels are such units (see [`subgroup`]) |
//! | 4 | state_a | f32 `[batch, rows, heads, dim]`, dense |
//! | 5 | state_ml | f32 `[batch, heads, rows, 2]`, dense: m and l |
//! | 6 | positions | u32: for each query head its KV head; from `keys_at` for each key its position; from `spans_at` for each class and query row the visible positions lo..hi as two words |
//! | 7 | work | u32: for each class `2·q_tiles + 1` starts; from `runs_at` the runs, two words each |
//! | 8 | bias | where the kernel reads [`BiasInput`]: `[batch, rows, heads, row]`, strided, in words or elements; columns are positions |
//!
//! # Work list
//!
//! A run is a range of keys `first..end`, `first` a multiple of the KV tile. For Q tile t of class
//! c, with `s = c·starts_class + 2t`, the runs `starts[s]..starts[s+1]` are full: every row of the
//! tile sees every key, and nothing is tested. The runs `starts[s+1]..starts[s+2]` are partial:
//! each element tests `lo <= position < hi`. A kernel that reads a bias tests in full runs as in
//! partial ones. Keys outside of all runs cost nothing. For every kernel except [`subgroup`], a run
//! whose end is not a multiple of the KV tile must be partial.
//!
//! # NaN and infinity
//!
//! NaN and infinity pass through multiplications and additions to the rows that see them, and
//! through `weight_of`, because `exp2` may return any number for a NaN. In partial runs each
//! invisible element is replaced by selection before the kernel combines it with a number of the
//! row: its logit by [`EMPTY_M`](crate::EMPTY_M), its weight by 0, its value by 0 (0 · NaN would be
//! NaN). A row that saw no key in the whole call is not written.

use crate::kernel::{EMPTY_M, Kernel};
use crate::text::Text;
use crate::variant::AttendKernel;
use crate::{BiasInput, Storage};

pub(crate) mod cooperative;
pub(crate) mod portable;
pub(crate) mod subgroup;

/// Declarations and functions that all variants use.
fn kernel_prelude(kernel: AttendKernel) -> String {
    prelude(Kernel::Attend(kernel), kernel.storage, kernel.softcap, kernel.bias)
}

/// The same for every kernel that computes logits.
pub(crate) fn prelude(kernel: Kernel, storage: Storage, softcap: bool, bias: BiasInput) -> String {
    let mut text = format!("{}\n{}\n\n", kernel.declarations(), empty_m());
    text.push_str(&format!("{}\n\n", storage.unpack_functions()));
    text.push_str(WEIGHT_OF);
    text.push('\n');
    if softcap {
        text.push_str(CAPPED);
        text.push('\n');
    }
    if bias.any() {
        text.push_str(&bias.functions(storage));
        text.push('\n');
    }
    text
}

pub(crate) fn empty_m() -> String {
    format!("const EMPTY_M: f32 = {EMPTY_M:?}f;")
}

/// e^below, the weight of a key whose logit is `below` the largest one of its row. Below −150 the
/// power is 0 in f32, and the product with log2 e cannot overflow. NaN is handled by bits: WGSL
/// promises nothing about the `exp2` of a NaN, and `max` may drop it.
pub(crate) const WEIGHT_OF: &str = "fn weight_of(below: f32) -> f32 {
    let power = exp2(max(below, -150.0f) * 1.442695f);
    return select(power, below, (bitcast<u32>(below) & 0x7fffffffu) > 0x7f800000u);
}
";

/// `cap · tanh(t)`, with a relative error of a few ulp. WGSL's own `tanh` promises only 1e-5
/// absolute, and overflows on some drivers. The polynomial is Cephes' tanhf. `min` may drop a NaN,
/// so NaN is handled separately.
const CAPPED: &str = "fn capped(t: f32) -> f32 {
    let size = min(abs(t), 16.0f);
    let large = 1.0f - 2.0f / (exp2(size * 2.8853900f) + 1.0f);
    let z = size * size;
    let tail = (((-5.7049887e-3f * z + 2.0639088e-2f) * z - 5.3739715e-2f) * z + 1.3331442e-1f) * z - 3.3333282e-1f;
    let value = params.cap * select(large, size + size * z * tail, size < 0.625f);
    let result = select(value, -value, t < 0.0f);
    return select(result, t, (bitcast<u32>(t) & 0x7fffffffu) > 0x7f800000u);
}
";

/// The first statements of every workgroup: its Q tile, batch entry, heads and runs. Returns if
/// there is nothing to do.
fn item(t: &mut Text) {
    t.lines(
        "
let group = group_id.x + group_id.y * params.grid_width;
if (group >= params.items) { return; }
let item = params.first_item + group;
let tile = params.tile_first + params.tile_count - 1u - item % params.tile_count;
let batch_head = item / params.tile_count;
let batch = params.batch_first + batch_head / params.heads;
let head = batch_head % params.heads;
let kv_head = positions[head];
let class_index = min(batch, params.last_class);
let starts = class_index * params.starts_class + 2u * tile;
let full_runs = work[starts];
let partial_runs = work[starts + 1u];
let runs_end = work[starts + 2u];
if (full_runs == runs_end) { return; }
let spans = params.spans_at + 2u * class_index * params.rows;",
    );
}

/// All runs: the full ones, then the partial ones. Elements of partial runs are tested; if the
/// kernel reads a bias, elements of full runs are tested too. The argument of `body` says whether
/// it has to test.
fn all_runs(t: &mut Text, bias: BiasInput, body: impl Fn(&mut Text, bool)) {
    if bias.any() {
        runs(t, "full_runs", "runs_end", |t| body(t, true));
    } else {
        runs(t, "full_runs", "partial_runs", |t| body(t, false));
        runs(t, "partial_runs", "runs_end", |t| body(t, true));
    }
}

/// Initial value of the flag that says whether a row has seen a key after all full runs.
const fn seen_at_first(bias: BiasInput) -> &'static str {
    if bias.any() { "false" } else { "full_runs < partial_runs" }
}

/// `load_x(at, chunk)`: a chunk of the row at unit `at`, zero beyond the head. Heads have `chunks`
/// chunks; kernels read them `side` at a time.
pub(crate) fn load_function(t: &mut Text, tensor: &str, storage: Storage, chunks: u32, side: u32) {
    let ragged = !chunks.is_multiple_of(side);
    t.block(format!("fn load_{tensor}(at: u32, chunk: u32) -> vec4<f32>"), |t| {
        let inside = if ragged { format!("min(chunk, {}u)", chunks - 1) } else { "chunk".to_owned() };
        let value = if storage.unit_chunks() == 1 {
            t.line(format!("let value = chunk_0({tensor}[at + {inside}]);"));
            "value"
        } else {
            t.line(format!("let unit = {tensor}[at + ({inside} >> 1u)];"));
            t.line("let value = select(chunk_0(unit), chunk_1(unit), (chunk & 1u) == 1u);");
            "value"
        };
        if ragged {
            t.line(format!("return select(vec4<f32>(), {value}, chunk < {chunks}u);"));
        } else {
            t.line(format!("return {value};"));
        }
    });
}

/// Start of row `row` of the bias.
fn bias_row(row: &str) -> String {
    format!(
        "params.bias_offset + batch * params.bias_batch + {row} * params.bias_row + head * params.bias_head"
    )
}

/// `for` over the runs of one kind, with `first` and `end` in scope.
fn runs(t: &mut Text, from: &str, to: &str, body: impl FnOnce(&mut Text)) {
    t.block(format!("for (var run = {from}; run < {to}; run++)"), |t| {
        t.line("let first = max(work[params.runs_at + 2u * run], params.key_begin);");
        t.line("let end = min(work[params.runs_at + 2u * run + 1u], params.key_end);");
        body(t);
    });
}
