//! The gradient of a bias: dS of a tile of fixed rows × 32 moving ones, before the factor of the
//! softcap.

use super::tile::XYZW;
use super::{SIDE, Shape};
use crate::text::Text;

impl Shape {
    /// Of the thread's `i`-th fixed row: whether it adds anything; or of a key, its sum over the
    /// thread's query rows.
    pub(super) fn begin_bias(&self, t: &mut Text, i: u32) {
        t.line(if self.by_rows() {
            format!("let adds{i} = in{i} && saw_keys(stats{i}.x);")
        } else {
            format!("var bias{i} = vec4<f32>();")
        });
    }

    /// Adds dS of the thread's visible pairs: those of rows to memory, where no other thread of the
    /// dispatch has these pairs; those of keys to its sums.
    pub(super) fn add_bias(&self, t: &mut Text) {
        if !self.by_rows() {
            let live = XYZW.map(|x| format!("saw_keys(stats_{x}.x)")).join(", ");
            t.line(format!("let live = vec4<bool>({live});"));
        }
        for i in 0..self.rows {
            if !self.by_rows() {
                t.line(format!("bias{i} += select(vec4<f32>(), s{i}, vis{i} & live);"));
                continue;
            }
            for x in XYZW {
                t.block(format!("if (adds{i} && vis{i}.{x})"), |t| {
                    t.line(format!("let element = sum_at{i} + pos.{x};"));
                    t.line(format!("d_bias[element] = d_bias[element] + s{i}.{x};"));
                });
            }
        }
    }

    /// Adds up the sums of a key that are in eight threads.
    pub(super) fn end_bias(&self, t: &mut Text) {
        if self.by_rows() {
            return;
        }
        t.line("workgroupBarrier();");
        for i in 0..self.rows {
            t.line(format!("fixed0[{}] = bias{i};", self.own(i)));
        }
        t.line("workgroupBarrier();");
        t.line("if (tc != 0u) { return; }");
        for i in 0..self.rows {
            t.block(format!("if (in{i})"), |t| {
                t.line("var sum = vec4<f32>();");
                t.block(format!("for (var c = 0u; c < {SIDE}u; c++)"), |t| {
                    t.line(format!("sum += fixed0[c * {}u + {}u + tr];", self.tile_rows, SIDE * i));
                });
                t.line(format!("let element = sum_at{i} + pos{i};"));
                t.line("d_bias[element] = d_bias[element] + ((sum.x + sum.y) + (sum.z + sum.w));");
            });
        }
    }
}
