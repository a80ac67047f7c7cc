//! The pieces of a block, of some 100 ms each.

use std::ops::Range;

use kyklos::{BlockWork, Piece, PieceKind};

/// A piece for the Python code: its kind, the index of its mask, batch entries, rows, keys.
pub(super) type Part = (&'static str, usize, (usize, usize), (usize, usize), (usize, usize));

/// How large pieces are. By the kind of the device and not by measured times: the order of sums
/// depends on the pieces, and the same call has the same sums.
#[derive(Clone, Copy, Debug)]
pub(super) struct Size {
    /// Multiply-adds of a piece: some 100 ms of four processor cores, some 10 ms of a GPU.
    budget: u64,
    /// The most terms of logits that are in memory for a piece.
    terms: u64,
}

impl Size {
    pub(super) const OF_CPU: Self = Self { budget: 1 << 34, terms: 1 << 24 };
    pub(super) const OF_GPU: Self = Self { budget: 1 << 40, terms: 1 << 27 };
}

/// Rows of the smallest piece: fewer do not fill the kernels of a library.
const LEAST_ROWS: u64 = 64;

/// Part of a block.
#[derive(Debug)]
pub(super) struct Taken {
    pub(super) part: Part,
    /// Whether its rows are in no other part.
    pub(super) is_alone: bool,
}

/// What is to be computed of a block, piece by piece.
#[derive(Debug)]
pub(super) struct Pieces {
    /// In reverse order.
    left: Vec<Left>,
    /// Multiply-adds of a pair of one batch entry.
    of_pair: u64,
    /// Terms that a bias has for such a pair.
    terms_of_pair: u64,
    size: Size,
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
    /// Those of `work` for `batch` entries; a pair of one entry costs `of_pair` multiply-adds, and
    /// a bias has `terms_of_pair` terms for it.
    pub(super) fn new(work: &BlockWork, batch: usize, of_pair: u64, terms_of_pair: u64, size: Size) -> Self {
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
        Self { left, of_pair, terms_of_pair, size }
    }

    /// The next piece.
    pub(super) fn take(&mut self) -> Option<Taken> {
        let taken = self.left.pop()?;
        let Left { mask, entries, piece: Piece { kind, rows, keys }, is_alone } = taken.clone();
        let of_entries = (self.of_pair * entries.len() as u64).max(1);
        let pairs = |rows: usize| match kind {
            PieceKind::Causal => (rows as u64).pow(2) / 2,
            PieceKind::Full | PieceKind::Masked => rows as u64 * keys.len() as u64,
        };
        // Two halves cost more than a piece that is a little too long.
        let budget = self.size.budget / of_entries;
        let mut most = rows.len() as u64;
        if pairs(rows.len()) > budget + budget / 2 {
            most = match kind {
                PieceKind::Causal => (budget * 2).isqrt(),
                PieceKind::Full | PieceKind::Masked => budget / keys.len().max(1) as u64,
            };
        }
        let terms_of_row = self.terms_of_pair * entries.len() as u64 * keys.len() as u64;
        most = most.max(LEAST_ROWS).min(self.size.terms / terms_of_row.max(1));
        let cut = usize::try_from(most).unwrap_or(usize::MAX).max(1).min(rows.len());
        let (now, later) = (rows.start..rows.start + cut, rows.start + cut..rows.end);
        let mut seen = keys.clone();
        if !later.is_empty() {
            if kind == PieceKind::Causal && self.terms_of_pair > 0 {
                // A triangle of terms costs as much as a rectangle.
                let rest = Piece { kind: PieceKind::Masked, rows: later, keys };
                self.left.push(Left { piece: rest, ..taken });
                seen = seen.start..seen.start + cut;
            } else if kind == PieceKind::Causal {
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
        Some(Taken { part, is_alone })
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
