//! Gradients within WebGPU's default limits: no feature, 64 threads, at most 16 KiB of workgroup
//! memory.
//!
//! 64 threads are a grid of 8 × 8. For a tile of fixed rows × 32 moving ones, thread (tr, tc) holds
//! `rows_per_thread` × 4 elements of S and of dP: fixed rows tr, tr + 8, …, moving ones tc, tc + 8,
//! …. Of the sums it holds the same fixed rows and 4-element chunks tc, tc + 8, …, in registers
//! over the whole loop.
//!
//! Workgroup memory holds 8 chunks of each of the four tensors, chunk by chunk, so that
//! neighbouring threads read neighbouring vectors. When S and dP are complete, P and dS take the
//! place of the fixed tensors, and the moving ones are loaded once more, row by row. In P and dS,
//! slot `4·s + j` is the moving row `8·j + s`: one thread's four are one vector, and the rows lie
//! in the same order.

mod bias;
mod tile;

use super::variant::{BackwardKernel, Sums};
use super::{all_runs, item, prelude};
use crate::attend::load_function;
use crate::text::Text;

pub(crate) const THREADS: u32 = 64;
/// Threads in a row of the grid, rows of threads, and chunks that are in workgroup memory at a
/// time.
pub(crate) const SIDE: u32 = 8;
/// Moving rows of a tile, and rows and keys of those of the list.
pub(crate) const COLS: u32 = 32;

/// Fixed rows of one thread. Fewer for large heads, so that the sums stay in registers.
pub(crate) const fn rows_per_thread(sums: Sums, head_dim: u32) -> u32 {
    let floats = match sums {
        Sums::KeysValues => 2 * head_dim,
        Sums::Bias | Sums::SharedBias => 0,
        _ => head_dim,
    };
    match floats {
        0..=128 => 4,
        129..=256 => 2,
        _ => 1,
    }
}

pub(crate) const fn workgroup_bytes(kernel: &BackwardKernel) -> u32 {
    let fixed = SIDE * kernel.tile_rows();
    let tensors = if kernel.sums.needs_scores() { 2 } else { 1 };
    16 * tensors * (fixed + SIDE * COLS)
}

pub(crate) fn source(kernel: BackwardKernel) -> String {
    let shape = Shape::new(kernel);
    let mut t = Text::default();
    t.lines(&format!(
        "// backward, portable, {}, {}, head dim {}: {} x {COLS}, {} bytes of workgroup memory",
        kernel.sums.name(),
        kernel.storage.name(),
        kernel.head_dim,
        shape.tile_rows,
        workgroup_bytes(&kernel),
    ));
    t.lines(&prelude(kernel));
    t.line("// A hidden pair in P or dS: a number that no product gives, which its sum skips.");
    t.line("const SKIPPED: f32 = -3.0e38f;");
    let tensors: &[&str] = match kernel.sums {
        Sums::Values => &["q", "k", "d_o"],
        _ => &["q", "k", "d_o", "v"],
    };
    for tensor in tensors {
        load_function(&mut t, tensor, kernel.storage, shape.chunks, SIDE);
    }
    let areas = if kernel.sums.needs_scores() { 2 } else { 1 };
    for area in 0..areas {
        t.line(format!("var<workgroup> fixed{area}: array<vec4<f32>, {}>;", SIDE * shape.tile_rows));
        t.line(format!("var<workgroup> moving{area}: array<vec4<f32>, {}>;", SIDE * COLS));
    }
    t.line("");
    t.line(format!("@compute @workgroup_size({THREADS})"));
    t.block(crate::finish::MAIN, |t| {
        item(t, kernel);
        shape.begin(t);
        if kernel.sums.of_one_query_head() {
            shape.head(t);
        } else {
            let heads = "params.heads_at + own_head";
            let each = format!("for (var head = lists[{heads}]; head < lists[{heads} + 1u]; head++)");
            t.block(each, |t| shape.head(t));
        }
        shape.end(t);
    });
    t.finish()
}

/// The parameters on which the text depends.
struct Shape {
    kernel: BackwardKernel,
    /// Fixed rows of the tile.
    tile_rows: u32,
    /// Fixed rows of one thread.
    rows: u32,
    /// Chunks of 4 elements in a head.
    chunks: u32,
    /// Passes over a head.
    groups: u32,
}

impl Shape {
    fn new(kernel: BackwardKernel) -> Self {
        let chunks = kernel.head_dim / 4;
        Self {
            kernel,
            tile_rows: kernel.tile_rows(),
            rows: rows_per_thread(kernel.sums, kernel.head_dim),
            chunks,
            groups: chunks.div_ceil(SIDE),
        }
    }

    /// Whether the fixed side is query rows.
    fn by_rows(&self) -> bool {
        self.kernel.sums.rows_are_fixed()
    }

