//! The result as a safetensors file, which gets its name when it is complete.

mod gradients;

use std::path::{Path, PathBuf};

use bytes::Bytes;
use kyklos::collect::Piece;
use kyklos::plan::PlanSet;
use kyklos::{AttentionProblem, BiasTensor, Dtype, Placement};
use kyklos_transport::Rank;
use safetensors::tensor::{Metadata, TensorInfo};

use self::gradients::{GradientPlaces, SumPlaces};
pub(crate) use self::gradients::{GradientRows, by_head};
use super::file::LENGTH_BYTES;
use crate::failure::{Failure, Result};
use crate::new_file::{NewFile, check_name, check_replaced};
use crate::options::RANK;
use crate::tensors::positioned::write_all_at;
use crate::tensors::results::{HostGradients, HostOutput};

/// Where the result goes.
#[derive(Clone, Debug)]
pub(crate) enum OutputTarget {
    /// One file, written by rank 0.
    Whole(PathBuf),
    /// One file for each rank; the name contains `{rank}`.
    Parts(String),
}

impl OutputTarget {
    /// Reads `--output`; refuses to overwrite the input, under the name of any of `ranks` ranks.
    pub(crate) fn new(path: &Path, input: Option<&Path>, ranks: u32) -> Result<Self> {
        keep_apart(("--output", path), ("the input", input), ranks)?;
        check_name("--output", path, "result.safetensors")?;
        for name in names(path, ranks) {
            check_replaced("--output", &name)?;
        }
        match path.to_str() {
            Some(text) if text.contains(RANK) => Ok(Self::Parts(text.to_owned())),
            _ => Ok(Self::Whole(path.to_owned())),
        }
    }

    /// Opens the file that `rank` writes, if any. `first` is the number of the rank in the first
    /// group, for the file name.
    pub(crate) fn open(
        &self,
        set: &PlanSet,
        (rank, first): (Rank, Rank),
        gradients: bool,
    ) -> Result<Option<OutputFile>> {
        match self {
            Self::Whole(path) if rank.0 == 0 => OutputFile::whole(path, &set.problem, gradients).map(Some),
            Self::Whole(_) => Ok(None),
            Self::Parts(name) => {
                let path = PathBuf::from(name.replace(RANK, &first.to_string()));
                OutputFile::part(&path, set, rank, gradients).map(Some)
            }
        }
    }
}

/// Refuses an output file that is also another file of the call, under the name of any rank.
pub(crate) fn keep_apart(
    (option, written): (&str, &Path),
    (what, kept): (&str, Option<&Path>),
    ranks: u32,
) -> Result<()> {
    // A file that does not exist yet has no canonical name, but two options may name it.
    let canonical = |path: &Path| -> Vec<PathBuf> {
        let one = |name: PathBuf| name.canonicalize().or_else(|_| std::path::absolute(&name)).unwrap_or(name);
        names(path, ranks).into_iter().map(one).collect()
    };
    let kept = kept.map(canonical).unwrap_or_default();
    match canonical(written).into_iter().find(|name| kept.contains(name)) {
        Some(name) => Err(Failure::request(
            format!("{option} would overwrite {what}, {}", name.display()),
            "name another file",
        )),
        None => Ok(()),
    }
}

/// The file names of all ranks, or the one common name. A name that is not UTF-8 contains no
/// `{rank}`.
fn names(path: &Path, ranks: u32) -> Vec<PathBuf> {
    match path.to_str() {
        Some(text) if text.contains(RANK) => {
            (0..ranks).map(|rank| text.replace(RANK, &rank.to_string()).into()).collect()
        }
        _ => vec![path.to_owned()],
    }
}

/// An incomplete file.
#[derive(Debug)]
pub(crate) struct OutputFile {
    file: NewFile,
    o: Place,
    /// Of `lse` `[batch, heads, seq]`.
    lse_start: u64,
    heads: u64,
    gradients: Option<GradientPlaces>,
    /// With its number of keys.
    bias: Option<(BiasTensor, u32)>,
}

/// Where a tensor `[batch, seq, heads, dim]` is in a file.
#[derive(Clone, Copy, Debug)]
struct Place {
    start: u64,
    /// Tokens of the file's sequence.
    seq: u64,
    /// Bytes of one token.
    row_bytes: u64,
}

/// The sizes of the tensors in a file.
struct Extents<'a> {
    problem: &'a AttentionProblem,
    queries: usize,
    /// Where the file has gradients.
    keys: Option<usize>,
    /// Whether the file holds a part of one rank.
    is_part: bool,
}

