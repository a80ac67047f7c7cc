//! Input files: safetensors with q, k and v, and with the gradients of the output.
//!
//! A file is checked by its header alone: sizes are bounded, and every dtype, shape and offset fits
//! the others and the length of the file, before anything is allocated for tensors.

use std::fs::{self, File};
use std::ops::Range;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use half::{bf16, f16};
use kyklos::Dtype;
use kyklos_transport::harmless;
use kyklos_transport::regular_file::open_regular;
use safetensors::tensor::{Metadata, TensorInfo};

use super::bias::FileBias;
use super::copy::{CopyId, Stamp};
use super::gradient::FileGradients;
use super::header;
use super::positioned::read_exact_at;
use super::shard::{Elements, Shard, TensorKind, dtype_of, zeroed};
use crate::failure::{Failure, Result};

/// A safetensors file whose header has been checked.
#[derive(Debug)]
pub(crate) struct InputFile {
    pub(super) path: PathBuf,
    pub(super) file: File,
    /// Which copy it is among those of all ranks.
    pub(crate) copy: CopyId,
    pub(super) stamp: Stamp,
    /// Where q, k and v are in the file.
    pub(super) bytes: [Range<u64>; 3],
    pub(crate) dtype: Dtype,
    pub(crate) batch: u32,
    pub(crate) q_len: u32,
    pub(crate) kv_len: u32,
    pub(crate) q_heads: u32,
    pub(crate) kv_heads: u32,
    pub(crate) head_dim: u32,
    /// One for each query head, or none.
    pub(crate) sinks: Vec<f32>,
    pub(crate) bias: Option<FileBias>,
    /// Where a backward pass is asked for.
    pub(super) gradients: Option<FileGradients>,
    /// Names of tensors that are not used.
    pub(super) ignored: Vec<String>,
}

impl InputFile {
    /// Opens a file and checks its header. `gradients`: whether the gradients of the output are
    /// read too.
    pub(crate) fn open(path: &Path, gradients: bool) -> Result<Self> {
        let wrong = |mismatch: String, remedy: &str| {
            Failure::request(format!("{} {mismatch}", path.display()), remedy)
        };
        let cannot_open = |error| Failure::file("open", path, &error).into_refusal();
        let file = open_regular(path).map_err(cannot_open)?;
        let metadata = file.metadata().map_err(|error| Failure::file("read", path, &error))?;
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
        let tensors = header::read(&header).map_err(not_safetensors)?;
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
        Self::from_header(path, (file, &metadata), (&tensors, data_start), gradients)
            .map_err(|(mismatch, remedy)| wrong(mismatch, &remedy))
    }

    fn from_header(
        path: &Path,
        (file, metadata): (File, &fs::Metadata),
        (tensors, data_start): (&Metadata, u64),
        gradients: bool,
    ) -> Result<Self, (String, String)> {
        let names = tensors.offset_keys();
        let mut ignored = Vec::new();
        for name in &names {
            match name.as_str() {
                "q" | "k" | "v" | "sinks" | "mask" | "bias" => {}
                "do" | "dlse" if gradients => {}
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
        let bytes = |info: &TensorInfo| {
            let (start, end) = info.data_offsets;
            data_start + start as u64..data_start + end as u64
        };
        let found = || FileGradients::find(tensors, data_start, q_shape, dtype);
        Ok(Self {
            gradients: gradients.then(found).transpose()?,
            path: path.to_owned(),
            copy: CopyId::of(metadata),
            stamp: Stamp::of(metadata),
            bytes: [bytes(q), bytes(k), bytes(v)],
            dtype,
            batch,
            q_len,
            kv_len: k_shape[1],
            q_heads,
            kv_heads: k_shape[2],
            head_dim,
            sinks: read_sinks(&file, tensors, data_start, q_heads)?,
            bias: FileBias::find(tensors, data_start, [batch, q_len, q_heads, k_shape[1]], dtype)?,
            file,
            ignored,
        })
    }

    pub(super) fn read(&self, which: TensorKind, shard: &Shard<'_>) -> Result<Bytes> {
        let element = self.dtype.bytes() as u64;
        let bytes = shard.elements * element as usize;
        // Whole words, so that elements are aligned.
        let mut words = zeroed(bytes.div_ceil(8), 0_u64)?;
        let mut rest = &mut bytemuck::cast_slice_mut(&mut words)[..bytes];
        let start = match (which, &self.gradients) {
            (TensorKind::OutputGradient, None) => {
                return Err(Failure::run("the gradient of the output of a call without a backward pass"));
            }
            (TensorKind::OutputGradient, Some(gradients)) => gradients.d_o.start,
            (TensorKind::Q | TensorKind::K | TensorKind::V, _) => self.bytes[which as usize].start,
        };
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

fn to_u32(extent: usize) -> Option<u32> {
    u32::try_from(extent).ok()
}

/// A name from a file, safe to print.
fn shown(name: &str) -> String {
    harmless(&name.chars().take(40).collect::<String>())
}

fn list_or_none(names: &[String]) -> String {
    if names.is_empty() { "none at all".to_owned() } else { names.join(", ") }
}

/// The header's length comes first, as a little-endian u64.
pub(crate) const LENGTH_BYTES: u64 = 8;
/// Far more than any header of three tensors, and harmless to allocate.
const MAX_HEADER_BYTES: u64 = 16 << 20;
