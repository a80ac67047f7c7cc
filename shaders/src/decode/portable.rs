//! Decoding within WebGPU's default limits: no feature, 64 threads, less than 16 KiB of workgroup
//! memory.
//!
//! 64 keys at a time, in three phases. First each thread takes one key, and computes its logits for
//! all slots from the queries in workgroup memory. Then the maximum of each slot is found. Then
//! each thread takes a 16-byte column of v for every `slices`-th of the keys, with the accumulators
//! of all slots in registers. At the end the slices are added up.
//!
//! Invisible elements carry weight −1 in workgroup memory; weights are never negative otherwise.

use super::{MAX_SLOTS, item, prelude, runs, visible, with_term};
use crate::text::Text;
use crate::variant::DecodeKernel;

pub(crate) const THREADS: u32 = 64;

/// The largest number of slots whose queries fit 8 KiB.
pub(crate) const fn most_slots(head_dim: u32) -> u32 {
    let slots = 2048 / head_dim;
    if slots < MAX_SLOTS { slots } else { MAX_SLOTS }
}

pub(crate) const fn workgroup_bytes(kernel: &DecodeKernel) -> u32 {
    let shape = Shape::new(*kernel);
    let sums = if shape.slices > 1 { 16 * shape.slices * shape.chunks } else { 0 };
    kernel.slots * (4 * kernel.head_dim + 4 * THREADS + 4 * shape.finders + 8) + sums
}

pub(crate) fn source(kernel: DecodeKernel) -> String {
    let shape = Shape::new(kernel);
    let slots = kernel.slots;
    let mut t = Text::default();
    t.line(format!(
        "// decode, portable, {}, head dim {}: {slots} rows of one KV head, {THREADS} keys at a time",
        kernel.storage.name(),
        kernel.head_dim
    ));
    t.lines(&prelude(kernel));
    t.line(format!("var<workgroup> queries: array<vec4<f32>, {}>;", slots * shape.chunks));
    t.line("// Logits, then weights, and at the end each thread's part of l.");
    t.line(format!("var<workgroup> weights: array<f32, {}>;", slots * THREADS));
    t.line(format!("var<workgroup> tops: array<f32, {}>;", slots * shape.finders));
    t.line("// For each slot its maximum, and by what its sums shrink for that.");
    t.line(format!("var<workgroup> maxima: array<vec2<f32>, {slots}>;"));
    if shape.slices > 1 {
        t.line(format!("var<workgroup> sums: array<vec4<f32>, {}>;", shape.slices * shape.chunks));
    }
    t.line("");
    t.line(format!("@compute @workgroup_size({THREADS})"));
    t.block(
        "fn main(@builtin(workgroup_id) group_id: vec3<u32>, @builtin(local_invocation_index) thread: u32)",
        |t| {
            item(t, kernel);
            shape.begin(t);
            runs(t, |t| {
                t.block(format!("for (var key = first; key < end; key += {THREADS}u)"), |t| {
                    shape.logits(t);
                    shape.weights(t);
                    shape.accumulate(t);
                });
            });
            shape.end(t);
        },
    );
    t.finish()
}

/// The parameters on which the text depends.
#[derive(Clone, Copy)]
struct Shape {
    kernel: DecodeKernel,
    /// Chunks of 4 elements, and 16-byte units, in a head.
    chunks: u32,
    units: u32,
    /// Number of threads side by side that take columns of v, and number of columns of each.
    columns: u32,
    passes: u32,
    /// Threads that share a column.
    slices: u32,
    /// Threads that look for the maximum of a slot.
    finders: u32,
}

impl Shape {
    const fn new(kernel: DecodeKernel) -> Self {
        let units = kernel.head_dim / kernel.storage.unit_elements();
        let columns = if units < THREADS { units } else { THREADS };
        let finders = THREADS / kernel.slots;
        Self {
            kernel,
            chunks: kernel.head_dim / 4,
            units,
            columns,
            passes: units.div_ceil(THREADS),
            slices: THREADS / columns,
            finders: if finders < 8 { finders } else { 8 },
        }
    }

    fn unit_chunks(&self) -> u32 {
        self.kernel.storage.unit_chunks()
    }

