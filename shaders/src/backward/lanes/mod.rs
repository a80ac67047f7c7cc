//! Gradients for drivers that compute on the host's cores, as [`crate::attend::subgroup`] attends:
//! one subgroup is one workgroup, and one SIMD register there.
//!
//! Each lane keeps whole fixed rows in named registers: a row's q, d_o and dQ, or a key's k, v, dK
//! and dV. All lanes go through the same moving rows, which are textures: the subgroup loads a row
//! together, and each element is broadcast from a constant lane. No workgroup memory, no barrier,
//! no branch in the loop.
//!
//! A logit is added up in the chains of the forward kernel, whose number depends on the head dim
//! alone. With logits of 100, another order of additions would change a weight by 1e-5. A pair that
//! one direction tests may be in a full run of the other: the ragged tile at the end is one of keys
//! there and one of rows here. So the order may not depend on the kind of the run.

mod bias;

use super::variant::BackwardKernel;
use super::{all_runs, item, prelude};
use crate::attend::subgroup;
use crate::text::Text;
use crate::variant::{AttendVariant, Tile};

/// The tiles of the forward kernel.
pub(crate) const fn list_tile(lanes: u32, head_dim: u32) -> Tile {
    Tile { q_rows: lanes * forward_rows(lanes, head_dim), kv_cols: subgroup::KV_COLS }
}

const fn forward_rows(lanes: u32, head_dim: u32) -> u32 {
    match AttendVariant::subgroup_broadcast(lanes, head_dim) {
        AttendVariant::SubgroupBroadcast { rows_per_lane, .. } => rows_per_lane,
        _ => 1,
    }
}

/// Fixed rows of a lane; they divide those of the list's tile.
pub(crate) const fn rows_per_lane(kernel: &BackwardKernel, lanes: u32) -> u32 {
    if kernel.sums.rows_are_fixed() {
        forward_rows(lanes, kernel.head_dim)
    } else if kernel.head_dim <= 64 {
        2
    } else {
        1
    }
}

pub(crate) fn source(kernel: BackwardKernel, lanes: u32) -> String {
    let shape = Shape::new(kernel, lanes);
    let mut t = Text::default();
    t.line(format!(
        "// backward, lanes, {}, {}, head dim {}: subgroups of {lanes}, {} rows in each lane",
        kernel.sums.name(),
        kernel.storage.name(),
        kernel.head_dim,
        shape.rows,
    ));
    t.lines(&prelude(kernel));
    t.lines(kernel.storage.texel_functions());
    t.line("");
    t.line(format!("@compute @workgroup_size({lanes})"));
    t.block(
        "fn main(@builtin(workgroup_id) group_id: vec3<u32>, @builtin(subgroup_invocation_id) lane: u32)",
        |t| {
            item(t, kernel);
            shape.begin(t);
            let runs = |t: &mut Text| {
                shape.units(t, if shape.by_rows() { "kv_head" } else { "head" });
                all_runs(t, kernel.bias, |t, tested| shape.run(t, tested));
            };
            if kernel.sums.of_one_query_head() {
                runs(t);
            } else {
                let heads = "params.heads_at + own_head";
                let each = format!("for (var head = lists[{heads}]; head < lists[{heads} + 1u]; head++)");
                t.block(each, runs);
            }
            shape.end(t);
        },
    );
    t.finish()
}

/// The parameters on which the text depends.
struct Shape {
    kernel: BackwardKernel,
    lanes: u32,
    /// Fixed rows of a lane.
    rows: u32,
    /// Chunks of 4 elements in a head.
    chunks: u32,
    /// 16-byte units in a head.
    units: u32,
}

impl Shape {
    fn new(kernel: BackwardKernel, lanes: u32) -> Self {
        Self {
            kernel,
            lanes,
            rows: rows_per_lane(&kernel, lanes),
            chunks: kernel.head_dim / 4,
            units: kernel.head_dim / kernel.storage.unit_elements(),
        }
    }

    fn by_rows(&self) -> bool {
        self.kernel.sums.rows_are_fixed()
    }

    /// The fixed tensors of S and of dP.
    fn fixed(&self) -> [&'static str; 2] {
        if self.by_rows() { ["q", "d_o"] } else { ["k", "v"] }
    }

    /// The moving tensors of S and of dP.
    fn moving(&self) -> [&'static str; 2] {
        if self.by_rows() { ["k", "v"] } else { ["q", "d_o"] }
    }

