//! Attention of few query rows against many keys. One workgroup takes one KV head, the rows of all
//! query heads that share it, and one split of the keys. It writes a part: the state of those rows
//! over this split alone. [`merge_parts`] then merges all parts of a row into its running state.
//!
//! A slot is one (query row, query head) pair of a workgroup: slot `row · group_heads + head −
//! first head`. All slots read the same keys, so each key is fetched once for all of them.
//!
//! # Bindings
//!
//! As those of [`attend`](crate::attend), the bias included, but the state is not among them: 4 is
//! `part_a`, f32 `[item, slot, dim]`, and 5 `part_ml`, f32 `[item, slot, 2]`, both dense, m in
//! base-2 units. Where l is [`UNSEEN`] the slot saw no key of the split, and its m and a mean
//! nothing; no sum of weights is negative.
//!
//! # Masks
//!
//! The runs of the work list only tell which keys to skip; the kernel does not use whether they are
//! full. Every element is tested against its row's span, which costs little with one key for each
//! thread. All rows are in Q tile 0.

use crate::kernel::Kernel;
use crate::text::Text;
use crate::variant::DecodeKernel;

mod lanes;
mod parts;
mod portable;

pub(crate) use lanes::{most_slots as lanes_slots, source as lanes};
pub(crate) use parts::merge_parts;
pub(crate) use portable::{
    THREADS, most_slots as portable_slots, source as portable, workgroup_bytes as portable_bytes,
};

/// Most slots of any kernel.
pub(crate) const MAX_SLOTS: u32 = 16;

/// l of a slot that saw no key.
const UNSEEN: &str = "const UNSEEN: f32 = -1.0f;
// By bits, so that NaN counts as seen.
fn is_unseen(l: f32) -> bool { return bitcast<u32>(l) == 0xbf800000u; }";

/// Declarations and functions that both variants use.
fn prelude(kernel: DecodeKernel) -> String {
    let mut text =
        crate::attend::prelude(Kernel::Decode(kernel), kernel.storage, kernel.softcap, kernel.bias);
    text.push_str(UNSEEN);
    text.push('\n');
    text
}

/// The first statements of every workgroup: its split of the keys, batch entry, heads and runs, and
/// the span of each slot.
fn item(t: &mut Text, kernel: DecodeKernel) {
    t.lines(
        "
let group = group_id.x + group_id.y * params.grid_width;
if (group >= params.items) { return; }
let item = params.first_item + group;
let batch_group = item / params.splits;
let batch = params.batch_first + batch_group / params.groups;
let first_head = (batch_group % params.groups) * params.group_heads;
let kv_head = positions[first_head];
let split_begin = params.key_begin + (item % params.splits) * params.split_keys;
let split_end = min(split_begin + params.split_keys, params.key_end);
let class_index = min(batch, params.last_class);
let starts = class_index * params.starts_class;
let spans = params.spans_at + 2u * class_index * params.rows;",
    );
    for s in 0..kernel.slots {
        t.line(format!("let row{s} = {s}u / params.group_heads;"));
        t.line(format!("let lo{s} = positions[spans + 2u * row{s}];"));
        t.line(format!("let hi{s} = positions[spans + 2u * row{s} + 1u];"));
        if kernel.bias.any() {
            t.line(format!(
                "let bias_row{s} = params.bias_offset + batch * params.bias_batch + row{s} * params.bias_row + \
                 (first_head + {s}u % params.group_heads) * params.bias_head;"
            ));
        }
    }
}

/// `term{s}` and `vis{s}`: whether slot `s` sees its key at `position`. `inside` says whether the
/// key belongs to the split.
fn visible(t: &mut Text, kernel: DecodeKernel, s: u32) {
    let span = format!("inside && lo{s} <= position && position < hi{s}");
    if kernel.bias.any() {
        t.line(format!("let term{s} = bias_term(bias_row{s}, position);"));
        t.line(format!("let vis{s} = {span} && shows(term{s});"));
    } else {
        t.line(format!("let vis{s} = {span};"));
    }
}

/// The logit `x` of slot `s` plus its bias, if there is one.
fn with_term(kernel: DecodeKernel, s: u32, x: &str) -> String {
    if kernel.bias.any() { format!("{x} + term{s}") } else { x.to_owned() }
}

/// `for` over the split's part of each run, with `first` and `end` in scope.
fn runs(t: &mut Text, body: impl FnOnce(&mut Text)) {
    t.block("for (var run = work[starts]; run < work[starts + 2u]; run++)", |t| {
        t.line("let first = max(work[params.runs_at + 2u * run], split_begin);");
        t.line("let end = min(work[params.runs_at + 2u * run + 1u], split_end);");
        body(t);
    });
}
