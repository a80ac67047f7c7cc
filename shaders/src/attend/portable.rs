//! Attention within WebGPU's default limits: no feature, 64 threads, at most 16 KiB of workgroup
//! memory.
//!
//! 64 threads are a grid of 8 × 8. For a tile of `q_rows` × 32 scores, thread (tr, tc) holds
//! `rows_per_thread` × 4: rows tr, tr + 8, …, keys tc, tc + 8, …. Of the accumulator it holds the
//! same rows and 4-element chunks tc, tc + 8, …. The 8 threads of a row agree on its maximum
//! through workgroup memory and keep their own part of l until the end. Workgroup memory holds Q
//! (whole if it fits, otherwise chunk by chunk) and K chunk-major, so that neighbouring
//! threads read neighbouring vectors. V replaces K when the scores are complete. In the weights,
//! slot `4·tc + j` is key `8·j + tc`: one thread's four weights are one vector, and V is stored in
//! the same order.
//!
//! Invisible elements carry weight −1 in workgroup memory; weights are never negative otherwise.

use crate::text::Text;
use crate::variant::AttendKernel;

pub(crate) const THREADS: u32 = 64;
pub(crate) const KV_COLS: u32 = 32;
/// Threads in a row of the grid, rows of threads, and chunks of q, k or v in workgroup memory.
const SIDE: u32 = 8;

/// Query rows of a tile.
pub(crate) const fn q_rows(rows_per_thread: u32) -> u32 {
    rows_per_thread * SIDE
}

pub(crate) const fn workgroup_bytes(head_dim: u32, rows_per_thread: u32) -> u32 {
    let q_chunks = if q_resident(head_dim, rows_per_thread) { chunk_groups(head_dim) * SIDE } else { SIDE };
    bytes_with(q_chunks, rows_per_thread)
}

/// Bytes of workgroup memory with this number of chunks of each Q row.
const fn bytes_with(q_chunks: u32, rows_per_thread: u32) -> u32 {
    16 * (q_chunks * q_rows(rows_per_thread) + SIDE * KV_COLS + SIDE * q_rows(rows_per_thread))
}

const fn chunk_groups(head_dim: u32) -> u32 {
    (head_dim / 4).div_ceil(SIDE)
}

/// Whether a tile's Q rows fit into 16 KiB of workgroup memory. If not, they are loaded in passes.
const fn q_resident(head_dim: u32, rows_per_thread: u32) -> bool {
    bytes_with(chunk_groups(head_dim) * SIDE, rows_per_thread) <= 16384
}

pub(crate) fn source(kernel: AttendKernel, rows_per_thread: u32) -> String {
    let shape = Shape::new(kernel, rows_per_thread);
    let bytes = workgroup_bytes(kernel.head_dim, rows_per_thread);
    let mut t = Text::default();
    t.lines(&format!(
        "// attend, portable, {}, head dim {}: {} query rows x {KV_COLS} keys, {bytes} bytes of workgroup memory",
        kernel.storage.name(),
        kernel.head_dim,
        shape.q_rows,
    ));
    t.lines(&super::kernel_prelude(kernel));
    for tensor in ["q", "k", "v"] {
        super::load_function(&mut t, tensor, kernel.storage, shape.chunks, SIDE);
    }
    let q_chunks = if shape.resident { shape.groups * SIDE } else { SIDE };
    t.line(format!("var<workgroup> tile_q: array<vec4<f32>, {}>;", q_chunks * shape.q_rows));
    t.line(format!("var<workgroup> tile_kv: array<vec4<f32>, {}>;", SIDE * KV_COLS));
    t.line(format!("var<workgroup> tile_p: array<vec4<f32>, {}>;", SIDE * shape.q_rows));
    t.line("");
    t.line(format!("@compute @workgroup_size({THREADS})"));
    t.block(
        "fn main(@builtin(workgroup_id) group_id: vec3<u32>, @builtin(local_invocation_index) thread: u32)",
        |t| {
            super::item(t);
            shape.begin(t);
            super::all_runs(t, kernel.bias, |t, partial| shape.tiles(t, partial));
            shape.end(t);
        },
    );
    t.finish()
}

/// The parameters on which the text depends.
struct Shape {
    kernel: AttendKernel,
    /// Query rows of the tile.
    q_rows: u32,
    /// Query rows of one thread.
    rows: u32,
    /// Chunks of 4 elements in a head.
    chunks: u32,
    /// Passes over a head.
    groups: u32,
    resident: bool,
}