    /// Queries into workgroup memory, empty sums.
    fn begin(&self, t: &mut Text) {
        for x in ["k", "v"] {
            t.line(format!(
                "let {x}_base = params.{x}_offset + batch * params.{x}_batch + kv_head * params.{x}_head;"
            ));
        }
        t.line(format!("let column = thread % {}u;", self.columns));
        t.line(format!("let slice = thread / {}u;", self.columns));
        let units = self.kernel.slots * self.units;
        t.block(format!("for (var i = thread; i < {units}u; i += {THREADS}u)"), |t| {
            t.lines(&format!(
                "let slot = i / {0}u;
let q_row = (slot / params.group_heads) * params.q_row;
let q_head = (first_head + slot % params.group_heads) * params.q_head;
let unit = q[params.q_offset + batch * params.q_batch + q_row + q_head + i % {0}u];",
                self.units
            ));
            for half in 0..self.unit_chunks() {
                let at = format!("i * {}u + {half}u", self.unit_chunks());
                t.line(format!("queries[{at}] = chunk_{half}(unit) * params.q_scale;"));
            }
        });
        t.line(format!(
            "if (thread < {}u) {{ maxima[thread] = vec2<f32>(EMPTY_M, 1.0f); }}",
            self.kernel.slots
        ));
        for s in 0..self.kernel.slots {
            t.line(format!("var l{s} = 0.0f;"));
            t.line(format!("var seen{s} = false;"));
            for (pass, half) in self.accumulators() {
                t.line(format!("var a{s}_{pass}_{half} = vec4<f32>();"));
            }
        }
        t.line("workgroupBarrier();");
    }

    /// Each thread's key against all slots.
    fn logits(&self, t: &mut Text) {
        t.lines(
            "
let own = min(key + thread, end - 1u);
let inside = key + thread < end;
let position = positions[params.keys_at + own];
let k_at = k_base + own * params.k_row;",
        );
        for s in 0..self.kernel.slots {
            t.line(format!("var x{s} = 0.0f;"));
            visible(t, self.kernel, s);
        }
        let dots = |t: &mut Text| {
            t.block(format!("for (var u = 0u; u < {}u; u++)", self.units), |t| {
                t.line("let unit = k[k_at + u];");
                for half in 0..self.unit_chunks() {
                    t.line(format!("let k_{half} = chunk_{half}(unit);"));
                    for s in 0..self.kernel.slots {
                        let at = format!("{}u + u * {}u + {half}u", s * self.chunks, self.unit_chunks());
                        t.line(format!("x{s} += dot(queries[{at}], k_{half});"));
                    }
                }
            });
        };
        if self.kernel.bias.any() {
            // Neighbouring threads together skip keys that a tensor hides from all slots. Spans leave few
            // such keys.
            let any = (0..self.kernel.slots).map(|s| format!("vis{s}")).collect::<Vec<_>>().join(" || ");
            t.block(format!("if ({any})"), dots);
        } else {
            dots(t);
        }
        t.line("// The weights of the keys before these have been read.");
        t.line("workgroupBarrier();");
        for s in 0..self.kernel.slots {
            t.line(format!("x{s} *= params.x_scale;"));
            if self.kernel.softcap {
                t.line(format!("x{s} = capped(x{s});"));
            }
            if self.kernel.bias.any() {
                t.line(format!("x{s} = {};", with_term(self.kernel, s, &format!("x{s}"))));
            }
            t.line(format!("seen{s} = seen{s} || vis{s};"));
            t.line(format!("weights[{}u + thread] = select(EMPTY_M, x{s}, vis{s});", s * THREADS));
        }
        t.line("workgroupBarrier();");
    }

    /// Maxima, weights and the part of l of each thread.
    fn weights(&self, t: &mut Text) {
        let (slots, finders) = (self.kernel.slots, self.finders);
        t.block(format!("if (thread < {}u)", slots * finders), |t| {
            t.lines(&format!(
                "var top = EMPTY_M;
for (var i = thread % {finders}u; i < {THREADS}u; i += {finders}u) {{
    top = max(top, weights[(thread / {finders}u) * {THREADS}u + i]);
}}
tops[thread] = top;"
            ));
        });
        t.line("workgroupBarrier();");
        t.block(format!("if (thread < {slots}u)"), |t| {
            t.lines(&format!(
                "let before = maxima[thread].x;
var top = before;
for (var i = 0u; i < {finders}u; i++) {{ top = max(top, tops[thread * {finders}u + i]); }}
maxima[thread] = vec2<f32>(top, weight_of(before - top));"
            ));
        });
        t.line("workgroupBarrier();");
        for s in 0..slots {
            t.lines(&format!(
                "let max{s} = maxima[{s}];
let p{s} = select(0.0f, weight_of(x{s} - max{s}.x), vis{s});
l{s} = l{s} * max{s}.y + p{s};
weights[{}u + thread] = select(-1.0f, p{s}, vis{s});",
                s * THREADS
            ));
        }
        t.line("workgroupBarrier();");
    }

