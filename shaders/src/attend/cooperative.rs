//! Attention on matrix units: products of f16 matrices that a subgroup holds together, summed in
//! f32.
//!
//! Each subgroup owns `size` query rows. Its q and its accumulator stay in matrix registers for the
//! whole call. The K and V tiles are staged once for all subgroups of a workgroup. Single elements
//! of a matrix register cannot be addressed, so the operations on single elements (mask, softmax)
//! use workgroup memory. There, lane `l` handles row `l % size` and, if there are more lanes than
//! rows, its part `l / size` of the columns.
//!
//! The accumulator goes through workgroup memory only when a row's maximum grows by more than 2^8
//! within a tile. Otherwise the weights stay relative to the old maximum, may exceed 1, and nothing
//! is rescaled. (FlashAttention-4 does the same to save multiplications.)
//!
//! 0 · NaN is NaN in a matrix unit too. So after the first partial tile with a value that is not
//! finite, the second product of partial tiles is computed element by element.

use crate::text::Text;
use crate::variant::AttendKernel;

/// Up to this growth of a maximum, as a power of two, nothing is rescaled. 2^8 · 2048 keys is far
/// below the largest values of f16 weights and f32 sums.
const SLACK: &str = "5.5f";

/// Keys of a tile: fewer for large heads, so that both tiles and the scratch fit 32 KiB.
pub(crate) const fn kv_cols(head_dim: u32) -> u32 {
    if head_dim <= 128 { 32 } else { 16 }
}

/// Bytes of workgroup memory.
pub(crate) const fn workgroup_bytes(head_dim: u32, size: u32, subgroups: u32) -> u32 {
    let keys = kv_cols(head_dim);
    let rows = size * subgroups;
    let halves = 2 * keys * kv_stride(head_dim) + rows * weight_stride(keys);
    // Scores, two factors for each row, two flags for all.
    2 * halves + 4 * (rows * score_stride(keys) + 2 * rows + 2)
}

/// Elements from one key to the next: a row plus 16 bytes, so that neighbouring rows are in
/// different banks.
const fn kv_stride(head_dim: u32) -> u32 {
    head_dim + 8
}

const fn weight_stride(keys: u32) -> u32 {
    keys + 8
}

const fn score_stride(keys: u32) -> u32 {
    keys + 4
}

pub(crate) fn source(kernel: AttendKernel, size: u32, lanes: u32, subgroups: u32) -> String {
    let keys = kv_cols(kernel.head_dim);
    let shape = Shape {
        kernel,
        size,
        lanes,
        subgroups,
        keys,
        parts: lanes / size,
        fragments: kernel.head_dim / size,
        at_once: keys / size,
        threads: lanes * subgroups,
    };
    let mut t = Text::default();
    t.line("enable f16;");
    t.line("enable wgpu_cooperative_matrix;");
    t.line("");
    t.line(format!(
        "// attend, cooperative matrices of {size} x {size}, {}, head dim {}: {subgroups} subgroups of {lanes}, {} bytes \
         of workgroup memory",
        kernel.storage.name(),
        kernel.head_dim,
        workgroup_bytes(kernel.head_dim, size, subgroups)
    ));
    t.lines(&super::kernel_prelude(kernel));
    t.lines(LOAD_Q);
    t.line("");
    let rows = size * subgroups;
    t.line(format!("var<workgroup> tile_k: array<f16, {}>;", keys * kv_stride(kernel.head_dim)));
    t.line(format!("var<workgroup> tile_v: array<f16, {}>;", keys * kv_stride(kernel.head_dim)));
    t.line(format!("var<workgroup> scores: array<f32, {}>;", rows * score_stride(keys)));
    t.line(format!("var<workgroup> weights: array<f16, {}>;", rows * weight_stride(keys)));
    t.line(format!("var<workgroup> row_factors: array<vec2<f32>, {rows}>;"));
    t.line("var<workgroup> grew: atomic<u32>;");
    t.line("var<workgroup> not_finite: atomic<u32>;");
    t.line("");
    t.line(format!("@compute @workgroup_size({})", shape.threads));
    t.block(
        "fn main(@builtin(workgroup_id) group_id: vec3<u32>, @builtin(local_invocation_index) thread: u32, \
         @builtin(subgroup_id) subgroup: u32, @builtin(subgroup_invocation_id) lane: u32)",
        |t| {
            super::item(t);
            shape.begin(t);
            super::runs(t, "full_runs", "partial_runs", |t| shape.tiles(t, false));
            super::runs(t, "partial_runs", "runs_end", |t| shape.tiles(t, true));
            shape.end(t);
        },
    );
    t.finish()
}