impl Shape {
    fn new(kernel: AttendKernel, rows_per_thread: u32) -> Self {
        Self {
            kernel,
            q_rows: q_rows(rows_per_thread),
            rows: rows_per_thread,
            chunks: kernel.head_dim / 4,
            groups: chunk_groups(kernel.head_dim),
            resident: q_resident(kernel.head_dim, rows_per_thread),
        }
    }

    /// Rows, spans, Q and the state.
    fn begin(&self, t: &mut Text) {
        t.line("let tr = thread >> 3u;");
        t.line("let tc = thread & 7u;");
        for x in ["k", "v"] {
            t.line(format!(
                "let {x}_base = params.{x}_offset + batch * params.{x}_batch + kv_head * params.{x}_head;"
            ));
        }
        for i in 0..self.rows {
            t.lines(&format!(
                "let row{i} = tile * {}u + {}u + tr;
let in{i} = row{i} < params.rows;
let safe{i} = min(row{i}, params.rows - 1u);
let lo{i} = positions[spans + 2u * safe{i}];
let hi{i} = positions[spans + 2u * safe{i} + 1u];
let q_at{i} = params.q_offset + batch * params.q_batch + safe{i} * params.q_row + head * params.q_head;
let a_at{i} = params.a_offset + ((batch * params.rows + safe{i}) * params.heads + head) * {}u;
let ml_at{i} = params.ml_offset + (batch * params.heads + head) * params.rows + safe{i};
var m{i} = EMPTY_M;
var l{i} = 0.0f;
var seen{i} = {};",
                self.q_rows,
                SIDE * i,
                self.chunks,
                super::seen_at_first(self.kernel.bias)
            ));
            if self.kernel.bias.any() {
                t.line(format!("let bias_row{i} = {};", super::bias_row(&format!("safe{i}"))));
            }
            for g in 0..self.groups {
                t.line(format!("var a{i}_{g} = vec4<f32>();"));
            }
        }
        if self.resident {
            t.block(format!("for (var g = 0u; g < {}u; g++)", self.groups), |t| {
                for i in 0..self.rows {
                    t.line(self.store_q(i, "(g * 8u + tc)"));
                }
            });
        }
    }

    /// Whether pass `g` reaches beyond the head.
    fn beyond(&self, g: u32) -> bool {
        (g + 1) * SIDE > self.chunks
    }

    fn store_q(&self, i: u32, slot: &str) -> String {
        format!(
            "tile_q[{slot} * {}u + {}u + tr] = load_q(q_at{i}, g * 8u + tc) * params.q_scale;",
            self.q_rows,
            SIDE * i
        )
    }

    /// The tiles of one run.
    fn tiles(&self, t: &mut Text, partial: bool) {
        t.block(format!("for (var key = first; key < end; key += {KV_COLS}u)"), |t| {
            if partial && self.kernel.bias.any() {
                self.visible(t);
                self.skip_unseen(t);
            }
            self.scores(t, partial);
            self.weights(t, partial);
            for g in 0..self.groups {
                self.accumulate(t, partial, g);
            }
        });
    }

    /// The visible keys of the tile for each row, and the bias of the row's logits.
    fn visible(&self, t: &mut Text) {
        let each = |f: &dyn Fn(u32) -> String| (0..4).map(f).collect::<Vec<_>>().join(", ");
        t.line(format!("let keys = vec4<u32>({});", each(&|j| format!("key + {}u + tc", SIDE * j))));
        t.line("let at = vec4<u32>(params.keys_at) + min(keys, vec4<u32>(end - 1u));");
        t.line("let pos = vec4<u32>(positions[at.x], positions[at.y], positions[at.z], positions[at.w]);");
        t.line("let inside = keys < vec4<u32>(end);");
        for i in 0..self.rows {
            let span = format!("(vec4<u32>(lo{i}) <= pos) & (pos < vec4<u32>(hi{i})) & inside");
            if self.kernel.bias.any() {
                let terms = ["x", "y", "z", "w"].map(|x| format!("bias_term(bias_row{i}, pos.{x})"));
                t.line(format!("let term{i} = vec4<f32>({});", terms.join(", ")));
                let shown = ["x", "y", "z", "w"].map(|x| format!("shows(term{i}.{x})"));
                t.line(format!("let vis{i} = {span} & vec4<bool>({});", shown.join(", ")));
            } else {
                t.line(format!("let vis{i} = {span};"));
            }
        }
    }