    /// This thread's columns of its slice of the keys.
    fn accumulate(&self, t: &mut Text) {
        for s in 0..self.kernel.slots {
            for (pass, half) in self.accumulators() {
                t.line(format!("a{s}_{pass}_{half} *= max{s}.y;"));
            }
        }
        // Threads without a column have nothing to do.
        t.line(format!("let first_own = select({THREADS}u, slice, slice < {}u);", self.slices));
        t.line(format!("let here = min(end - key, {THREADS}u);"));
        t.block(format!("for (var i = first_own; i < here; i += {}u)", self.slices), |t| {
            t.line("let v_at = v_base + (key + i) * params.v_row + column;");
            for s in 0..self.kernel.slots {
                t.line(format!("let w{s} = weights[{}u + i];", s * THREADS));
            }
            if self.kernel.bias.any() {
                let hidden =
                    (0..self.kernel.slots).map(|s| format!("w{s} < 0.0f")).collect::<Vec<_>>().join(" && ");
                t.line(format!("if ({hidden}) {{ continue; }}"));
            }
            for pass in 0..self.passes {
                let body = |t: &mut Text| {
                    t.line(format!("let unit{pass} = v[v_at + {}u];", pass * THREADS));
                    for half in 0..self.unit_chunks() {
                        t.line(format!("let v{pass}_{half} = chunk_{half}(unit{pass});"));
                        for s in 0..self.kernel.slots {
                            // Selected twice: neither the weight −1 nor the value of an invisible element may enter the
                            // sum.
                            t.line(format!(
                                "a{s}_{pass}_{half} += select(v{pass}_{half} * w{s}, vec4<f32>(), w{s} < 0.0f);"
                            ));
                        }
                    }
                };
                self.where_a_column(t, pass, body);
            }
        });
    }

    /// Adds up the sums of the threads, and writes the part.
    fn end(&self, t: &mut Text) {
        let slots = self.kernel.slots;
        t.line("workgroupBarrier();");
        for s in 0..slots {
            t.line(format!("weights[{}u + thread] = select(UNSEEN, l{s}, seen{s});", s * THREADS));
        }
        t.line("workgroupBarrier();");
        t.block(format!("if (thread < {slots}u)"), |t| {
            t.lines(&format!(
                "var l = 0.0f;
var seen = false;
for (var i = 0u; i < {THREADS}u; i++) {{
    let own_l = weights[thread * {THREADS}u + i];
    if (!is_unseen(own_l)) {{
        l += own_l;
        seen = true;
    }}
}}
part_ml[item * {slots}u + thread] = vec2<f32>(maxima[thread].x, select(UNSEEN, l, seen));"
            ));
        });
        for s in 0..slots {
            let at = |chunk: &str| format!("part_a[(item * {slots}u + {s}u) * {}u + {chunk}]", self.chunks);
            if self.slices == 1 {
                for pass in 0..self.passes {
                    self.where_a_column(t, pass, |t| {
                        for half in 0..self.unit_chunks() {
                            let chunk =
                                format!("(column + {}u) * {}u + {half}u", pass * THREADS, self.unit_chunks());
                            t.line(format!("{} = a{s}_{pass}_{half};", at(&chunk)));
                        }
                    });
                }
                continue;
            }
            t.block(format!("if (slice < {}u)", self.slices), |t| {
                for half in 0..self.unit_chunks() {
                    let slot =
                        format!("slice * {}u + column * {}u + {half}u", self.chunks, self.unit_chunks());
                    t.line(format!("sums[{slot}] = a{s}_0_{half};"));
                }
            });
            t.line("workgroupBarrier();");
            t.block(format!("if (thread < {}u)", self.chunks), |t| {
                t.line(format!("var sum{s} = vec4<f32>();"));
                t.line(format!(
                    "for (var i = 0u; i < {}u; i++) {{ sum{s} += sums[i * {}u + thread]; }}",
                    self.slices, self.chunks
                ));
                t.line(format!("{} = sum{s};", at("thread")));
            });
            t.line("workgroupBarrier();");
        }
    }

    /// Runs `body` if this thread has a column of the head in this pass.
    fn where_a_column(&self, t: &mut Text, pass: u32, body: impl FnOnce(&mut Text)) {
        if (pass + 1) * THREADS > self.units && self.passes > 1 {
            t.block(format!("if (column + {}u < {}u)", pass * THREADS, self.units), body);
        } else {
            body(t);
        }
    }

    /// (pass, chunk of a unit) of each accumulator of a slot.
    fn accumulators(&self) -> impl Iterator<Item = (u32, u32)> + use<> {
        let halves = self.unit_chunks();
        (0..self.passes).flat_map(move |pass| (0..halves).map(move |half| (pass, half)))
    }
}