/// `load_q(at, d)`: element `d` of the row at unit `at`.
const LOAD_Q: &str = "fn load_q(at: u32, d: u32) -> f16 {
    let unit = q[at + (d >> 3u)];
    let pair = unpack2x16float(unit[(d >> 1u) & 3u]);
    return f16(select(pair.x, pair.y, (d & 1u) == 1u));
}";

/// The parameters on which the text depends.
struct Shape {
    kernel: AttendKernel,
    /// Rows and columns of a matrix.
    size: u32,
    /// Lanes of a subgroup.
    lanes: u32,
    subgroups: u32,
    /// Keys of a tile.
    keys: u32,
    /// Lanes that share a row.
    parts: u32,
    /// Matrices side by side in q and in the accumulator.
    fragments: u32,
    /// Matrices side by side in the scores; also the number of accumulator matrices that pass
    /// through them at a time.
    at_once: u32,
    threads: u32,
}

impl Shape {
    /// Rows, spans, Q and the state.
    fn begin(&self, t: &mut Text) {
        let (size, rows) = (self.size, self.size * self.subgroups);
        for x in ["k", "v"] {
            t.line(format!(
                "let {x}_base = params.{x}_offset + batch * params.{x}_batch + kv_head * params.{x}_head;"
            ));
        }
        t.lines(&format!(
            "let own_row = lane % {size}u;
let part = lane / {size}u;
let first_row = tile * {rows}u + subgroup * {size}u;
let row = first_row + own_row;
let row_exists = row < params.rows;
let safe = min(row, params.rows - 1u);
let lo = positions[spans + 2u * safe];
let hi = positions[spans + 2u * safe + 1u];
let q_at = params.q_offset + batch * params.q_batch + safe * params.q_row + head * params.q_head;
let ml_at = params.ml_offset + (batch * params.heads + head) * params.rows + safe;
var m = EMPTY_M;
var l = 0.0f;
var seen = full_runs < partial_runs;
let own_scores = subgroup * {}u;
let own_weights = subgroup * {}u;
let score_at = own_scores + own_row * {}u;
let weight_at = own_weights + own_row * {}u;",
            size * score_stride(self.keys),
            size * weight_stride(self.keys),
            score_stride(self.keys),
            weight_stride(self.keys),
        ));
        t.block("if (thread == 0u)", |t| t.line("atomicStore(&not_finite, 0u);"));
        for f in 0..self.fragments {
            t.line("workgroupBarrier();");
            for e in 0..size / self.parts {
                let d = format!("part * {}u + {e}u", size / self.parts);
                t.line(format!("weights[weight_at + {d}] = load_q(q_at, {}u + {d});", f * size));
            }
            t.line("workgroupBarrier();");
            t.line(format!(
                "let q{f} = {};",
                self.load('A', "&weights[own_weights]", weight_stride(self.keys))
            ));
        }
        for f in 0..self.fragments {
            t.line(format!("var o{f} = {}();", self.matrix('C')));
        }
    }

