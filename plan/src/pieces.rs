//! Cuts the visible part of a block for kernels that take whole rectangles, triangles, or a mask of
//! elements: those of other libraries, which do not read [`RowSpan`]s.

use std::ops::Range;

use crate::lower::{BlockWork, MaskClass};
use crate::spans::RowSpan;

/// A part of a block of queries × keys. Rows and keys count from the beginning of the block.
///
/// ```
/// use kyklos_plan::{AttentionProblem, BlockWork, Dtype, Mask, Piece, PieceKind, TileShape, TokenRuns};
///
/// let problem = AttentionProblem::new([1, 512, 1, 1, 64], Dtype::F32, Mask::causal())?;
/// let (queries, keys) = (TokenRuns::contiguous(256..512), TokenRuns::contiguous(0..512));
/// let tile = TileShape { q_rows: 64, kv_cols: 64 };
/// let work = &BlockWork::layers(&problem, &queries, &keys, tile)[0];
/// assert_eq!(work.pieces(&work.classes[0]), [
///     Piece { kind: PieceKind::Full, rows: 0..256, keys: 0..256 },
///     Piece { kind: PieceKind::Causal, rows: 0..256, keys: 256..512 },
/// ]);
/// # Ok::<(), kyklos_plan::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// What is visible in it.
    pub kind: PieceKind,
    /// The query rows.
    pub rows: Range<usize>,
    /// The keys.
    pub keys: Range<usize>,
}

/// What is visible in a [`Piece`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PieceKind {
    /// Every row sees every key.
    Full,
    /// As many rows as keys; row i of the piece sees its keys 0 to i.
    Causal,
    /// A row sees the keys whose positions are in its [`RowSpan`]; a row may see none.
    Masked,
}

/// Rows that are looked at together where the mask has no larger form.
const MASKED_ROWS: usize = 256;
/// The fewest rows of a rectangle or triangle of its own, and the fewest keys of a rectangle
/// between two masked rims: below it, starting a kernel costs more than the masked elements.
const LEAST: usize = 64;
/// The most runs of ascending keys that are cut each by itself.
const MOST_RUNS: usize = 8;

impl BlockWork {
    /// The parts of the visible pairs of `class`, one of [`BlockWork::classes`]. Every visible pair
    /// is in exactly one piece, and no piece is without a visible pair.
    pub fn pieces(&self, class: &MaskClass) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let runs = ascending(&self.kv_positions);
        if runs.len() > MOST_RUNS {
            let keys = 0..self.kv_positions.len();
            for first in (0..class.rows.len()).step_by(MASKED_ROWS) {
                let rows = first..(first + MASKED_ROWS).min(class.rows.len());
                let sees = |row: &RowSpan| self.kv_positions.iter().any(|position| row.sees(*position));
                if class.rows[rows.clone()].iter().any(sees) {
                    pieces.push(Piece { kind: PieceKind::Masked, rows, keys: keys.clone() });
                }
            }
            return pieces;
        }
        for keys in runs {
            let positions = &self.kv_positions[keys.clone()];
            let seen = |row: &RowSpan| {
                let [first, end] = [row.lo, row.hi].map(|at| positions.partition_point(|p| *p < at));
                if first < end { keys.start + first..keys.start + end } else { 0..0 }
            };
            cut(&class.rows.iter().map(seen).collect::<Vec<_>>(), &mut pieces);
        }
        pieces
    }
}

/// The longest runs of ascending positions.
fn ascending(positions: &[u32]) -> Vec<Range<usize>> {
    let mut runs = Vec::new();
    let mut first = 0;
    for at in 1..=positions.len() {
        if positions.get(at).is_none_or(|next| *next <= positions[at - 1]) {
            runs.push(first..at);
            first = at;
        }
    }
    runs
}