    /// If the bias hides the whole tile from all rows, the loop continues with the next tile.
    fn skip_unseen(&self, t: &mut Text) {
        let any = (0..self.rows).map(|i| format!("vis{i}")).collect::<Vec<_>>().join(" | ");
        // In the memory of the weights, because there is no room beside them.
        t.lines(&format!(
            "workgroupBarrier();
        tile_p[thread >> 2u][thread & 3u] = select(0.0f, 1.0f, any({any}));
        workgroupBarrier();
        if (thread == 0u) {{
            var seers = vec4<f32>();
            for (var i = 0u; i < {}u; i++) {{ seers += tile_p[i]; }}
            tile_p[0] = seers;
        }}
        if (all(workgroupUniformLoad(&tile_p[0]) == vec4<f32>())) {{ continue; }}",
            THREADS / 4
        ));
    }

    fn scores(&self, t: &mut Text, partial: bool) {
        for i in 0..self.rows {
            t.line(format!("var x{i} = vec4<f32>();"));
        }
        t.block(format!("for (var g = 0u; g < {}u; g++)", self.groups), |t| {
            t.line("workgroupBarrier();");
            if !self.resident {
                for i in 0..self.rows {
                    t.line(self.store_q(i, "tc"));
                }
            }
            for it in 0..KV_COLS / SIDE {
                let load = load_row("k", &format!("key + {}u + tr", SIDE * it), "g * 8u + tc", partial);
                t.line(format!("tile_kv[tc * {KV_COLS}u + {}u + tr] = {load};", SIDE * it));
            }
            t.line("workgroupBarrier();");
            t.block(format!("for (var c = 0u; c < {SIDE}u; c++)"), |t| {
                for j in 0..4 {
                    t.line(format!("let k{j} = tile_kv[c * {KV_COLS}u + {}u + tc];", SIDE * j));
                }
                let chunk = if self.resident { "(g * 8u + c)" } else { "c" };
                for i in 0..self.rows {
                    t.line(format!("let q{i} = tile_q[{chunk} * {}u + {}u + tr];", self.q_rows, SIDE * i));
                    t.line(format!(
                        "x{i} += vec4<f32>(dot(q{i}, k0), dot(q{i}, k1), dot(q{i}, k2), dot(q{i}, k3));"
                    ));
                }
            });
        });
        for i in 0..self.rows {
            t.line(format!("x{i} *= params.x_scale;"));
        }
        if self.kernel.softcap {
            for i in 0..self.rows {
                t.line(format!(
                    "x{i} = vec4<f32>(capped(x{i}.x), capped(x{i}.y), capped(x{i}.z), capped(x{i}.w));"
                ));
            }
        }
    }

    /// Row maxima, weights and l.
    fn weights(&self, t: &mut Text, partial: bool) {
        if partial {
            if !self.kernel.bias.any() {
                self.visible(t);
            }
            for i in 0..self.rows {
                let term = if self.kernel.bias.any() { format!(" + term{i}") } else { String::new() };
                t.line(format!("x{i} = select(vec4<f32>(EMPTY_M), x{i}{term}, vis{i});"));
                t.line(format!("seen{i} = seen{i} || any(vis{i});"));
            }
        }
        for i in 0..self.rows {
            t.line(format!(
                "tile_p[{}] = vec4<f32>(max(max(x{i}.x, x{i}.y), max(x{i}.z, x{i}.w)));",
                self.p_index(i)
            ));
        }
        t.line("workgroupBarrier();");
        for i in 0..self.rows {
            t.line(format!("var n{i} = m{i};"));
        }
        t.block(format!("for (var c = 0u; c < {SIDE}u; c++)"), |t| {
            for i in 0..self.rows {
                t.line(format!("n{i} = max(n{i}, tile_p[c * {}u + {}u + tr].x);", self.q_rows, SIDE * i));
            }
        });
        t.line("workgroupBarrier();");
        for i in 0..self.rows {
            t.line(format!("let corr{i} = weight_of(m{i} - n{i});"));
            t.line(format!("m{i} = n{i};"));
            let weights =
                ["x", "y", "z", "w"].map(|lane| format!("weight_of(x{i}.{lane} - n{i})")).join(", ");
            t.line(format!("let p{i} = vec4<f32>({weights});"));
            if partial {
                t.line(format!("let kept{i} = select(vec4<f32>(), p{i}, vis{i});"));
                t.line(format!("tile_p[{}] = select(vec4<f32>(-1.0f), p{i}, vis{i});", self.p_index(i)));
            } else {
                t.line(format!("let kept{i} = p{i};"));
                t.line(format!("tile_p[{}] = p{i};", self.p_index(i)));
            }
            t.line(format!("l{i} = l{i} * corr{i} + ((kept{i}.x + kept{i}.y) + (kept{i}.z + kept{i}.w));"));
        }
    }