/// Tensors of a header that grows.
#[derive(Default)]
struct Declared {
    tensors: Vec<(String, TensorInfo)>,
    end: usize,
}

impl Declared {
    /// Appends a tensor; where it begins after the header.
    fn add(&mut self, name: &str, dtype: safetensors::Dtype, shape: Vec<usize>) -> u64 {
        let start = self.end;
        self.end += shape.iter().product::<usize>() * dtype.bitsize() / 8;
        self.tensors.push((name.to_owned(), TensorInfo { dtype, shape, data_offsets: (start, self.end) }));
        start as u64
    }
}

impl OutputFile {
    fn whole(path: &Path, problem: &AttentionProblem, gradients: bool) -> Result<Self> {
        let extents = Extents {
            problem,
            queries: problem.q_len as usize,
            keys: gradients.then_some(problem.kv_len as usize),
            is_part: false,
        };
        Self::create(path, &extents, Vec::new())
    }

    /// The part of `rank`, with the positions of its queries, and with gradients also of the keys
    /// that it holds.
    fn part(path: &Path, set: &PlanSet, rank: Rank, gradients: bool) -> Result<Self> {
        let problem = &set.problem;
        let (queries, keys) = (set.q_placement.of_rank(rank), set.kv_placement.held_by(rank));
        let positions = queries.iter().map(|token| i64::from(problem.q_position(token))).collect();
        let mut lists = vec![("positions", positions)];
        if gradients {
            lists.push(("key_positions", keys.iter().map(i64::from).collect()));
        }
        let keys = gradients.then_some(keys.len());
        Self::create(path, &Extents { problem, queries: queries.len(), keys, is_part: true }, lists)
    }

    fn create(path: &Path, extents: &Extents<'_>, lists: Vec<(&str, Vec<i64>)>) -> Result<Self> {
        let Extents { problem, queries, keys, is_part } = *extents;
        let [batch, heads, kv_heads, dim] =
            [problem.batch, problem.q_heads, problem.kv_heads, problem.head_dim].map(|n| n as usize);
        let dtype = match problem.dtype {
            Dtype::F32 => safetensors::Dtype::F32,
            Dtype::F16 => safetensors::Dtype::F16,
            Dtype::Bf16 => safetensors::Dtype::BF16,
        };
        // Widest elements first, so that everything is aligned.
        let mut declared = Declared::default();
        let lists: Vec<(u64, Vec<i64>)> = lists
            .into_iter()
            .map(|(name, list)| (declared.add(name, safetensors::Dtype::I64, vec![list.len()]), list))
            .collect();
        let lse_start = declared.add("lse", safetensors::Dtype::F32, vec![batch, heads, queries]);
        let sums = keys.map(|_| SumPlaces::declare(&mut declared, problem, queries, is_part));
        let mut place = |name: &str, seq: usize, heads: usize| Place {
            start: declared.add(name, dtype, vec![batch, seq, heads, dim]),
            seq: seq as u64,
            row_bytes: (heads * dim * problem.dtype.bytes()) as u64,
        };
        let o = place("o", queries, heads);
        let gradients = keys.zip(sums).map(|(keys, sums)| GradientPlaces {
            dq: place("dq", queries, heads),
            dk: place("dk", keys, kv_heads),
            dv: place("dv", keys, kv_heads),
            sums,
        });
        let Declared { tensors, end } = declared;
        let header = header(tensors)?;
        let data = LENGTH_BYTES + header.len() as u64;
        let at = |place: Place| Place { start: data + place.start, ..place };

        let file = NewFile::create(path)?;
        file.as_file().set_len(data + end as u64).map_err(|error| file.cannot_write(&error))?;
        let this = Self {
            file,
            o: at(o),
            lse_start: data + lse_start,
            heads: heads as u64,
            bias: problem.bias.map(|bias| (bias, problem.kv_len)),
            gradients: gradients.map(|places| places.map(at, |start| data + start)),
        };
        this.put(&(header.len() as u64).to_le_bytes(), 0)?;
        this.put(&header, LENGTH_BYTES)?;
        for (start, list) in lists {
            this.put(bytemuck::cast_slice(&list), data + start)?;
        }
        Ok(this)
    }