    /// Fixed rows and what is known of them, and empty sums.
    fn begin(&self, t: &mut Text) {
        t.line("let moving_y = (batch - params.batch_first) * params.moving_texels - params.moving_begin;");
        for r in 0..self.rows {
            t.lines(&format!(
                "let row{r} = tile * {}u + {}u + lane;
let in{r} = row{r} < params.fixed_end;
let safe{r} = min(row{r}, params.fixed_end - 1u);",
                self.lanes * self.rows,
                self.lanes * r,
            ));
            let at = |x: &str| {
                let head = self.kernel.fixed_head(x);
                format!(
                    "params.{x}_offset + batch * params.{x}_batch + safe{r} * params.{x}_row + {head} * params.{x}_head"
                )
            };
            t.line(format!("let sum_at{r} = {};", at("sum")));
            if self.by_rows() {
                t.lines(&format!(
                    "let lo{r} = lists[spans + 2u * safe{r}];
let hi{r} = lists[spans + 2u * safe{r} + 1u];
let stats{r} = stats[{}];
let delta{r} = stats{r}.z;",
                    at("stats")
                ));
                if self.kernel.bias.any() {
                    t.line(format!("let bias_row{r} = {};", at("bias")));
                }
            } else {
                t.line(format!("let pos{r} = lists[params.keys_at + safe{r}];"));
            }
            for x in self.fixed() {
                t.line(format!("let {x}_at{r} = {};", at(x)));
                let factor = if x == "q" { " * params.q_scale" } else { "" };
                for u in 0..self.units {
                    t.line(format!("let {x}_unit{r}_{u} = {x}[{x}_at{r} + {u}u];"));
                    for half in 0..self.kernel.storage.unit_chunks() {
                        let c = u * self.kernel.storage.unit_chunks() + half;
                        t.line(format!("let {x}{r}_{c} = chunk_{half}({x}_unit{r}_{u}){factor};"));
                    }
                }
            }
            for sum in self.sums() {
                for c in 0..self.chunks {
                    for component in XYZW {
                        t.line(format!("var {sum}{r}_{c}{component} = 0.0f;"));
                    }
                }
            }
            if self.kernel.sums.of_bias() {
                self.begin_bias(t, r);
            }
        }
    }

