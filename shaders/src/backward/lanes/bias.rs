//! The gradient of a bias: dS of a lane's pairs, before the factor of the softcap.

use super::Shape;
use crate::text::Text;

impl Shape {
    /// Of the lane's `r`-th fixed row: whether it adds anything; or of a key, its sum over query
    /// rows.
    pub(super) fn begin_bias(&self, t: &mut Text, r: u32) {
        t.line(if self.by_rows() {
            format!("let adds{r} = in{r} && saw_keys(stats{r}.x);")
        } else {
            format!("var bias{r} = 0.0f;")
        });
    }

    /// Adds dS of the lane's pairs with the moving row: those of rows to memory, where no other
    /// lane of the dispatch has these pairs; those of keys to its sums.
    pub(super) fn add_bias(&self, t: &mut Text) {
        for r in 0..self.rows {
            if self.by_rows() {
                t.block(format!("if (adds{r} && vis{r})"), |t| {
                    t.line(format!("let element = sum_at{r} + position;"));
                    t.line(format!("d_bias[element] = d_bias[element] + s{r};"));
                });
            } else {
                t.line(format!("bias{r} += select(0.0f, s{r}, vis{r} && live);"));
            }
        }
    }

    /// Adds the sums of keys to those in memory.
    pub(super) fn end_bias(&self, t: &mut Text) {
        if self.by_rows() {
            return;
        }
        for r in 0..self.rows {
            t.block(format!("if (in{r})"), |t| {
                t.line(format!("let element = sum_at{r} + pos{r};"));
                t.line(format!("d_bias[element] = d_bias[element] + bias{r};"));
            });
        }
    }
}
