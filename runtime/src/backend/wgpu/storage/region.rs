//! The bytes that a range of batch entries and rows of a strided tensor covers, and how many of
//! them fit one binding.

use std::ops::Range;

use super::buffer::WgpuBuffer;
use crate::backend::Layout;
use crate::backend::wgpu::numbers::wide;

/// A strided `[batch, rows, heads, ·]` tensor, in bytes.
#[derive(Clone, Copy, Debug)]
pub(in crate::backend::wgpu) struct Strided {
    layout: Layout,
    batch: usize,
    rows: usize,
    heads: usize,
    head_bytes: usize,
    /// From the first byte of a row to the last of its last head.
    row_reach: usize,
}

/// The heads of k or v that queries attend to, as the source of a texture. All sizes are in bytes.
#[derive(Clone, Copy, Debug)]
pub(in crate::backend::wgpu) struct Source<'a> {
    pub(in crate::backend::wgpu) buffer: &'a WgpuBuffer,
    /// In bytes.
    pub(in crate::backend::wgpu) layout: Layout,
    pub(in crate::backend::wgpu) heads: usize,
    /// Bytes of one head of one row.
    pub(in crate::backend::wgpu) head_bytes: usize,
}

impl Strided {
    /// `layout` counts elements of `element_bytes`; each head has `dim` of them.
    pub(in crate::backend::wgpu) fn new(
        layout: Layout,
        element_bytes: usize,
        [batch, rows, heads, dim]: [usize; 4],
    ) -> Self {
        let layout = Layout {
            offset: layout.offset * element_bytes,
            batch_stride: layout.batch_stride * element_bytes,
            row_stride: layout.row_stride * element_bytes,
            head_stride: layout.head_stride * element_bytes,
        };
        Self {
            row_reach: (heads - 1) * layout.head_stride + dim * element_bytes,
            layout,
            batch,
            rows,
            heads,
            head_bytes: dim * element_bytes,
        }
    }

    /// A dense tensor of f32.
    pub(in crate::backend::wgpu) fn dense_f32([batch, rows, heads, dim]: [usize; 4]) -> Self {
        let layout =
            Layout { offset: 0, batch_stride: rows * heads * dim, row_stride: heads * dim, head_stride: dim };
        Self::new(layout, 4, [batch, rows, heads, dim])
    }

    /// The range from the first to the last byte of these batch entries and rows. Neither range may
    /// be empty.
    pub(in crate::backend::wgpu) fn bytes(&self, batch: &Range<usize>, rows: &Range<usize>) -> Range<u64> {
        let at = |b: usize, r: usize| {
            self.layout.offset + b * self.layout.batch_stride + r * self.layout.row_stride
        };
        wide(at(batch.start, rows.start))..wide(at(batch.end - 1, rows.end - 1) + self.row_reach)
    }

    /// Whether one window of `limit` bytes holds all of it.
    pub(in crate::backend::wgpu) fn fits(&self, limit: u64) -> bool {
        let all = self.bytes(&(0..self.batch), &(0..self.rows));
        all.end - all.start <= limit
    }

    /// The tensor, which lies in `buffer`, as the source of a texture.
    pub(in crate::backend::wgpu) fn source<'a>(&self, buffer: &'a WgpuBuffer) -> Source<'a> {
        Source { buffer, layout: self.layout, heads: self.heads, head_bytes: self.head_bytes }
    }

    /// How many rows of one batch entry a window of `limit` bytes holds, at least one.
    pub(in crate::backend::wgpu) fn rows_within(&self, limit: u64) -> usize {
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        match self.layout.row_stride {
            0 => self.rows,
            stride => limit.saturating_sub(self.row_reach) / stride + 1,
        }
    }
}

/// `range` cut into pieces of `step`.
pub(in crate::backend::wgpu) fn cut(range: Range<usize>, step: usize) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range.step_by(step).map(move |start| start..end.min(start.saturating_add(step)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_fit_a_window_fit_it_exactly() {
        let strided = Strided::dense_f32([2, 100, 4, 8]);
        assert_eq!(strided.bytes(&(0..2), &(0..100)), 0..25600);
        assert_eq!(strided.bytes(&(1..2), &(3..5)), 13184..13440);
        assert!(strided.fits(25600) && !strided.fits(25599));
        let rows = strided.rows_within(1000);
        assert_eq!(rows, 7);
        let bytes = strided.bytes(&(0..1), &(0..rows));
        assert!(bytes.end - bytes.start <= 1000);
        assert_eq!(cut(3..10, 4).collect::<Vec<_>>(), [3..7, 7..10]);
    }
}