    /// Names of the sums: of dS, and of P.
    fn sums(&self) -> &'static [&'static str] {
        match self.kernel.sums {
            sums if sums.of_bias() => &[],
            sums if sums.rows_are_fixed() => &["a"],
            _ => &["a", "b"],
        }
    }

    /// The units of a moving row that this lane loads.
    fn units(&self, t: &mut Text, head: &str) {
        for load in 0..self.loads() {
            // Lanes beyond the head load its last unit again; no other lane reads it from them.
            t.line(format!(
                "let unit{load} = {head} * {}u + min(lane + {}u, {}u);",
                self.units,
                load * self.lanes,
                self.units - 1
            ));
        }
    }

    /// The moving rows of one run.
    fn run(&self, t: &mut Text, tested: bool) {
        t.block("for (var at = first; at < end; at++)", |t| {
            let [scores, values] = self.moving();
            if !self.by_rows() {
                t.lines(
                    "let stats_at = bitcast<vec4<f32>>(textureLoad(stats, vec2<i32>(vec2<u32>(head, moving_y + at))));
let live = saw_keys(stats_at.x);",
                );
            }
            self.fetch(t, scores, if self.by_rows() { "" } else { " * params.q_scale" });
            self.fetch(t, values, "");
            self.products(t, scores, self.fixed()[0], "x");
            self.products(t, values, self.fixed()[1], "d");
            self.visible(t, tested);
            for r in 0..self.rows {
                self.weights(t, tested, r);
            }
            if self.kernel.sums.of_bias() {
                return self.add_bias(t);
            }
            self.add(t, tested, scores, "a", "s");
            if !self.by_rows() {
                self.add(t, tested, values, "b", "p");
            }
        });
    }

    /// Loads the moving row `at`: this lane's units, unpacked before they are broadcast. A row that
    /// saw no key is zeros.
    fn fetch(&self, t: &mut Text, tensor: &str, factor: &str) {
        for load in 0..self.loads() {
            t.line(format!(
                "let {tensor}_texel{load} = textureLoad({tensor}, vec2<i32>(vec2<u32>(unit{load}, moving_y + at)));"
            ));
            for half in 0..self.kernel.storage.unit_chunks() {
                let texel = format!("texel_{half}({tensor}_texel{load}){factor}");
                let own = if self.by_rows() { texel } else { format!("select(vec4<f32>(), {texel}, live)") };
                t.line(format!("let {tensor}_own{load}_{half} = {own};"));
            }
        }
    }

    /// The products of the moving row with each fixed one, and the elements of the moving row.
    fn products(&self, t: &mut Text, moving: &str, fixed: &str, name: &str) {
        let chains = subgroup::chains(self.kernel.head_dim);
        for c in 0..self.chunks {
            for (i, component) in (0..).zip(XYZW) {
                let element = 4 * c + i;
                t.line(format!("let {moving}_{c}{component} = {};", self.broadcast(moving, c, component)));
                for r in 0..self.rows {
                    let sum = format!("{name}{r}_chain{}", element % chains);
                    let factors = (format!("{fixed}{r}_{c}.{component}"), format!("{moving}_{c}{component}"));
                    t.line(if element < chains {
                        format!("var {sum} = {} * {};", factors.0, factors.1)
                    } else {
                        format!("{sum} = fma({}, {}, {sum});", factors.0, factors.1)
                    });
                }
            }
        }
        for r in 0..self.rows {
            let chains = (0..chains).map(|chain| format!("{name}{r}_chain{chain}"));
            let factor = if name == "x" { " * params.x_scale" } else { "" };
            t.line(format!("let {name}{r} = ({}){factor};", chains.collect::<Vec<_>>().join(" + ")));
        }
    }

    /// Which of the lane's pairs are visible.
    fn visible(&self, t: &mut Text, tested: bool) {
        if !tested {
            return;
        }
        if self.by_rows() {
            t.line("let position = lists[params.keys_at + at];");
        } else {
            t.line("let lo = lists[spans + 2u * at];");
            t.line("let hi = lists[spans + 2u * at + 1u];");
            if self.kernel.bias.any() {
                t.line(
                    "let bias_row = params.bias_offset + batch * params.bias_batch + at * params.bias_row + head * params.bias_head;",
                );
            }
        }
        for r in 0..self.rows {
            let (span, term) = if self.by_rows() {
                (format!("lo{r} <= position && position < hi{r}"), format!("bias_row{r}, position"))
            } else {
                (format!("lo <= pos{r} && pos{r} < hi"), format!("bias_row, pos{r}"))
            };
            if self.kernel.bias.any() {
                t.line(format!("let term{r} = bias_term({term});"));
                t.line(format!("let vis{r} = {span} && shows(term{r});"));
            } else {
                t.line(format!("let vis{r} = {span};"));
            }
        }
    }

    /// P and dS of one pair.
    fn weights(&self, t: &mut Text, tested: bool, r: u32) {
        let (lse, delta) = if self.by_rows() {
            (format!("stats{r}.x, stats{r}.y"), format!("delta{r}"))
        } else {
            ("stats_at.x, stats_at.y".to_owned(), "stats_at.z".to_owned())
        };
        let logit = if self.kernel.softcap { format!("capped(x{r})") } else { format!("x{r}") };
        let term = if self.kernel.bias.any() { format!(" + term{r}") } else { String::new() };
        let slope = match self.kernel.softcap && self.kernel.needs_slope() {
            true => format!(" * slope_of(x{r})"),
            false => String::new(),
        };
        let logit = format!("{logit}{term}");
        if tested {
            t.line(format!("let p{r} = select(0.0f, share_of({logit}, {lse}), vis{r});"));
            t.line(format!("let s{r} = select(0.0f, p{r} * (d{r} - {delta}){slope}, vis{r});"));
        } else {
            t.line(format!("let p{r} = share_of({logit}, {lse});"));
            t.line(format!("let s{r} = p{r} * (d{r} - {delta}){slope};"));
        }
    }

    /// Adds the moving row, times dS or P, to a sum.
    fn add(&self, t: &mut Text, tested: bool, moving: &str, sum: &str, factor: &str) {
        for c in 0..self.chunks {
            for component in XYZW {
                for r in 0..self.rows {
                    let element = format!("{moving}_{c}{component}");
                    // A hidden element is replaced: 0 · NaN is NaN.
                    let element = if tested { format!("select(0.0f, {element}, vis{r})") } else { element };
                    let sum = format!("{sum}{r}_{c}{component}");
                    t.line(format!("{sum} = fma({element}, {factor}{r}, {sum});"));
                }
            }
        }
    }

    /// Adds the sums to those in memory.
    fn end(&self, t: &mut Text) {
        if self.kernel.sums.of_bias() {
            return self.end_bias(t);
        }
        for r in 0..self.rows {
            let condition =
                if self.by_rows() { format!("in{r} && saw_keys(stats{r}.x)") } else { format!("in{r}") };
            t.block(format!("if ({condition})"), |t| {
                for (sum, buffer) in self.sums().iter().zip(self.kernel.sums.targets()) {
                    for c in 0..self.chunks {
                        let [x, y, z, w] = XYZW.map(|component| format!("{sum}{r}_{c}{component}"));
                        let factor = match (*sum, self.by_rows()) {
                            ("b", _) => "",
                            (_, true) => " * params.scale",
                            // The factor on q is in the sum.
                            (_, false) => " * params.unscale",
                        };
                        let at = format!("{buffer}[sum_at{r} + {c}u]");
                        t.line(format!("{at} = {at} + vec4<f32>({x}, {y}, {z}, {w}){factor};"));
                    }
                }
            });
        }
    }

    /// An element of the loaded row, in every lane.
    fn broadcast(&self, tensor: &str, c: u32, component: &str) -> String {
        let unit = c / self.kernel.storage.unit_chunks();
        format!(
            "subgroupBroadcast({tensor}_own{}_{}.{component}, {}u)",
            unit / self.lanes,
            c % self.kernel.storage.unit_chunks(),
            unit % self.lanes
        )
    }

    fn loads(&self) -> u32 {
        self.units.div_ceil(self.lanes)
    }
}

const XYZW: [&str; 4] = ["x", "y", "z", "w"];