/// Cuts what rows see of ascending keys: `seen` has a range of keys for each row.
fn cut(seen: &[Range<usize>], pieces: &mut Vec<Piece>) {
    let mut row = 0;
    while row < seen.len() {
        let Range { start: first, end } = seen[row].clone();
        if first == end {
            row += 1;
            continue;
        }
        let alike = run(seen, row, |_| first..end);
        let stairs = run(seen, row, |step| first..end + step);
        if alike >= LEAST {
            pieces.push(Piece { kind: PieceKind::Full, rows: row..row + alike, keys: first..end });
            row += alike;
        } else if stairs >= LEAST {
            let rows = row..row + stairs;
            if end - 1 > first {
                pieces.push(Piece { kind: PieceKind::Full, rows: rows.clone(), keys: first..end - 1 });
            }
            pieces.push(Piece { kind: PieceKind::Causal, rows, keys: end - 1..end - 1 + stairs });
            row += stairs;
        } else {
            row = masked(seen, row, pieces);
        }
    }
}

/// How many rows from `row` on see what `of` says for the rows after it.
fn run(seen: &[Range<usize>], row: usize, of: impl Fn(usize) -> Range<usize>) -> usize {
    seen[row..].iter().enumerate().take_while(|(step, keys)| **keys == of(*step)).count()
}

