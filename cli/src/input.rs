//! Where q, k and v come from: a safetensors file, or a seed. Either way a rank gets its own tokens and no others.
//!
//! A file is checked by its header alone: sizes are bounded, and every dtype, shape and offset fits the others and
//! the length of the file, before anything is allocated for tensors.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use half::{bf16, f16};
use kyklos::local::Tensors;
use kyklos::{AttentionProblem, Dtype, TokenRuns};
use kyklos_oracle::inputs::{TensorId, fill, normal};
use kyklos_oracle::oracle::Element;
use safetensors::tensor::{Metadata, TensorInfo};

use crate::failure::{Failure, Result};
use crate::pairs::FilePairs;
use crate::positioned::read_exact_at;

/// Where tensors come from.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    MadeUp { seed: u64 },
    File(Arc<InputFile>),
}

/// One of the three.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Which {
    Q,
    K,
    V,
}

/// A safetensors file whose header has been checked.
#[derive(Debug)]
pub(crate) struct InputFile {
    path: PathBuf,
    file: File,
    /// Byte of the file at which q, k and v begin.
    starts: [u64; 3],
    pub(crate) dtype: Dtype,
    pub(crate) batch: u32,
    pub(crate) q_len: u32,
    pub(crate) kv_len: u32,
    pub(crate) q_heads: u32,
    pub(crate) kv_heads: u32,
    pub(crate) head_dim: u32,
    /// One for each query head, or none.
    pub(crate) sinks: Vec<f32>,
    pub(crate) pairs: Option<FilePairs>,
    /// Names of tensors that are not looked at.
    ignored: Vec<String>,
}

impl Source {
    /// The queries `q_tokens` and the keys `kv_tokens` of all tensors.
    pub(crate) fn all(
        &self,
        problem: &AttentionProblem,
        q_tokens: &TokenRuns,
        kv_tokens: &TokenRuns,
    ) -> Result<Tensors> {
        Ok(Tensors {
            q: self.read(problem, Which::Q, q_tokens)?,
            k: self.read(problem, Which::K, kv_tokens)?,
            v: self.read(problem, Which::V, kv_tokens)?,
            bias: self.read_pairs(problem, q_tokens)?,
        })
    }

    /// The tokens `tokens` of a tensor, `[batch, tokens, heads, dim]`, in their order.
    pub(crate) fn read(&self, problem: &AttentionProblem, which: Which, tokens: &TokenRuns) -> Result<Bytes> {
        let (seq, heads) = match which {
            Which::Q => (problem.q_len, problem.q_heads),
            Which::K | Which::V => (problem.kv_len, problem.kv_heads),
        };
        let token_elements = u64::from(heads) * u64::from(problem.head_dim);
        let elements = u64::from(problem.batch) * tokens.len() as u64 * token_elements;
        let shard = Shard {
            batch: problem.batch,
            seq,
            token_elements,
            elements: usize::try_from(elements).map_err(|_| too_large(elements))?,
            tokens,
        };
        match self {
            Self::File(file) => file.read(which, &shard),
            Self::MadeUp { seed } => {
                let id = match which {
                    Which::Q => TensorId::Q,
                    Which::K => TensorId::K,
                    Which::V => TensorId::V,
                };
                match problem.dtype {
                    Dtype::F32 => shard.make_up::<f32>(*seed, id, 0.0),
                    Dtype::F16 => shard.make_up::<f16>(*seed, id, f16::ZERO),
                    Dtype::Bf16 => shard.make_up::<bf16>(*seed, id, bf16::ZERO),
                }
            }
        }
    }

    /// The rows of the queries `tokens` in the problem's pair tensor, if it has one.
    pub(crate) fn read_pairs(&self, problem: &AttentionProblem, tokens: &TokenRuns) -> Result<Option<Bytes>> {
        match self {
            Self::MadeUp { .. } => Ok(None),
            Self::File(file) => {
                file.pairs.map(|pairs| pairs.read(&file.file, &file.path, problem, tokens)).transpose()
            }
        }
    }

