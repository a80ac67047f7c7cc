//! Sums of f32 rows.

use crate::backend::{Extent, Layout};

/// `into += from`, f32 rows; layouts and the length of a row are in bytes.
pub(in super::super) fn accumulate(
    (source, from): (&[f32], Layout),
    (target, into): (&mut [f32], Layout),
    extent: Extent,
) {
    let Extent { batch, rows, heads, row_bytes } = extent;
    let count = row_bytes / 4;
    for b in 0..batch {
        for row in 0..rows {
            for head in 0..heads {
                let at = |layout: &Layout| {
                    let bytes = layout.offset
                        + b * layout.batch_stride
                        + row * layout.row_stride
                        + head * layout.head_stride;
                    bytes / 4
                };
                let (s, t) = (at(&from), at(&into));
                for (sum, value) in target[t..t + count].iter_mut().zip(&source[s..s + count]) {
                    *sum += value;
                }
            }
        }
    }
}
