//! The pieces of a block, of about 100 ms each.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use kyklos::{BlockWork, Piece, PieceKind};

/// A piece for the Python code: its kind, the index of its mask, batch entries, rows, keys.
pub(super) type Part = (&'static str, usize, (usize, usize), (usize, usize), (usize, usize));

/// Multiply-adds per second of a device, as last measured. Decides the size of a piece, never a
/// result.
#[derive(Debug)]
pub(super) struct Rate(AtomicU64);

/// Of one processor core, about.
const FIRST_RATE: u64 = 20_000_000_000;
const PIECE_MS: u64 = 100;
/// Rows of the smallest piece: fewer do not fill the kernels of a library.
const LEAST_ROWS: usize = 64;

impl Default for Rate {
    fn default() -> Self {
        Self(AtomicU64::new(FIRST_RATE))
    }
}

impl Rate {
    /// Multiply-adds of a piece.
    pub(super) fn budget(&self) -> u64 {
        self.0.load(Ordering::Relaxed) / 1000 * PIECE_MS
    }

    pub(super) fn measured(&self, cost: u64, start: Instant) {
        let us = u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX);
        // A shorter time says more about starting kernels than about their speed.
        if us > 2000 {
            self.0.store((cost / us).max(1) * 1_000_000, Ordering::Relaxed);
        }
    }
}

/// Part of a block with its cost in multiply-adds.
#[derive(Debug)]
pub(super) struct Costed {
    pub(super) part: Part,
    pub(super) cost: u64,
}

/// What is to be computed of a block, piece by piece: a piece is cut when it is taken, by the rate
/// that is known by then.
#[derive(Debug)]
pub(super) struct Pieces {
    /// In reverse order, with the index of the mask and the batch entries.
    left: Vec<(usize, Range<usize>, Piece)>,
    /// Multiply-adds of a pair of one batch entry.
    of_pair: u64,
}

impl Pieces {
    /// Those of `work` for `batch` entries; a pair of one entry costs `of_pair` multiply-adds.
    pub(super) fn new(work: &BlockWork, batch: usize, of_pair: u64) -> Self {
        let several = work.classes.len() > 1;
        let mut left: Vec<_> = work
            .classes
            .iter()
            .enumerate()
            .flat_map(|(mask, class)| {
                let entries = if several { mask..mask + 1 } else { 0..batch };
                work.pieces(class).into_iter().map(move |piece| (mask, entries.clone(), piece))
            })
            .collect();
        left.reverse();
        Self { left, of_pair }
    }

    /// The next piece, of at most about `budget` multiply-adds.
    pub(super) fn take(&mut self, budget: u64) -> Option<Costed> {
        let (mask, entries, Piece { kind, rows, keys }) = self.left.pop()?;
        let of_row = self.of_pair * entries.len() as u64 * keys.len() as u64;
        let most = usize::try_from(budget / of_row.max(1)).unwrap_or(usize::MAX).max(LEAST_ROWS);
        let cut = rows.len().min(most);
        let (now, later) = (rows.start..rows.start + cut, rows.start + cut..rows.end);
        let mut seen = keys.clone();
        if !later.is_empty() {
            if kind == PieceKind::Causal {
                // The rows after the cut see all keys before it.
                seen = keys.start..keys.start + cut;
                let rest = Piece { kind, rows: later.clone(), keys: keys.start + cut..keys.end };
                self.left.push((mask, entries.clone(), rest));
                let full = Piece { kind: PieceKind::Full, rows: later, keys: seen.clone() };
                self.left.push((mask, entries.clone(), full));
            } else {
                self.left.push((mask, entries.clone(), Piece { kind, rows: later, keys }));
            }
        }
        let name = match kind {
            PieceKind::Full => "full",
            PieceKind::Causal => "causal",
            PieceKind::Masked => "masked",
        };
        let pairs = now.len() as u64 * seen.len() as u64 * entries.len() as u64;
        let pairs = if kind == PieceKind::Causal { pairs / 2 } else { pairs };
        let ends = |range: &Range<usize>| (range.start, range.end);
        Some(Costed {
            part: (name, mask, ends(&entries), ends(&now), ends(&seen)),
            cost: pairs * self.of_pair,
        })
    }
}