    /// Made-up sinks: one for each query head, about as large as a row's largest logit.
    pub(crate) fn made_up_sinks(seed: u64, q_heads: u32) -> Vec<f32> {
        (0..q_heads).map(|head| normal(seed, TensorId::Sinks, u64::from(head)) + 2.0).collect()
    }

    /// What a user should know about the file, if anything.
    pub(crate) fn warning(&self) -> Option<String> {
        match self {
            Self::File(file) if !file.ignored.is_empty() => {
                let (path, count) = (file.path.display(), file.ignored.len());
                let names = file.ignored.iter().take(4).cloned().collect::<Vec<_>>().join(", ");
                let more = if count > 4 { ", …" } else { "" };
                Some(format!("warning: {path}: {count} more tensors are ignored: {names}{more}"))
            }
            _ => None,
        }
    }

    /// The file, if it is one.
    pub(crate) fn path(&self) -> Option<&Path> {
        match self {
            Self::MadeUp { .. } => None,
            Self::File(file) => Some(&file.path),
        }
    }
}

/// Some tokens of a tensor `[batch, seq, …]`.
struct Shard<'a> {
    batch: u32,
    seq: u32,
    token_elements: u64,
    elements: usize,
    tokens: &'a TokenRuns,
}

impl Shard<'_> {
    /// Calls `each` with every range of adjacent elements of the whole tensor, in order.
    fn for_each_range<E>(
        &self,
        mut each: impl FnMut(std::ops::Range<u64>) -> Result<(), E>,
    ) -> Result<(), E> {
        for batch in 0..u64::from(self.batch) {
            let first = batch * u64::from(self.seq);
            for run in self.tokens.runs() {
                let at = |token: u32| (first + u64::from(token)) * self.token_elements;
                if run.stride == 1 {
                    each(at(run.start)..at(run.start) + u64::from(run.count) * self.token_elements)?;
                } else {
                    for i in 0..run.count {
                        let start = at(run.start + i * run.stride);
                        each(start..start + self.token_elements)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn make_up<E: Element + bytemuck::Pod + Send>(&self, seed: u64, id: TensorId, zero: E) -> Result<Bytes> {
        let mut values = zeroed(self.elements, zero)?;
        let mut rest = values.as_mut_slice();
        self.for_each_range::<Failure>(|range| {
            let (now, later) = std::mem::take(&mut rest).split_at_mut((range.end - range.start) as usize);
            fill(seed, id, range, now);
            rest = later;
            Ok(())
        })?;
        Ok(Bytes::from_owner(Elements(values)))
    }
}

/// Keeps the alignment of what it holds.
struct Elements<E>(Vec<E>);

impl<E: bytemuck::Pod> AsRef<[u8]> for Elements<E> {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}

fn zeroed<E: Clone>(elements: usize, zero: E) -> Result<Vec<E>> {
    let mut values = Vec::new();
    values.try_reserve_exact(elements).map_err(|_| too_large(elements as u64))?;
    values.resize(elements, zero);
    Ok(values)
}

fn too_large(elements: u64) -> Failure {
    Failure::run(format!(
        "a tensor part of {elements} elements does not fit the memory: use fewer tokens, or more hosts"
    ))
}

impl InputFile {
    /// Opens a file and checks its header.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let wrong = |mismatch: String, remedy: &str| {
            Failure::request(format!("{} {mismatch}", path.display()), remedy)
        };
        let cannot_open = |error| Failure { exit: 2, ..Failure::file("open", path, &error) };
        let regular = |metadata: &fs::Metadata| match metadata.is_file() {
            true => Ok(()),
            false => Err(wrong("is not a regular file".to_owned(), "name a safetensors file")),
        };
        // Before it is opened: opening a pipe waits for somebody to write to it.
        regular(&fs::metadata(path).map_err(cannot_open)?)?;
        let file = File::open(path).map_err(cannot_open)?;
        let metadata = file.metadata().map_err(|error| Failure::file("read", path, &error))?;
        regular(&metadata)?;
        let file_bytes = metadata.len();
        let not_safetensors = |why: String| {
            wrong(
                format!("is not a safetensors file: {why}"),
                "write q, k, v with safetensors.numpy.save_file or safetensors.torch.save_file",
            )
        };
        let mut length = [0; LENGTH_BYTES as usize];
        if file_bytes < LENGTH_BYTES {
            return Err(not_safetensors(format!("it has {file_bytes} bytes")));
        }
        read_exact_at(&file, &mut length, 0).map_err(|error| Failure::file("read", path, &error))?;
        let header_bytes = u64::from_le_bytes(length);
        if header_bytes > MAX_HEADER_BYTES {
            return Err(not_safetensors(format!(
                "its header would have {header_bytes} bytes, at most {MAX_HEADER_BYTES} are read"
            )));
        }
        if header_bytes > file_bytes - LENGTH_BYTES {
            return Err(wrong(
                format!("ends inside its header of {header_bytes} bytes"),
                "copy the whole file",
            ));
        }
        // Bounded by MAX_HEADER_BYTES above.
        let mut header = vec![0; header_bytes as usize];
        read_exact_at(&file, &mut header, LENGTH_BYTES)
            .map_err(|error| Failure::file("read", path, &error))?;
        let tensors: Metadata =
            serde_json::from_slice(&header).map_err(|error| not_safetensors(error.to_string()))?;
        let data_start = LENGTH_BYTES + header_bytes;
        let needed = data_start.saturating_add(tensors.data_len() as u64);
        if needed > file_bytes {
            return Err(wrong(
                format!("is truncated: it has {file_bytes} bytes, its header promises {needed}"),
                "copy the whole file",
            ));
        }
        if needed < file_bytes {
            return Err(not_safetensors(format!("{} bytes follow the last tensor", file_bytes - needed)));
        }
        Self::from_header(path, file, &tensors, data_start)
            .map_err(|(mismatch, remedy)| wrong(mismatch, &remedy))
    }

    fn from_header(
        path: &Path,
        file: File,
        tensors: &Metadata,
        data_start: u64,
    ) -> Result<Self, (String, String)> {
        let names = tensors.offset_keys();
        let mut ignored = Vec::new();
        for name in &names {
            match name.as_str() {
                "q" | "k" | "v" | "sinks" | "mask" | "bias" => {}
                _ => ignored.push(shown(name)),
            }
        }
        let tensor = |name: &str| -> Result<(&TensorInfo, [u32; 4], Dtype), (String, String)> {
            let info = tensors.info(name).ok_or_else(|| {
                let there: Vec<String> = names.iter().take(8).map(|name| shown(name)).collect();
                (
                    format!("has no tensor `{name}`, it has {}", list_or_none(&there)),
                    "name the three tensors q, k and v".to_owned(),
                )
            })?;
            let dtype = dtype_of(name, info)?;
            let shape: Option<[u32; 4]> =
                <[usize; 4]>::try_from(info.shape.as_slice()).ok().and_then(|shape| {
                    Some([to_u32(shape[0])?, to_u32(shape[1])?, to_u32(shape[2])?, to_u32(shape[3])?])
                });
            let shape = shape.ok_or_else(|| {
                (
                    format!("holds `{name}` with shape {:?}", info.shape),
                    "use four extents: [batch, seq, heads, dim]".to_owned(),
                )
            })?;
            Ok((info, shape, dtype))
        };
        let ((q, q_shape, dtype), (k, k_shape, k_dtype), (v, v_shape, v_dtype)) =
            (tensor("q")?, tensor("k")?, tensor("v")?);
        if (dtype, dtype) != (k_dtype, v_dtype) {
            return Err((
                format!("holds q as {dtype}, k as {k_dtype} and v as {v_dtype}"),
                "give all three one dtype".to_owned(),
            ));
        }
        if k_shape != v_shape {
            return Err((
                format!("holds k with shape {k_shape:?} and v with shape {v_shape:?}"),
                "k and v are both [batch, kv seq, kv heads, dim]".to_owned(),
            ));
        }
        if (q_shape[0], q_shape[3]) != (k_shape[0], k_shape[3]) {
            return Err((
                format!("holds q with shape {q_shape:?} and k with shape {k_shape:?}"),
                "the first and last extents, batch and dim, are the same in both".to_owned(),
            ));
        }
        let [batch, q_len, q_heads, head_dim] = q_shape;
        let start = |info: &TensorInfo| data_start + info.data_offsets.0 as u64;
        Ok(Self {
            path: path.to_owned(),
            starts: [start(q), start(k), start(v)],
            dtype,
            batch,
            q_len,
            kv_len: k_shape[1],
            q_heads,
            kv_heads: k_shape[2],
            head_dim,
            sinks: read_sinks(&file, tensors, data_start, q_heads)?,
            pairs: FilePairs::find(tensors, data_start, [batch, q_len, q_heads, k_shape[1]], dtype)?,
            file,
            ignored,
        })
    }

    fn read(&self, which: Which, shard: &Shard<'_>) -> Result<Bytes> {
        let element = self.dtype.bytes() as u64;
        let bytes = shard.elements * element as usize;
        // Whole words, so that elements are aligned.
        let mut words = zeroed(bytes.div_ceil(8), 0_u64)?;
        let mut rest = &mut bytemuck::cast_slice_mut(&mut words)[..bytes];
        let start = self.starts[which as usize];
        shard.for_each_range(|range| {
            let (now, later) =
                std::mem::take(&mut rest).split_at_mut(((range.end - range.start) * element) as usize);
            rest = later;
            read_exact_at(&self.file, now, start + range.start * element)
                .map_err(|error| Failure::file("read", &self.path, &error))
        })?;
        Ok(Bytes::from_owner(Elements(words)).slice(..bytes))
    }
}

/// The tensor `sinks`, `[query heads]`, if there is one.
fn read_sinks(
    file: &File,
    tensors: &Metadata,
    data_start: u64,
    q_heads: u32,
) -> Result<Vec<f32>, (String, String)> {
    let Some(info) = tensors.info("sinks") else { return Ok(Vec::new()) };
    if info.shape != [q_heads as usize] {
        return Err((
            format!("holds `sinks` with shape {:?} for {q_heads} query heads", info.shape),
            format!("give one sink for each query head: [{q_heads}]"),
        ));
    }
    let dtype = dtype_of("sinks", info)?;
    // As many as q has heads, and the header's offsets are inside the file.
    let mut bytes = vec![0; info.data_offsets.1 - info.data_offsets.0];
    read_exact_at(file, &mut bytes, data_start + info.data_offsets.0 as u64)
        .map_err(|error| (format!("cannot be read: {error}"), "copy the whole file".to_owned()))?;
    Ok(match dtype {
        Dtype::F32 => bytemuck::pod_collect_to_vec(&bytes),
        Dtype::F16 => bytemuck::pod_collect_to_vec::<_, f16>(&bytes).into_iter().map(f16::to_f32).collect(),
        Dtype::Bf16 => {
            bytemuck::pod_collect_to_vec::<_, bf16>(&bytes).into_iter().map(bf16::to_f32).collect()
        }
    })
}

fn dtype_of(name: &str, info: &TensorInfo) -> Result<Dtype, (String, String)> {
    match info.dtype {
        safetensors::Dtype::F32 => Ok(Dtype::F32),
        safetensors::Dtype::F16 => Ok(Dtype::F16),
        safetensors::Dtype::BF16 => Ok(Dtype::Bf16),
        other => Err((format!("holds `{name}` as {other:?}"), format!("convert {name} to F32, F16 or BF16"))),
    }
}

fn to_u32(extent: usize) -> Option<u32> {
    u32::try_from(extent).ok()
}

/// A name from a file, safe to print.
fn shown(name: &str) -> String {
    name.chars().take(40).map(|c| if c.is_control() { '?' } else { c }).collect()
}

fn list_or_none(names: &[String]) -> String {
    if names.is_empty() { "none at all".to_owned() } else { names.join(", ") }
}

/// The header's length comes first, as a little-endian u64.
pub(crate) const LENGTH_BYTES: u64 = 8;
/// Far above any header of three tensors, far below what would hurt.
const MAX_HEADER_BYTES: u64 = 16 << 20;
