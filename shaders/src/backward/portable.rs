//! Gradients within WebGPU's default limits: no feature, 64 threads, at most 16 KiB of workgroup memory.
//!
//! 64 threads are a grid of 8 × 8. For a tile of fixed rows × 32 moving ones, thread (tr, tc) holds `rows_per_thread` × 4 elements of
//! S and of dP: fixed rows tr, tr + 8, …, moving ones tc, tc + 8, …. Of the sums it holds the same fixed rows and 4-element chunks tc,
//! tc + 8, …, in registers over the whole loop.
//!
//! Workgroup memory holds 8 chunks of each of the four tensors, chunk by chunk, so that neighbouring threads read neighbouring
//! vectors. When S and dP are complete, P and dS take the place of the fixed tensors, and the moving ones are loaded once more, row by
//! row. In P and dS, slot `4·s + j` is the moving row `8·j + s`: one thread's four are one vector, and the rows lie in the same order.

use super::{BackwardKernel, Sums, all_runs, item, prelude};
use crate::attend::load_function;
use crate::text::Text;

pub(crate) const THREADS: u32 = 64;
/// Threads in a row of the grid, rows of threads, and chunks that are in workgroup memory at a time.
pub(crate) const SIDE: u32 = 8;
/// Moving rows of a tile, and rows and keys of those of the list.
pub(crate) const COLS: u32 = 32;