    /// The tiles of one run.
    fn tiles(&self, t: &mut Text, partial: bool) {
        t.block(format!("for (var key = first; key < end; key += {}u)", self.keys), |t| {
            t.line("workgroupBarrier();");
            t.block("if (thread == 0u)", |t| t.line("atomicStore(&grew, 0u);"));
            self.stage(t, partial);
            t.line("workgroupBarrier();");
            self.scores(t);
            t.line("workgroupBarrier();");
            self.weights(t, partial);
            t.line("workgroupBarrier();");
            t.block("if (atomicLoad(&grew) != 0u)", |t| {
                self.through_memory(t, |t, at, _| t.line(format!("scores[{at}] *= corr;")));
            });
            if partial {
                t.line("let exact = atomicLoad(&not_finite) != 0u;");
                t.block("if (exact)", |t| {
                    self.through_memory(t, |t, at, d| self.add_element(t, at, d));
                });
                t.block("if (!exact)", |t| self.accumulate(t));
            } else {
                self.accumulate(t);
            }
        });
    }

    /// K and V of a tile; zero behind the end of a partial run.
    fn stage(&self, t: &mut Text, partial: bool) {
        let units = self.kernel.head_dim / 8;
        t.block(format!("for (var i = thread; i < {}u; i += {}u)", self.keys * units, self.threads), |t| {
            t.line(format!("let j = i / {units}u;"));
            t.line(format!("let u = i % {units}u;"));
            t.line(format!("let at = j * {}u + 8u * u;", kv_stride(self.kernel.head_dim)));
            for x in ["k", "v"] {
                if partial {
                    t.line(format!(
                        "let {x}_unit = select(vec4<u32>(), {x}[{x}_base + min(key + j, end - 1u) * params.{x}_row + u], \
                         key + j < end);"
                    ));
                } else {
                    t.line(format!("let {x}_unit = {x}[{x}_base + (key + j) * params.{x}_row + u];"));
                }
                for (i, word) in ["x", "y", "z", "w"].iter().enumerate() {
                    t.line(format!("let {x}_{word} = unpack2x16float({x}_unit.{word});"));
                    t.line(format!("tile_{x}[at + {}u] = f16({x}_{word}.x);", 2 * i));
                    t.line(format!("tile_{x}[at + {}u] = f16({x}_{word}.y);", 2 * i + 1));
                }
            }
            if partial {
                t.line("let low = (v_unit & vec4<u32>(0x7c00u)) == vec4<u32>(0x7c00u);");
                t.line("let high = (v_unit & vec4<u32>(0x7c000000u)) == vec4<u32>(0x7c000000u);");
                t.block("if (any(low) || any(high))", |t| t.line("atomicStore(&not_finite, 1u);"));
            }
        });
    }

    /// Q·Kᵀ into this subgroup's scores.
    fn scores(&self, t: &mut Text) {
        let stride = kv_stride(self.kernel.head_dim);
        for g in 0..self.at_once {
            t.line(format!("var s{g} = {}();", self.matrix('C')));
        }
        for f in 0..self.fragments {
            for g in 0..self.at_once {
                // Column-major: in memory the head's elements of a key are adjacent, and the product needs K
                // transposed.
                let at = format!("&tile_k[{}u]", g * self.size * stride + f * self.size);
                t.line(format!("let k{f}_{g} = coopLoad<{}>({at}, {stride}u);", self.matrix('B')));
                t.line(format!("s{g} = coopMultiplyAdd(q{f}, k{f}_{g}, s{g});"));
            }
        }
        for g in 0..self.at_once {
            t.line(self.store_scores(&format!("s{g}"), g));
        }
    }

