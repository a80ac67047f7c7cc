//! Strided copies.

use crate::backend::{Extent, Layout};

/// Copies `extent` rows of bytes from one layout to another.
pub(super) fn repack(from: (&[u8], Layout), into: (&mut [u8], Layout), extent: Extent) {
    let Extent { batch, mut rows, mut heads, mut row_bytes } = extent;
    let (source, from) = from;
    let (target, into) = into;
    let dense = |stride: fn(&Layout) -> usize, inner: usize| stride(&from) == inner && stride(&into) == inner;
    // Adjacent heads, then adjacent rows, are one longer row: few long copies instead of many short
    // ones.
    if dense(|layout| layout.head_stride, row_bytes) {
        row_bytes *= heads;
        heads = 1;
        if dense(|layout| layout.row_stride, row_bytes) {
            row_bytes *= rows;
            rows = 1;
        }
    }
    if row_bytes == 0 {
        return;
    }
    for b in 0..batch {
        for row in 0..rows {
            for head in 0..heads {
                let at = |layout: &Layout| {
                    layout.offset
                        + b * layout.batch_stride
                        + row * layout.row_stride
                        + head * layout.head_stride
                };
                let (s, t) = (at(&from), at(&into));
                target[t..t + row_bytes].copy_from_slice(&source[s..s + row_bytes]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_trip_through_head_major_order_gives_the_same_bytes() {
        let extent = Extent { batch: 2, rows: 3, heads: 4, row_bytes: 8 };
        let source: Vec<u8> = (0..2 * 3 * 4 * 8 + 16).map(|i| i as u8).collect();
        let dense = |offset| Layout { offset, batch_stride: 96, row_stride: 32, head_stride: 8 };
        let head_major = Layout { offset: 4, batch_stride: 96, row_stride: 8, head_stride: 24 };
        let mut middle = vec![0xff; 200];
        let mut back = vec![0xff; 192 + 16];
        repack((&source, dense(16)), (&mut middle, head_major), extent);
        // (batch 1, row 2, head 3)
        assert_eq!(middle[4 + 96 + 16 + 72..][..8], source[16 + 96 + 64 + 24..][..8]);
        repack((&middle, head_major), (&mut back, dense(8)), extent);
        assert_eq!(back[8..200], source[16..208]);
        assert!(back[..8].iter().chain(&back[200..]).all(|byte| *byte == 0xff));
        let mut copy = vec![0; 208];
        repack((&source, dense(0)), (&mut copy, dense(0)), extent);
        assert_eq!(copy[..192], source[..192]);
    }
}
