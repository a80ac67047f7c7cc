//! The result as a safetensors file: written under a temporary name, renamed when complete.

use std::path::{Path, PathBuf};

use bytes::Bytes;
use kyklos::collect::OutputPiece;
use kyklos::plan::World;
use kyklos::{AttentionProblem, Dtype, Run, TokenRuns};
use kyklos_transport::Rank;
use safetensors::tensor::{Metadata, TensorInfo};

use super::file::LENGTH_BYTES;
use crate::failure::{Failure, Result};
use crate::new_file::{NewFile, check_name, check_replaced};
use crate::options::RANK;
use crate::tensors::positioned::write_all_at;

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

    /// Opens the file that `rank` writes, if any. `first` is the number of the rank in the first group, for the file name.
    pub(crate) fn open(&self, world: &World, rank: Rank, first: Rank) -> Result<Option<OutputFile>> {
        match self {
            Self::Whole(path) if rank.0 == 0 => OutputFile::whole(path, world).map(Some),
            Self::Whole(_) => Ok(None),
            Self::Parts(name) => {
                let path = PathBuf::from(name.replace(RANK, &first.to_string()));
                OutputFile::part(&path, &world.problem, world.q_placement.of_rank(rank)).map(Some)
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

/// The file names of all ranks, or the one common name. A name that is not UTF-8 contains no `{rank}`.
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
    o_start: u64,
    lse_start: u64,
    /// Tokens of the file's sequence.
    seq: u64,
    heads: u64,
    o_row_bytes: u64,
}

impl OutputFile {
    /// Rows of lost queries hold NaN, and the tensor `lost` lists the queries.
    fn whole(path: &Path, world: &World) -> Result<Self> {
        let (problem, lost) = (&world.problem, &world.lost.queries);
        let list = (!lost.is_empty()).then(|| ("lost", lost.iter().map(i64::from).collect()));
        let file = Self::create(path, problem, problem.q_len as usize, list)?;
        let (o_row, lse_row) = (file.o_row_bytes as usize, file.heads as usize * 4);
        for run in lost.runs().iter().flat_map(pieces) {
            for batch in 0..u64::from(problem.batch) {
                let at = batch * file.seq + u64::from(run.start);
                let nans = vec![NAN_BYTE; run.len() * o_row.max(lse_row)];
                file.put(&nans[..run.len() * o_row], file.o_start + at * file.o_row_bytes)?;
                file.write_lse(&nans[..run.len() * lse_row], batch, u64::from(run.start), run.len())?;
            }
        }
        Ok(file)
    }

    fn part(path: &Path, problem: &AttentionProblem, tokens: &TokenRuns) -> Result<Self> {
        let positions = tokens.iter().map(|token| i64::from(problem.q_position(token))).collect();
        Self::create(path, problem, tokens.len(), Some(("positions", positions)))
    }

    fn create(
        path: &Path,
        problem: &AttentionProblem,
        seq: usize,
        list: Option<(&str, Vec<i64>)>,
    ) -> Result<Self> {
        let (batch, heads, dim) =
            (problem.batch as usize, problem.q_heads as usize, problem.head_dim as usize);
        let dtype = match problem.dtype {
            Dtype::F32 => safetensors::Dtype::F32,
            Dtype::F16 => safetensors::Dtype::F16,
            Dtype::Bf16 => safetensors::Dtype::BF16,
        };
        let o_row_bytes = heads * dim * problem.dtype.bytes();
        // Widest elements first, so that everything is aligned.
        let mut tensors = Vec::new();
        let mut end = 0;
        let mut declare = |name: &str, dtype, shape: Vec<usize>, bytes: usize| {
            let start = end;
            end += bytes;
            let data_offsets = (start, end);
            tensors.push((name.to_owned(), TensorInfo { dtype, shape, data_offsets }));
            start as u64
        };
        let list_start = list
            .as_ref()
            .map(|(name, list)| declare(name, safetensors::Dtype::I64, vec![list.len()], list.len() * 8));
        let lse = declare("lse", safetensors::Dtype::F32, vec![batch, heads, seq], batch * heads * seq * 4);
        let o = declare("o", dtype, vec![batch, seq, heads, dim], batch * seq * o_row_bytes);
        let header = header(tensors)?;
        let data = LENGTH_BYTES + header.len() as u64;

        let file = NewFile::create(path)?;
        file.as_file().set_len(data + end as u64).map_err(|error| file.cannot_write(&error))?;
        let this = Self {
            file,
            o_start: data + o,
            lse_start: data + lse,
            seq: seq as u64,
            heads: heads as u64,
            o_row_bytes: o_row_bytes as u64,
        };
        this.put(&(header.len() as u64).to_le_bytes(), 0)?;
        this.put(&header, LENGTH_BYTES)?;
        if let (Some((_, list)), Some(start)) = (list, list_start) {
            this.put(bytemuck::cast_slice(&list), data + start)?;
        }
        Ok(this)
    }

    /// Writes a piece to the positions of its tokens in the whole sequence.
    pub(crate) fn write_piece(&self, world: &World, piece: &OutputPiece) -> Result<()> {
        let tokens = world.q_placement.of_rank(piece.rank).slice(piece.tokens.clone());
        let mut row = 0;
        for run in tokens.runs() {
            if run.stride == 1 {
                self.write_rows(piece, row, run.start, run.count as usize)?;
            } else {
                for i in 0..run.count {
                    self.write_rows(piece, row + i as usize, run.start + i * run.stride, 1)?;
                }
            }
            row += run.count as usize;
        }
        Ok(())
    }

    /// Writes a rank's whole output, `o` `[batch, tokens, heads, dim]` and `lse` `[batch, tokens, heads]`, to its part.
    pub(crate) fn write_part(&self, o: &Bytes, lse: &Bytes) -> Result<()> {
        self.put(o, self.o_start)?;
        let (seq, heads) = (self.seq as usize, self.heads as usize);
        let rows = seq * heads * 4;
        for batch in 0..o.len().checked_div(seq * self.o_row_bytes as usize).unwrap_or(0) {
            self.write_lse(&lse[batch * rows..(batch + 1) * rows], batch as u64, 0, seq)?;
        }
        Ok(())
    }

    /// `count` rows of a piece, from its row `first` on, to the tokens from `token` on.
    fn write_rows(&self, piece: &OutputPiece, first: usize, token: u32, count: usize) -> Result<()> {
        let (o_row, lse_row) = (self.o_row_bytes as usize, self.heads as usize * 4);
        let at = u64::from(piece.batch) * self.seq + u64::from(token);
        self.put(&piece.o[first * o_row..(first + count) * o_row], self.o_start + at * self.o_row_bytes)?;
        let lse = &piece.lse[first * lse_row..(first + count) * lse_row];
        self.write_lse(lse, u64::from(piece.batch), u64::from(token), count)
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
            let place = (batch * self.heads + head as u64) * self.seq + token;
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

/// A run of tokens in contiguous pieces that are small enough for one buffer.
fn pieces(run: &Run) -> Vec<std::ops::Range<u32>> {
    if run.stride > 1 {
        return (0..run.count).map(|i| run.start + i * run.stride).map(|token| token..token + 1).collect();
    }
    let end = run.start + run.count;
    (run.start..end).step_by(NAN_ROWS as usize).map(|start| start..end.min(start + NAN_ROWS)).collect()
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
/// This byte repeated is NaN in every dtype.
const NAN_BYTE: u8 = 0xFF;
const NAN_ROWS: u32 = 256;