/// Cuts the next rows, which have no form of their own: what all of them see, and the rims. The row
/// after them.
fn masked(seen: &[Range<usize>], first: usize, pieces: &mut Vec<Piece>) -> usize {
    let has_form = |row: usize| {
        let keys = &seen[row];
        let last = row + LEAST - 1;
        let same_first = seen.get(last).is_some_and(|end| end.start == keys.start && !keys.is_empty());
        same_first
            && (run(&seen[..=last], row, |_| keys.clone()) == LEAST
                || run(&seen[..=last], row, |step| keys.start..keys.end + step) == LEAST)
    };
    let most = (first + MASKED_ROWS).min(seen.len());
    let end = (first + 1..most).find(|row| has_form(*row)).unwrap_or(most);
    let rows = &seen[first..end];
    let seeing = || rows.iter().filter(|keys| !keys.is_empty());
    let of_any =
        seeing().map(|keys| keys.start).min().unwrap_or(0)..seeing().map(|keys| keys.end).max().unwrap_or(0);
    let of_all = rows.iter().map(|keys| keys.start).max().unwrap_or(0)
        ..rows.iter().map(|keys| keys.end).min().unwrap_or(0);
    let mut push = |kind, keys: Range<usize>| {
        if !keys.is_empty() {
            pieces.push(Piece { kind, rows: first..end, keys });
        }
    };
    if of_all.len() >= LEAST {
        push(PieceKind::Masked, of_any.start..of_all.start);
        push(PieceKind::Full, of_all.clone());
        push(PieceKind::Masked, of_all.end..of_any.end);
    } else {
        push(PieceKind::Masked, of_any);
    }
    end
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;
    use crate::lower::TileShape;
    use crate::mask::Mask;
    use crate::problem::AttentionProblem;
    use crate::tokens::TokenRuns;

    const TOKENS: u32 = 700;
    const TILE: TileShape = TileShape { q_rows: 64, kv_cols: 64 };

    fn pieces_of(mask: &str, q: &TokenRuns, kv: &TokenRuns) -> Vec<Vec<Piece>> {
        let mask: Mask = mask.parse().unwrap();
        let batch = u32::try_from(mask.batch_classes()).unwrap();
        let problem = AttentionProblem::new([batch, TOKENS, 1, 1, 8], Dtype::F32, mask).unwrap();
        let layers = BlockWork::layers(&problem, q, kv, TILE);
        let all = layers.iter().flat_map(|work| {
            work.classes.iter().map(|class| {
                let pieces = work.pieces(class);
                check(work, class, &pieces);
                pieces
            })
        });
        all.collect()
    }

    /// Element by element: visible pairs are in one piece, hidden ones in none but masked ones.
    fn check(work: &BlockWork, class: &MaskClass, pieces: &[Piece]) {
        let mut times = vec![0_u8; class.rows.len() * work.kv_positions.len()];
        for Piece { kind, rows, keys } in pieces {
            let mut any = false;
            for (i, row) in rows.clone().enumerate() {
                for (j, key) in keys.clone().enumerate() {
                    let visible = class.rows[row].sees(work.kv_positions[key]);
                    let counts = match kind {
                        PieceKind::Full => true,
                        PieceKind::Causal => j <= i,
                        PieceKind::Masked => visible,
                    };
                    assert!(!counts || visible, "{kind:?}: row {row} does not see key {key}");
                    times[row * work.kv_positions.len() + key] += u8::from(counts);
                    any |= counts;
                }
            }
            assert!(any, "{kind:?} {rows:?} {keys:?} without a visible pair");
            assert!(*kind != PieceKind::Causal || rows.len() == keys.len());
        }
        for (index, times) in times.iter().enumerate() {
            let (row, key) = (index / work.kv_positions.len(), index % work.kv_positions.len());
            let visible = class.rows[row].sees(work.kv_positions[key]);
            assert_eq!(*times, u8::from(visible), "row {row}, key {key}");
        }
    }

    #[test]
    fn every_visible_pair_is_in_one_piece() {
        let masks = [
            "full",
            "causal",
            "window:100,0",
            "window:300,20",
            "window:5,3",
            "documents:0,9,30,200,201,700",
            "causal+documents:0,70,300,700",
            "valid:650",
            "valid:0",
            "causal//window:90,0//valid:17",
            "slices:0..400x0..100,0..400x200..300,100..700x280..500/causal,300..700x550..610",
        ];
        let halves = || (0..175).chain(525..TOKENS);
        let lists = [
            TokenRuns::contiguous(0..TOKENS),
            TokenRuns::contiguous(300..301),
            TokenRuns::contiguous(200..520),
            TokenRuns::from_positions(halves()),
            TokenRuns::from_positions((1..TOKENS).step_by(3)),
            TokenRuns::from_positions((0..TOKENS).map(|token| token * 311 % TOKENS)),
            TokenRuns::from_positions((0..TOKENS).rev()),
            TokenRuns::contiguous(0..0),
        ];
        let mut count = 0;
        for mask in masks {
            for q in &lists {
                for kv in &lists {
                    count += pieces_of(mask, q, kv).iter().map(Vec::len).sum::<usize>();
                }
            }
        }
        assert!(count > 1000, "{count} pieces");
    }

    #[test]
    fn usual_masks_have_few_pieces() {
        let all = TokenRuns::contiguous(0..TOKENS);
        let whole = Piece { kind: PieceKind::Full, rows: 0..700, keys: 0..700 };
        assert_eq!(pieces_of("full", &all, &all), [vec![whole.clone()]]);
        assert_eq!(pieces_of("causal", &all, &all), [vec![Piece { kind: PieceKind::Causal, ..whole }]]);
        // Striped over three ranks: every third query against every third key.
        let [own, other] = [0, 1].map(|first| TokenRuns::from_positions((first..TOKENS).step_by(3)));
        let kinds = |pieces: Vec<Vec<Piece>>| pieces[0].iter().map(|piece| piece.kind).collect::<Vec<_>>();
        assert_eq!(kinds(pieces_of("causal", &own, &own)), [PieceKind::Causal]);
        assert_eq!(kinds(pieces_of("causal", &own, &other)), [PieceKind::Causal]);
        // Zigzag: an early and a late quarter, against these and against the middle.
        let halves = TokenRuns::from_positions((0..175).chain(525..TOKENS));
        assert_eq!(kinds(pieces_of("causal", &halves, &halves)), [PieceKind::Causal]);
        let middle = TokenRuns::contiguous(175..525);
        assert_eq!(kinds(pieces_of("causal", &halves, &middle)), [PieceKind::Full]);
        // A window: what all of 256 rows see, and two rims.
        let pieces = &pieces_of("window:600,0", &TokenRuns::contiguous(600..700), &all)[0];
        assert_eq!(
            pieces.iter().map(|piece| piece.kind).collect::<Vec<_>>(),
            [PieceKind::Masked, PieceKind::Full, PieceKind::Masked]
        );
    }

    #[test]
    #[should_panic(expected = "does not see")]
    fn the_check_finds_a_hidden_pair() {
        let problem = AttentionProblem::new([1, TOKENS, 1, 1, 8], Dtype::F32, Mask::causal()).unwrap();
        let all = TokenRuns::contiguous(0..TOKENS);
        let work = &BlockWork::layers(&problem, &all, &all, TILE)[0];
        let mut pieces = work.pieces(&work.classes[0]);
        pieces[0].kind = PieceKind::Full;
        check(work, &work.classes[0], &pieces);
    }
}