    /// Logits, maximum and weights of this lane's part of its row.
    fn weights(&self, t: &mut Text, partial: bool) {
        let columns = self.keys / self.parts;
        for c in 0..columns {
            let column = format!("part * {columns}u + {c}u");
            t.line(format!("let dot{c} = scores[score_at + {column}] * params.q_scale * params.x_scale;"));
            let logit = if self.kernel.softcap { format!("capped(dot{c})") } else { format!("dot{c}") };
            if partial {
                t.line(format!("let key{c} = key + {column};"));
                t.line(format!("let position{c} = positions[params.keys_at + min(key{c}, end - 1u)];"));
                t.line(format!("let vis{c} = lo <= position{c} && position{c} < hi && key{c} < end;"));
                t.line(format!("let x{c} = select(EMPTY_M, {logit}, vis{c});"));
                t.line(format!("seen = seen || vis{c};"));
            } else {
                t.line(format!("let x{c} = {logit};"));
            }
        }
        t.line("var n = m;");
        for c in 0..columns {
            t.line(format!("n = max(n, x{c});"));
        }
        self.across_parts(t, |other| format!("n = max(n, {});", other("n")));
        t.line(format!("let far = n > m + {SLACK};"));
        t.line("n = select(m, n, far);");
        t.line("let corr = weight_of(m - n);");
        t.line("m = n;");
        t.block("if (far)", |t| t.line("atomicStore(&grew, 1u);"));
        t.line("l *= corr;");
        for c in 0..columns {
            if partial {
                t.line(format!("let p{c} = select(0.0f, weight_of(x{c} - m), vis{c});"));
            } else {
                t.line(format!("let p{c} = weight_of(x{c} - m);"));
            }
            t.line(format!("l += p{c};"));
            t.line(format!("weights[weight_at + part * {columns}u + {c}u] = f16(p{c});"));
        }
    }

    /// P·V onto the accumulator.
    fn accumulate(&self, t: &mut Text) {
        let stride = kv_stride(self.kernel.head_dim);
        for g in 0..self.at_once {
            let at = format!("&weights[own_weights + {}u]", g * self.size);
            t.line(format!("let w{g} = {};", self.load('A', &at, weight_stride(self.keys))));
        }
        for f in 0..self.fragments {
            for g in 0..self.at_once {
                let at = format!("&tile_v[{}u]", g * self.size * stride + f * self.size);
                t.line(format!("let v{f}_{g} = {};", self.load('B', &at, stride)));
                t.line(format!("o{f} = coopMultiplyAdd(w{g}, v{f}_{g}, o{f});"));
            }
        }
    }

    /// Adds to the accumulator's element `d`, at `scores[at]` of this lane's row, the row's visible
    /// part of the tile.
    fn add_element(&self, t: &mut Text, at: &str, d: &str) {
        t.block(format!("for (var j = 0u; j < {}u; j++)", self.keys), |t| {
            t.line("let position = positions[params.keys_at + min(key + j, end - 1u)];");
            t.block("if (lo <= position && position < hi && key + j < end)", |t| {
                t.line(format!(
                    "scores[{at}] += f32(weights[weight_at + j]) * f32(tile_v[j * {}u + {d}]);",
                    kv_stride(self.kernel.head_dim)
                ));
            });
        });
    }

    /// Adds up l and merges the sums into the state of rows that saw a key.
    fn end(&self, t: &mut Text) {
        t.line("var sum = l;");
        t.line("var any_seen = select(0u, 1u, seen);");
        self.across_parts(t, |other| format!("sum += {};", other("sum")));
        self.across_parts(t, |other| format!("any_seen |= {};", other("any_seen")));
        t.line("workgroupBarrier();");
        t.block("if (part == 0u)", |t| {
            t.lines(&format!(
                "let ml = state_ml[ml_at];
let top = max(ml.x, m);
let keep = weight_of(ml.x - top);
let found = weight_of(m - top);
let merges = row_exists && any_seen != 0u;
row_factors[subgroup * {}u + own_row] = select(vec2<f32>(1.0f, 0.0f), vec2<f32>(keep, found), merges);",
                self.size
            ));
            t.block("if (merges)", |t| {
                t.line("state_ml[ml_at] = vec2<f32>(top, ml.y * keep + sum * found);");
            });
        });
        for first in self.passes() {
            for (g, f) in self.pass(first) {
                t.line(self.store_scores(&format!("o{f}"), g));
            }
            t.line("workgroupBarrier();");
            self.merge(t, first);
            t.line("workgroupBarrier();");
        }
    }

