//! One tile of fixed rows × 32 moving ones: S and dP, P and dS, and what they add to the sums.

use super::{COLS, SIDE, Shape, Sum};
use crate::backward::variant::Sums;
use crate::text::Text;

impl Shape {
    /// What is known of the thread's moving rows, and which of its pairs are visible.
    pub(super) fn columns(&self, t: &mut Text, tested: bool) {
        let each = |f: &dyn Fn(u32) -> String| (0..4).map(f).collect::<Vec<_>>().join(", ");
        if tested || !self.by_rows() {
            t.line(format!("let cols = vec4<u32>({});", each(&|j| format!("col + {}u + tc", SIDE * j))));
            t.line(if tested { "let there = min(cols, vec4<u32>(end - 1u));" } else { "let there = cols;" });
        }
        if !self.by_rows() {
            for x in XYZW {
                t.line(format!("let stats_{x} = stats[stats_base + there.{x} * params.stats_row];"));
            }
            let numbers = [("lse", "x"), ("factor", "y"), ("delta", "z")];
            for (name, field) in numbers.into_iter().take(if self.kernel.sums.needs_scores() { 3 } else { 2 })
            {
                let lanes = XYZW.map(|x| format!("stats_{x}.{field}")).join(", ");
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
            if self.kernel.bias.any() {
                t.line(
                    "let bias_rows = vec4<u32>(params.bias_offset + batch * params.bias_batch + head * params.bias_head) + there * params.bias_row;",
                );
            }
        }
        for i in 0..self.rows {
            let span = if self.by_rows() {
                format!("(vec4<u32>(lo{i}) <= pos) & (pos < vec4<u32>(hi{i})) & inside")
            } else {
                format!("(lo <= vec4<u32>(pos{i})) & (vec4<u32>(pos{i}) < hi) & inside")
            };
            if self.kernel.bias.any() {
                let terms = XYZW.map(|x| {
                    if self.by_rows() {
                        format!("bias_term(bias_row{i}, pos.{x})")
                    } else {
                        format!("bias_term(bias_rows.{x}, pos{i})")
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
    pub(super) fn scores(&self, t: &mut Text, tested: bool) {
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
    pub(super) fn weights(&self, t: &mut Text, tested: bool) {
        let scores = self.kernel.sums.needs_scores();
        for i in 0..self.rows {
            let [lse, factor, delta] = if self.by_rows() {
                ["x", "y", "z"].map(|number| format!("stats{i}.{number}"))
            } else {
                ["lse", "factor", "delta"].map(str::to_owned)
            };
            t.line(format!("x{i} *= params.x_scale;"));
            let lanes = |f: &str| XYZW.map(|x| format!("{f}(x{i}.{x})")).join(", ");
            if self.kernel.softcap {
                if self.kernel.needs_slope() {
                    t.line(format!("let slope{i} = vec4<f32>({});", lanes("slope_of")));
                }
                t.line(format!("x{i} = vec4<f32>({});", lanes("capped")));
            }
            if self.kernel.bias.any() {
                t.line(format!("x{i} += term{i};"));
            }
            let shares = XYZW.map(|x| {
                let lane = if self.by_rows() { String::new() } else { format!(".{x}") };
                format!("share_of(x{i}.{x}, {lse}{lane}, {factor}{lane})")
            });
            let shares = format!("vec4<f32>({})", shares.join(", "));
            t.line(if tested {
                format!("let p{i} = select(vec4<f32>(), {shares}, vis{i});")
            } else {
                format!("let p{i} = {shares};")
            });
            if scores {
                let slope = match self.kernel.softcap && self.kernel.needs_slope() {
                    true => format!(" * slope{i}"),
                    false => String::new(),
                };
                t.line(format!("let s{i} = p{i} * (d{i} - {delta}){slope};"));
            }
        }
        if self.sums().is_empty() {
            return;
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
    pub(super) fn accumulate(&self, t: &mut Text, tested: bool, g: u32) {
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

    /// Index of this thread in a fixed area, for its `i`-th row.
    pub(super) fn own(&self, i: u32) -> String {
        format!("tc * {}u + {}u + tr", self.tile_rows, SIDE * i)
    }

    /// Where the moving rows of a sum are staged.
    fn area(&self, sum: &Sum) -> String {
        // The kernel of dV alone has one area, which is free by then.
        format!("moving{}", if self.kernel.sums == Sums::Values { 0 } else { sum.moving })
    }
}

/// Names of S and dP.
const PRODUCTS: [&str; 2] = ["x", "d"];
pub(super) const XYZW: [&str; 4] = ["x", "y", "z", "w"];