    /// The accumulator's chunks of pass `g`.
    fn accumulate(&self, t: &mut Text, partial: bool, g: u32) {
        if g > 0 {
            t.line("workgroupBarrier();");
        }
        for it in 0..KV_COLS / SIDE {
            // Slot s holds key 8 · (s % 4) + s / 4.
            t.line(format!("let slot{g}_{it} = {}u + tr;", SIDE * it));
            let key = format!("key + (slot{g}_{it} & 3u) * 8u + (slot{g}_{it} >> 2u)");
            let load = load_row("v", &key, &format!("{}u + tc", g * SIDE), partial);
            t.line(format!("tile_kv[slot{g}_{it} * {SIDE}u + tc] = {load};"));
        }
        t.line("workgroupBarrier();");
        for i in 0..self.rows {
            t.line(format!("a{i}_{g} *= corr{i};"));
        }
        t.block(format!("for (var s = 0u; s < {SIDE}u; s++)"), |t| {
            for j in 0..4 {
                t.line(format!("let v{j} = tile_kv[(s * 4u + {j}u) * {SIDE}u + tc];"));
            }
            for i in 0..self.rows {
                t.line(format!("let p{i} = tile_p[s * {}u + {}u + tr];", self.q_rows, SIDE * i));
                let term = |j: usize| {
                    let lane = ["x", "y", "z", "w"][j];
                    if partial {
                        // Selected twice: neither the weight −1 nor the value of an invisible element may
                        // enter the sum.
                        format!("select(v{j} * p{i}.{lane}, vec4<f32>(), p{i}.{lane} < 0.0f)")
                    } else {
                        format!("v{j} * p{i}.{lane}")
                    }
                };
                t.line(format!("a{i}_{g} += ({} + {}) + ({} + {});", term(0), term(1), term(2), term(3)));
            }
        });
    }

    /// Adds up l and writes the state of rows that saw a key.
    fn end(&self, t: &mut Text) {
        t.line("workgroupBarrier();");
        // One thread of a row reads and writes the (m, l) of its state.
        for i in 0..self.rows {
            t.line(format!("var ml{i} = vec2<f32>();"));
            t.block("if (tc == 0u)", |t| t.line(format!("ml{i} = state_ml[ml_at{i}];")));
            t.line(format!(
                "tile_p[{}] = vec4<f32>(l{i}, select(0.0f, 1.0f, seen{i}), ml{i});",
                self.p_index(i)
            ));
        }
        t.line("workgroupBarrier();");
        for i in 0..self.rows {
            t.line(format!("var sum{i} = vec4<f32>();"));
        }
        t.block(format!("for (var c = 0u; c < {SIDE}u; c++)"), |t| {
            for i in 0..self.rows {
                t.line(format!("sum{i} += tile_p[c * {}u + {}u + tr];", self.q_rows, SIDE * i));
            }
        });
        for i in 0..self.rows {
            t.block(format!("if (in{i} && sum{i}.y > 0.0f)"), |t| {
                t.lines(&format!(
                    "let top = max(sum{i}.z, m{i});
let keep = weight_of(sum{i}.z - top);
let found = weight_of(m{i} - top);"
                ));
                for g in 0..self.groups {
                    let chunk = format!("{}u + tc", g * SIDE);
                    let at = format!("a_at{i} + {chunk}");
                    let store = format!("state_a[{at}] = state_a[{at}] * keep + a{i}_{g} * found;");
                    if self.beyond(g) {
                        t.block(format!("if ({chunk} < {}u)", self.chunks), |t| t.line(store));
                    } else {
                        t.line(store);
                    }
                }
                t.block("if (tc == 0u)", |t| {
                    t.line(format!(
                        "state_ml[ml_at{i}] = vec2<f32>(top, sum{i}.w * keep + sum{i}.x * found);"
                    ));
                });
            });
        }
    }

    /// Index of this thread in the weights of its `i`-th row.
    fn p_index(&self, i: u32) -> String {
        format!("tc * {}u + {}u + tr", self.q_rows, SIDE * i)
    }
}

/// A chunk of a key's row; zero, and no read out of bounds, behind the end of a partial run.
fn load_row(tensor: &str, key: &str, chunk: &str, partial: bool) -> String {
    if partial {
        format!(
            "select(vec4<f32>(), load_{tensor}({tensor}_base + min({key}, end - 1u) * params.{tensor}_row, {chunk}), \
             {key} < end)"
        )
    } else {
        format!("load_{tensor}({tensor}_base + ({key}) * params.{tensor}_row, {chunk})")
    }
}