    /// Writes a piece of o and lse to the positions of its tokens in the whole sequence.
    pub(crate) fn write_piece(&self, placement: &Placement, piece: &Piece) -> Result<()> {
        let [o, lse] = &piece.rows[..] else {
            return Err(Failure::run("a piece of o and lse has two tensors"));
        };
        self.write_rows(placement, piece, &[(self.o, o)])?;
        let (batch, row) = (u64::from(piece.batch), self.heads as usize * 4);
        for_each_run(placement, piece, |first, token, count| {
            self.write_lse(&lse[first * row..(first + count) * row], batch, u64::from(token), count)
        })
    }

    /// Writes a rank's whole result to its part: `o` `[batch, tokens, heads, dim]`, `lse` `[batch,
    /// tokens, heads]`, and the gradients.
    pub(crate) fn write_part(&self, output: &HostOutput, gradients: Option<&HostGradients>) -> Result<()> {
        let HostOutput { o, lse, .. } = output;
        self.put(o, self.o.start)?;
        let (seq, heads) = (self.o.seq as usize, self.heads as usize);
        let rows = seq * heads * 4;
        for batch in 0..lse.len().checked_div(rows).unwrap_or(0) {
            self.write_lse(&lse[batch * rows..(batch + 1) * rows], batch as u64, 0, seq)?;
        }
        gradients.map_or(Ok(()), |gradients| self.write_part_of_gradients(gradients))
    }

    /// The rows of a piece, to the positions of its tokens.
    fn write_rows(&self, placement: &Placement, piece: &Piece, tensors: &[(Place, &Bytes)]) -> Result<()> {
        for_each_run(placement, piece, |first, token, count| {
            for (place, rows) in tensors {
                let row = place.row_bytes as usize;
                let rows = &rows[first * row..(first + count) * row];
                self.put_rows(*place, u64::from(piece.batch), u64::from(token), rows)?;
            }
            Ok(())
        })
    }

    /// Adjacent rows, to the tokens from `token` on.
    fn put_rows(&self, place: Place, batch: u64, token: u64, rows: &[u8]) -> Result<()> {
        self.put(rows, place.start + (batch * place.seq + token) * place.row_bytes)
    }

    /// From `[tokens, heads]` to `[batch, heads, seq]`.
    fn write_lse(&self, rows: &[u8], batch: u64, token: u64, count: usize) -> Result<()> {
        let heads = self.heads as usize;
        let mut line = Vec::with_capacity(count * 4);
        for head in 0..heads {
            line.clear();
            for row in 0..count {
                let at = (row * heads + head) * 4;
                line.extend_from_slice(&rows[at..at + 4]);
            }
            let place = (batch * self.heads + head as u64) * self.o.seq + token;
            self.put(&line, self.lse_start + place * 4)?;
        }
        Ok(())
    }

    fn put(&self, bytes: &[u8], offset: u64) -> Result<()> {
        write_all_at(self.file.as_file(), bytes, offset).map_err(|error| self.file.cannot_write(&error))
    }

    /// Waits until the bytes are on the disk.
    pub(crate) fn sync(&self) -> Result<()> {
        self.file.sync()
    }

    /// Gives the complete file its final name, which then also survives a loss of power.
    pub(crate) fn commit(self) -> Result<()> {
        self.file.commit()
    }
}

/// Calls `each` with every run of adjacent tokens of a piece: its first row in the piece, its first
/// token, its length.
fn for_each_run(
    placement: &Placement,
    piece: &Piece,
    mut each: impl FnMut(usize, u32, usize) -> Result<()>,
) -> Result<()> {
    let tokens = placement.of_rank(piece.rank).slice(piece.tokens.clone());
    let mut row = 0;
    for run in tokens.runs() {
        if run.stride == 1 {
            each(row, run.start, run.count as usize)?;
        } else {
            for i in 0..run.count {
                each(row + i as usize, run.start + i * run.stride, 1)?;
            }
        }
        row += run.count as usize;
    }
    Ok(())
}

/// The header's JSON, padded so that the data is aligned.
fn header(tensors: Vec<(String, TensorInfo)>) -> Result<Vec<u8>> {
    let failed = |error: &dyn std::fmt::Display| Failure::run(format!("cannot describe the output: {error}"));
    let metadata = Metadata::new(None, tensors).map_err(|error| failed(&error))?;
    let mut header = serde_json::to_vec(&metadata).map_err(|error| failed(&error))?;
    header.resize(header.len().next_multiple_of(ALIGNMENT), b' ');
    Ok(header)
}

const ALIGNMENT: usize = 8;
