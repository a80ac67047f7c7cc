//! What the mask and the statistics say of the query rows of a panel, in lanes.

use pulp::Simd;

use crate::backend::EMPTY_M;
use kyklos_plan::RowSpan;

/// The statistics of a row: its log-sum-exp, the factor on its weights, and δ.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stats(pub(super) [f32; 3]);

impl Stats {
    /// Of a row that sees nothing: with any finite score its weights are 0.
    pub(super) const EMPTY: Self = Self([-EMPTY_M, 1.0, 0.0]);
}

/// What the mask and the statistics say of the rows of a panel. Lanes without a row see nothing.
pub(super) struct Lanes<S: Simd, const NV: usize> {
    /// First key of each span.
    from: [S::u32s; NV],
    /// Keys of each span.
    width: [S::u32s; NV],
    /// The numbers of [`Stats`].
    pub(super) stats: [[S::f32s; NV]; 3],
}

impl<S: Simd, const NV: usize> Lanes<S, NV> {
    #[inline(always)]
    pub(super) fn new(simd: S, spans: &[RowSpan], stats: &[Stats]) -> Self {
        let mut lanes = Self {
            from: [simd.splat_u32s(0); NV],
            width: [simd.splat_u32s(0); NV],
            stats: [[simd.splat_f32s(0.0); NV]; 3],
        };
        for (vectors, number) in lanes.stats.iter_mut().zip(Stats::EMPTY.0) {
            *vectors = [simd.splat_f32s(number); NV];
        }
        for (lane, (span, stats)) in spans.iter().zip(stats).enumerate() {
            put(&mut lanes.from, lane, span.lo);
            put(&mut lanes.width, lane, span.hi - span.lo);
            for (vectors, number) in lanes.stats.iter_mut().zip(stats.0) {
                put(vectors, lane, number);
            }
        }
        lanes
    }

    /// The lanes whose rows see a position.
    #[inline(always)]
    pub(super) fn seen(&self, simd: S, position: u32) -> [S::m32s; NV] {
        let zero = simd.splat_u32s(0);
        let mut seen = [simd.less_than_u32s(zero, zero); NV];
        let position = simd.splat_u32s(position);
        for (seen, (from, width)) in seen.iter_mut().zip(self.from.iter().zip(&self.width)) {
            *seen = simd.less_than_u32s(simd.sub_u32s(position, *from), *width);
        }
        seen
    }
}

/// Sets one lane of some vectors.
#[inline(always)]
fn put<V: bytemuck::Pod, T: bytemuck::Pod>(vectors: &mut [V], lane: usize, value: T) {
    bytemuck::cast_slice_mut::<V, T>(vectors)[lane] = value;
}