    /// The fixed tensors of S and of dP, then the moving ones.
    fn tensors(&self) -> [[&'static str; 2]; 2] {
        if self.by_rows() { [["q", "k"], ["d_o", "v"]] } else { [["k", "q"], ["v", "d_o"]] }
    }

    /// Names of the sums, each with the factors and the moving tensor that it adds up: areas of
    /// workgroup memory.
    fn sums(&self) -> &'static [Sum] {
        const SCORES: Sum = Sum { name: "a", factors: "fixed1", moving: 0, scaled: true };
        const WEIGHTS: Sum = Sum { name: "b", factors: "fixed0", moving: 1, scaled: false };
        match self.kernel.sums {
            Sums::Queries | Sums::Keys => &[SCORES],
            Sums::KeysValues => &[SCORES, WEIGHTS],
            Sums::Values => &[WEIGHTS],
            Sums::Bias | Sums::SharedBias => &[],
        }
    }

    /// The runs of the query head `head`.
    fn head(&self, t: &mut Text) {
        if self.by_rows() {
            self.moving_bases(t, ["k", "v"], "kv_head");
        } else {
            self.moving_bases(t, ["q", "d_o"], "head");
            t.line(
                "let stats_base = params.stats_offset + batch * params.stats_batch + head * params.stats_head;",
            );
        }
        all_runs(t, self.kernel.bias, |t, tested| self.tiles(t, tested));
    }

    fn moving_bases(&self, t: &mut Text, tensors: [&str; 2], head: &str) {
        for x in tensors {
            t.line(format!(
                "let {x}_base = params.{x}_offset + batch * params.{x}_batch + {head} * params.{x}_head;"
            ));
        }
    }

    /// Fixed rows with what is known of each, and empty sums.
    fn begin(&self, t: &mut Text) {
        t.line("let tr = thread >> 3u;");
        t.line("let tc = thread & 7u;");
        let tensors: &[&str] = match self.kernel.sums {
            Sums::Queries | Sums::Bias => &["q", "d_o"],
            Sums::Values => &["k"],
            _ => &["k", "v"],
        };
        for i in 0..self.rows {
            t.lines(&format!(
                "let row{i} = tile * {}u + {}u + tr;
let in{i} = row{i} < params.fixed_end;
let safe{i} = min(row{i}, params.fixed_end - 1u);",
                self.tile_rows,
                SIDE * i,
            ));
            let at = |x: &str| {
                let head = self.kernel.fixed_head(x);
                format!(
                    "params.{x}_offset + batch * params.{x}_batch + safe{i} * params.{x}_row + {head} * params.{x}_head"
                )
            };
            for x in tensors {
                t.line(format!("let {x}_at{i} = {};", at(x)));
            }
            t.line(format!("let sum_at{i} = {};", at("sum")));
            if self.by_rows() {
                t.lines(&format!(
                    "let lo{i} = lists[spans + 2u * safe{i}];
let hi{i} = lists[spans + 2u * safe{i} + 1u];
let stats{i} = stats[{}];",
                    at("stats")
                ));
                if self.kernel.bias.any() {
                    t.line(format!("let bias_row{i} = {};", at("bias")));
                }
            } else {
                t.line(format!("let pos{i} = lists[params.keys_at + safe{i}];"));
            }
            for sum in self.sums() {
                for g in 0..self.groups {
                    t.line(format!("var {}{i}_{g} = vec4<f32>();", sum.name));
                }
            }
            if self.kernel.sums.of_bias() {
                self.begin_bias(t, i);
            }
        }
        for it in 0..COLS / SIDE {
            // The moving row of slot `8 · it + tr`.
            t.line(format!("let load{it} = (tr & 3u) * 8u + (tr >> 2u) + {}u;", 2 * it));
        }
    }

    /// The tiles of one run.
    fn tiles(&self, t: &mut Text, tested: bool) {
        t.block(format!("for (var col = first; col < end; col += {COLS}u)"), |t| {
            self.columns(t, tested);
            self.scores(t, tested);
            self.weights(t, tested);
            if self.kernel.sums.of_bias() {
                self.add_bias(t);
                return;
            }
            for g in 0..self.groups {
                self.accumulate(t, tested, g);
            }
        });
    }

    /// Adds the sums to those in memory.
    fn end(&self, t: &mut Text) {
        if self.kernel.sums.of_bias() {
            return self.end_bias(t);
        }
        for i in 0..self.rows {
            let condition =
                if self.by_rows() { format!("in{i} && saw_keys(stats{i}.x)") } else { format!("in{i}") };
            t.block(format!("if ({condition})"), |t| {
                for sum in self.sums() {
                    let buffer = match (self.by_rows(), sum.scaled) {
                        (true, _) => "dq",
                        (false, true) => "dk",
                        (false, false) => "dv",
                    };
                    for g in 0..self.groups {
                        let chunk = format!("{}u + tc", g * SIDE);
                        let factor = if sum.scaled { " * params.scale" } else { "" };
                        let at = format!("{buffer}[sum_at{i} + {chunk}]");
                        let store = format!("{at} = {at} + {}{i}_{g}{factor};", sum.name);
                        if (g + 1) * SIDE > self.chunks {
                            t.block(format!("if ({chunk} < {}u)", self.chunks), |t| t.line(store));
                        } else {
                            t.line(store);
                        }
                    }
                }
            });
        }
    }
}

/// A sum in registers.
struct Sum {
    name: &'static str,
    /// The area with its factors.
    factors: &'static str,
    /// Which moving tensor it adds up.
    moving: usize,
    /// Of dS, and so with the scale.
    scaled: bool,
}
