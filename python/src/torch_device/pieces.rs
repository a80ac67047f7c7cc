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

/// Part of a block.
#[derive(Debug)]
pub(super) struct Costed {
    pub(super) part: Part,
    /// Whether its rows are in no other part.
    pub(super) is_alone: bool,
    /// In multiply-adds.
    pub(super) cost: u64,
}

/// What is to be computed of a block, piece by piece: a piece is cut when it is taken, by the rate
/// that is known by then.
#[derive(Debug)]
pub(super) struct Pieces {
    /// In reverse order.
    left: Vec<Left>,
    /// Multiply-adds of a pair of one batch entry.
    of_pair: u64,
}

#[derive(Clone, Debug)]
struct Left {
    /// Index of the mask's class.
    mask: usize,
    entries: Range<usize>,
    piece: Piece,
    is_alone: bool,
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
                let pieces = work.pieces(class);
                let alone = alone(&pieces, class.rows.len());
                let both = pieces.into_iter().zip(alone);
                both.map(move |(piece, is_alone)| Left { mask, entries: entries.clone(), piece, is_alone })
            })
            .collect();
        left.reverse();
        Self { left, of_pair }
    }

    /// The next piece, of at most about `budget` multiply-adds.
    pub(super) fn take(&mut self, budget: u64) -> Option<Costed> {
        let taken = self.left.pop()?;
        let Left { mask, entries, piece: Piece { kind, rows, keys }, is_alone } = taken.clone();
        let of_entries = self.of_pair * entries.len() as u64;
        let pairs = |rows: usize| match kind {
            PieceKind::Causal => (rows as u64).pow(2) / 2,
            PieceKind::Full | PieceKind::Masked => rows as u64 * keys.len() as u64,
        };
        // Two halves cost more than a piece that is a little too long.
        let cut = if pairs(rows.len()) * of_entries <= budget + budget / 2 {
            rows.len()
        } else {
            let affordable = budget / of_entries.max(1);
            let most = match kind {
                PieceKind::Causal => (affordable * 2).isqrt(),
                PieceKind::Full | PieceKind::Masked => affordable / keys.len().max(1) as u64,
            };
            usize::try_from(most).unwrap_or(usize::MAX).max(LEAST_ROWS).min(rows.len())
        };
        let cost = pairs(cut) * of_entries;
        let (now, later) = (rows.start..rows.start + cut, rows.start + cut..rows.end);
        let mut seen = keys.clone();
        if !later.is_empty() {
            if kind == PieceKind::Causal {
                // The rows after the cut see all keys before it.
                seen = keys.start..keys.start + cut;
                let rest = Piece { kind, rows: later.clone(), keys: keys.start + cut..keys.end };
                self.left.push(Left { piece: rest, is_alone: false, ..taken.clone() });
                let full = Piece { kind: PieceKind::Full, rows: later, keys: seen.clone() };
                self.left.push(Left { piece: full, is_alone: false, ..taken });
            } else {
                self.left.push(Left { piece: Piece { kind, rows: later, keys }, ..taken });
            }
        }
        let name = match kind {
            PieceKind::Full => "full",
            PieceKind::Causal => "causal",
            PieceKind::Masked => "masked",
        };
        let ends = |range: &Range<usize>| (range.start, range.end);
        let part = (name, mask, ends(&entries), ends(&now), ends(&seen));
        Some(Costed { part, is_alone, cost })
    }
}

/// For each piece whether its rows are in no other one.
fn alone(pieces: &[Piece], rows: usize) -> Vec<bool> {
    // How many pieces begin at each row less those that end there.
    let mut steps = vec![0_i32; rows + 1];
    for piece in pieces {
        steps[piece.rows.start] += 1;
        steps[piece.rows.end] -= 1;
    }
    // Rows before each row that are in several pieces.
    let mut several = vec![0_usize; rows + 1];
    let mut depth = 0;
    for row in 0..rows {
        depth += steps[row];
        several[row + 1] = several[row] + usize::from(depth > 1);
    }
    pieces.iter().map(|piece| several[piece.rows.start] == several[piece.rows.end]).collect()
}