    /// The accumulator through workgroup memory: `each` changes `scores[at]`, element `d` of this
    /// lane's row.
    fn through_memory(&self, t: &mut Text, each: impl Fn(&mut Text, &str, &str)) {
        let columns = self.size / self.parts;
        for first in self.passes() {
            for (g, f) in self.pass(first) {
                t.line(self.store_scores(&format!("o{f}"), g));
            }
            t.line("workgroupBarrier();");
            for (g, f) in self.pass(first) {
                t.block(format!("for (var e = part * {columns}u; e < (part + 1u) * {columns}u; e++)"), |t| {
                    each(
                        t,
                        &format!("score_at + {}u + e", g * self.size),
                        &format!("{}u + e", f * self.size),
                    );
                });
            }
            t.line("workgroupBarrier();");
            for (g, f) in self.pass(first) {
                t.line(format!("o{f} = {};", self.load_scores(g)));
            }
            t.line("workgroupBarrier();");
        }
    }

    /// Merges the sums in the scores into the state's a. A subgroup's lanes share the chunks of its
    /// rows.
    fn merge(&self, t: &mut Text, first: u32) {
        let size = self.size;
        let chunks = size / 4;
        for (g, f) in self.pass(first) {
            t.block(format!("for (var i = lane; i < {}u; i += {}u)", size * chunks, self.lanes), |t| {
                t.line(format!("let r = i / {chunks}u;"));
                t.line(format!("let c = i % {chunks}u;"));
                t.line(format!(
                    "let at = own_scores + r * {}u + {}u + 4u * c;",
                    score_stride(self.keys),
                    g * size
                ));
                t.line("let a_row = min(first_row + r, params.rows - 1u);");
                t.line(format!(
                    "let chunk = params.a_offset + ((batch * params.rows + a_row) * params.heads + head) * {}u + {}u + c;",
                    self.kernel.head_dim / 4,
                    f * chunks
                ));
                t.lines(&format!(
                    "let factors = row_factors[subgroup * {size}u + r];
if (factors.y != 0.0f) {{
    let sums = vec4<f32>(scores[at], scores[at + 1u], scores[at + 2u], scores[at + 3u]);
    state_a[chunk] = state_a[chunk] * factors.x + sums * factors.y;
}}"
                ));
            });
        }
    }

    /// First matrices of the accumulator's passes through the scores.
    fn passes(&self) -> impl Iterator<Item = u32> {
        (0..self.fragments).step_by(self.at_once as usize)
    }

    /// The matrices of a pass: place in the scores, number in the accumulator.
    fn pass(&self, first: u32) -> impl Iterator<Item = (u32, u32)> {
        (first..self.fragments.min(first + self.at_once)).enumerate().map(|(g, f)| (g as u32, f))
    }

    /// Combines a value of the lanes that share a row. `line` gets a function that names the value
    /// of another lane.
    fn across_parts(&self, t: &mut Text, line: impl Fn(&dyn Fn(&str) -> String) -> String) {
        let mut distance = self.size;
        while distance < self.lanes {
            t.line(line(&|name| format!("subgroupShuffleXor({name}, {distance}u)")));
            distance *= 2;
        }
    }

    fn matrix(&self, role: char) -> String {
        let ty = if role == 'C' { "f32" } else { "f16" };
        format!("coop_mat{0}x{0}<{ty}, {role}>", self.size)
    }

    /// A row-major matrix at `at`.
    fn load(&self, role: char, at: &str, stride: u32) -> String {
        format!("coopLoadT<{}>({at}, {stride}u)", self.matrix(role))
    }

    fn load_scores(&self, g: u32) -> String {
        self.load('C', &format!("&scores[own_scores + {}u]", g * self.size), score_stride(self.keys))
    }

    fn store_scores(&self, name: &str, g: u32) -> String {
        format!("coopStoreT({name}, &scores[own_scores + {}u], {}u);", g * self.size, score_stride(self.keys))
    }
}