/// Fixed rows of one thread. Fewer for large heads, so that the sums stay in registers.
pub(crate) const fn rows_per_thread(sums: Sums, head_dim: u32) -> u32 {
    let floats = match sums {
        Sums::KeysValues => 2 * head_dim,
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
        if kernel.sums.rows_are_fixed() {
            t.line("let head = own_head;");
            t.line("let kv_head = lists[params.heads_at + own_head];");
            shape.moving_bases(t, ["k", "v"], "kv_head");
            all_runs(t, kernel.pairs, |t, tested| shape.tiles(t, tested));
        } else {
            let heads = "params.heads_at + own_head";
            t.block(format!("for (var head = lists[{heads}]; head < lists[{heads} + 1u]; head++)"), |t| {
                shape.moving_bases(t, ["q", "d_o"], "head");
                t.line(
                    "let stats_base = params.stats_offset + batch * params.stats_batch + head * params.stats_head;",
                );
                all_runs(t, kernel.pairs, |t, tested| shape.tiles(t, tested));
            });
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

    /// Names of the sums, each with the factors and the moving tensor that it adds up: areas of workgroup memory.
    fn sums(&self) -> &'static [Sum] {
        const SCORES: Sum = Sum { name: "a", factors: "fixed1", moving: 0, scaled: true };
        const WEIGHTS: Sum = Sum { name: "b", factors: "fixed0", moving: 1, scaled: false };
        match self.kernel.sums {
            Sums::Queries | Sums::Keys => &[SCORES],
            Sums::KeysValues => &[SCORES, WEIGHTS],
            Sums::Values => &[WEIGHTS],
        }
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
            Sums::Queries => &["q", "d_o"],
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
                format!(
                    "params.{x}_offset + batch * params.{x}_batch + safe{i} * params.{x}_row + own_head * params.{x}_head"
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
let stats{i} = stats[{}];
let lse{i} = base2_parts(stats{i}.x);",
                    at("stats")
                ));
                if self.kernel.pairs.any() {
                    t.line(format!("let pair_row{i} = {};", at("pairs")));
                }
            } else {
                t.line(format!("let pos{i} = lists[params.keys_at + safe{i}];"));
            }
            for sum in self.sums() {
                for g in 0..self.groups {
                    t.line(format!("var {}{i}_{g} = vec4<f32>();", sum.name));
                }
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
            for g in 0..self.groups {
                self.accumulate(t, tested, g);
            }
        });
    }

    /// What is known of the thread's moving rows, and which of its pairs are visible.
    fn columns(&self, t: &mut Text, tested: bool) {
        let each = |f: &dyn Fn(u32) -> String| (0..4).map(f).collect::<Vec<_>>().join(", ");
        if tested || !self.by_rows() {
            t.line(format!("let cols = vec4<u32>({});", each(&|j| format!("col + {}u + tc", SIDE * j))));
            t.line(if tested { "let there = min(cols, vec4<u32>(end - 1u));" } else { "let there = cols;" });
        }
        if !self.by_rows() {
            for x in XYZW {
                t.line(format!("let stats_{x} = stats[stats_base + there.{x} * params.stats_row];"));
                t.line(format!("let lse_{x} = base2_parts(stats_{x}.x);"));
            }
            let numbers = [("lse_high", "lse", "x"), ("lse_low", "lse", "y"), ("delta", "stats", "y")];
            for (name, of, field) in
                numbers.into_iter().take(if self.kernel.sums.needs_scores() { 3 } else { 2 })
            {
                let lanes = XYZW.map(|x| format!("{of}_{x}.{field}")).join(", ");
                t.line(format!("let {name} = vec4<f32>({lanes});"));
            }
            for it in 0..COLS / SIDE {
                // Rows that saw no key are read as zeros.
                let row = format!("col + load{it}");
                let (row, inside) = if tested {
                    (format!("min({row}, end - 1u)"), format!("{row} < end && "))
                } else {
                    (format!("({row})"), String::new())
                };
                t.line(format!(
                    "let live{it} = {inside}saw_keys(stats[stats_base + {row} * params.stats_row].x);"
                ));
            }
        }
        if !tested {
            return;
        }
        t.line("let inside = cols < vec4<u32>(end);");
        if self.by_rows() {
            let positions = XYZW.map(|x| format!("lists[params.keys_at + there.{x}]")).join(", ");
            t.line(format!("let pos = vec4<u32>({positions});"));
        } else {
            for (name, offset) in [("lo", ""), ("hi", " + 1u")] {
                let bounds = XYZW.map(|x| format!("lists[spans + 2u * there.{x}{offset}]")).join(", ");
                t.line(format!("let {name} = vec4<u32>({bounds});"));
            }
            if self.kernel.pairs.any() {
                t.line(
                    "let pair_rows = vec4<u32>(params.pairs_offset + batch * params.pairs_batch + head * params.pairs_head) + there * params.pairs_row;",
                );
            }
        }
        for i in 0..self.rows {
            let span = if self.by_rows() {
                format!("(vec4<u32>(lo{i}) <= pos) & (pos < vec4<u32>(hi{i})) & inside")
            } else {
                format!("(lo <= vec4<u32>(pos{i})) & (vec4<u32>(pos{i}) < hi) & inside")
            };
            if self.kernel.pairs.any() {
                let terms = XYZW.map(|x| {
                    if self.by_rows() {
                        format!("pair_term(pair_row{i}, pos.{x})")
                    } else {
                        format!("pair_term(pair_rows.{x}, pos{i})")
                    }
                });
                t.line(format!("let term{i} = vec4<f32>({});", terms.join(", ")));
                let shown = XYZW.map(|x| format!("shows(term{i}.{x})")).join(", ");
                t.line(format!("let vis{i} = {span} & vec4<bool>({shown});"));
            } else {
                t.line(format!("let vis{i} = {span};"));
            }
        }
    }

    /// A chunk of the moving row that this thread loads at step `it`.
    fn moving(&self, tensor: &str, it: u32, chunk: &str, tested: bool) -> String {
        let row = format!("col + load{it}");
        let there = if tested { format!("min({row}, end - 1u)") } else { format!("({row})") };
        let load = format!("load_{tensor}({tensor}_base + {there} * params.{tensor}_row, {chunk})");
        if !self.by_rows() {
            format!("select(vec4<f32>(), {load}, live{it})")
        } else if tested {
            format!("select(vec4<f32>(), {load}, {row} < end)")
        } else {
            load
        }
    }

    /// S and dP.
    fn scores(&self, t: &mut Text, tested: bool) {
        let areas = if self.kernel.sums.needs_scores() { 2 } else { 1 };
        for x in &PRODUCTS[..areas] {
            for i in 0..self.rows {
                t.line(format!("var {x}{i} = vec4<f32>();"));
            }
        }
        t.block(format!("for (var g = 0u; g < {}u; g++)", self.groups), |t| {
            t.line("workgroupBarrier();");
            for (area, [fixed, moving]) in self.tensors().into_iter().enumerate().take(areas) {
                let factor = |tensor: &str| if tensor == "q" { " * params.q_scale" } else { "" };
                for i in 0..self.rows {
                    t.line(format!(
                        "fixed{area}[{}] = load_{fixed}({fixed}_at{i}, g * 8u + tc){};",
                        self.own(i),
                        factor(fixed)
                    ));
                }
                for it in 0..COLS / SIDE {
                    t.line(format!(
                        "moving{area}[tc * {COLS}u + load{it}] = {}{};",
                        self.moving(moving, it, "g * 8u + tc", tested),
                        factor(moving)
                    ));
                }
            }
            t.line("workgroupBarrier();");
            t.block(format!("for (var c = 0u; c < {SIDE}u; c++)"), |t| {
                for (area, x) in PRODUCTS.iter().enumerate().take(areas) {
                    for j in 0..4 {
                        t.line(format!("let {x}m{j} = moving{area}[c * {COLS}u + {}u + tc];", SIDE * j));
                    }
                    for i in 0..self.rows {
                        t.line(format!(
                            "let {x}f{i} = fixed{area}[c * {}u + {}u + tr];",
                            self.tile_rows,
                            SIDE * i
                        ));
                        let dots = [0, 1, 2, 3].map(|j| format!("dot({x}f{i}, {x}m{j})")).join(", ");
                        t.line(format!("{x}{i} += vec4<f32>({dots});"));
                    }
                }
            });
        });
    }

    /// P and dS, in the place of the fixed tensors.
    fn weights(&self, t: &mut Text, tested: bool) {
        let scores = self.kernel.sums.needs_scores();
        for i in 0..self.rows {
            let (high, low, delta) = if self.by_rows() {
                (format!("lse{i}.x"), format!("lse{i}.y"), format!("stats{i}.y"))
            } else {
                ("lse_high".to_owned(), "lse_low".to_owned(), "delta".to_owned())
            };
            let lanes = |f: &str| XYZW.map(|x| format!("{f}(x{i}.{x})")).join(", ");
            if self.kernel.softcap {
                if scores {
                    t.line(format!("let slope{i} = vec4<f32>({});", lanes("slope_of")));
                }
                t.line(format!("x{i} = vec4<f32>({});", lanes("capped")));
            }
            let term = if self.kernel.pairs.any() { format!(" + term{i}") } else { String::new() };
            let below = format!("((x{i}{term}) - {high}) - {low}");
            t.line(if tested {
                format!("x{i} = select(vec4<f32>(EMPTY_M), {below}, vis{i});")
            } else {
                format!("x{i} = {below};")
            });
            t.line(format!("let p{i} = vec4<f32>({});", lanes("weight_of")));
            if scores {
                let slope = if self.kernel.softcap { format!(" * slope{i}") } else { String::new() };
                t.line(format!("let s{i} = p{i} * (d{i} - {delta}){slope};"));
            }
        }
        t.line("workgroupBarrier();");
        for sum in self.sums() {
            for i in 0..self.rows {
                let value = if sum.scaled { "s" } else { "p" };
                let value = if tested {
                    format!("select(vec4<f32>(SKIPPED), {value}{i}, vis{i})")
                } else {
                    format!("{value}{i}")
                };
                t.line(format!("{}[{}] = {value};", sum.factors, self.own(i)));
            }
        }
    }

    /// The chunks of pass `g` of the sums.
    fn accumulate(&self, t: &mut Text, tested: bool, g: u32) {
        if g > 0 {
            t.line("workgroupBarrier();");
        }
        for sum in self.sums() {
            let tensor = self.tensors()[sum.moving][1];
            for it in 0..COLS / SIDE {
                t.line(format!(
                    "{}[({}u + tr) * {SIDE}u + tc] = {};",
                    self.area(sum),
                    SIDE * it,
                    self.moving(tensor, it, &format!("{}u + tc", g * SIDE), tested)
                ));
            }
        }
        t.line("workgroupBarrier();");
        t.block(format!("for (var s = 0u; s < {SIDE}u; s++)"), |t| {
            for sum in self.sums() {
                let name = sum.name;
                for j in 0..4 {
                    t.line(format!("let {name}m{j} = {}[(s * 4u + {j}u) * {SIDE}u + tc];", self.area(sum)));
                }
                for i in 0..self.rows {
                    t.line(format!(
                        "let {name}w{i} = {}[s * {}u + {}u + tr];",
                        sum.factors,
                        self.tile_rows,
                        SIDE * i
                    ));
                    let term = |j: usize| {
                        let weight = format!("{name}w{i}.{}", XYZW[j]);
                        if tested {
                            format!("select({name}m{j} * {weight}, vec4<f32>(), {weight} == SKIPPED)")
                        } else {
                            format!("{name}m{j} * {weight}")
                        }
                    };
                    t.line(format!(
                        "{name}{i}_{g} += ({} + {}) + ({} + {});",
                        term(0),
                        term(1),
                        term(2),
                        term(3)
                    ));
                }
            }
        });
    }

    /// Adds the sums to those in memory.
    fn end(&self, t: &mut Text) {
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

    /// Index of this thread in a fixed area, for its `i`-th row.
    fn own(&self, i: u32) -> String {
        format!("tc * {}u + {}u + tr", self.tile_rows, SIDE * i)
    }

    /// Where the moving rows of a sum are staged.
    fn area(&self, sum: &Sum) -> String {
        // The kernel of dV alone has one area, which is free by then.
        format!("moving{}", if self.kernel.sums == Sums::Values { 0 } else { sum.moving })
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

/// Names of S and dP.
const PRODUCTS: [&str; 2] = ["x", "d"];
const XYZW: [&str; 4] = ["x", "y", "z", "w"];
