//! What an owner and a helper say to each other.
//!
//! A request is an operation of their group of two. Its message 0 has the length of message 1,
//! which is a [`Request`] as JSON. The messages of an `Attend` follow, three for each part:
//! inputs from the owner, a [`Status`], and results if the status says so.

use bytes::Bytes;
use kyklos::{BiasKind, BiasTensor, Dtype, Error, Mask, Result, WireFormat};
use kyklos_transport::{Rank, Tag};
use serde::{Deserialize, Serialize};

use crate::call::{Call, Part, Shape};
use crate::encoding::{Encoding, Role};

/// The owner's rank in each group of two.
pub(crate) const OWNER: Rank = Rank(0);
/// The helper's.
pub(crate) const HELPER: Rank = Rank(1);

/// Both vote with it: an owner and a helper of other releases refuse each other.
pub(crate) const PROTOCOL: [u8; 32] = *b"kyklos helpers: protocol no. 001";

/// The helper's description, the note of its first vote.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub(crate) device: String,
    /// Bytes of tensors that it takes at a time.
    pub(crate) memory_bytes: Option<u64>,
}

/// What an owner asks for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Request {
    /// A message each way.
    Echo {
        /// Bytes from the owner.
        up: u64,
        /// Bytes back.
        down: u64,
    },
    /// How fast the device attends.
    Measure(Shape5),
    /// Some parts of a call.
    Attend(Work),
    /// The owner needs no help any more.
    Bye,
}

/// The type, the dim and the heads of calls whose speed is asked for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Shape5 {
    pub(crate) dtype: String,
    pub(crate) head_dim: u32,
    pub(crate) q_heads: u32,
    pub(crate) kv_heads: u32,
}

/// The answer to [`Request::Measure`]: two numbers, or zeros if the device cannot.
#[derive(Clone, Copy, Debug, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct Measured {
    pub(crate) pairs_per_s: u64,
    pub(crate) step_ns: u64,
}

/// A call, and the parts of it that the helper computes, in this order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Work {
    pub(crate) dtype: String,
    pub(crate) batch: u32,
    pub(crate) kv_len: u32,
    pub(crate) head_dim: u32,
    /// Query heads for each key/value head.
    pub(crate) group: u32,
    pub(crate) mask: String,
    /// The bits of f32 numbers: JSON has no infinities.
    pub(crate) scale: Option<u32>,
    pub(crate) softcap: Option<u32>,
    pub(crate) q_offset: u32,
    pub(crate) bias: Option<WorkBias>,
    pub(crate) wire: String,
    pub(crate) gradients: bool,
    pub(crate) pieces: Vec<Piece>,
    /// For each message.
    pub(crate) deadline_ms: u64,
}

/// A bias tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct WorkBias {
    pub(crate) additive: bool,
    /// Whether it has all batch entries, or one for all.
    pub(crate) batch: bool,
    /// The same for query heads.
    pub(crate) heads: bool,
    pub(crate) shared_rows: bool,
}

/// A part of a call, as a helper needs to know it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Piece {
    pub(crate) kv_heads: u32,
    pub(crate) rows: u32,
    /// Index of the first row in the call.
    pub(crate) first_row: u32,
    /// Whether its keys and values come with it; else they are those of the piece before.
    pub(crate) new_keys: bool,
    /// Bits of the sinks of its query heads.
    pub(crate) sinks: Vec<u32>,
}

/// How a helper fared with a piece. In [`STATUS_BYTES`] bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Status {
    /// Why there are no results, if there are none.
    pub(crate) fault: Option<String>,
    /// Nanoseconds of the device.
    pub(crate) compute_ns: u64,
    /// Nanoseconds for which the helper waited for the inputs.
    pub(crate) waited_ns: u64,
}

pub(crate) const HEADER_BYTES: usize = 8;
pub(crate) const STATUS_BYTES: usize = 256;
const STATUS_TEXT: usize = 24;
/// Longest text of a request. A mask of many slices is the longest part.
pub(crate) const MAX_REQUEST_BYTES: usize = 8 << 20;

/// The messages of an operation.
pub(crate) fn header_tag(op: u64) -> Tag {
    Tag { op, message: 0 }
}

pub(crate) fn request_tag(op: u64) -> Tag {
    Tag { op, message: 1 }
}

/// Of the inputs, the status and the results of piece number `piece`.
pub(crate) fn piece_tags(op: u64, piece: usize) -> [Tag; 3] {
    let first = u32::try_from(piece).unwrap_or(u32::MAX / 8).saturating_mul(3).saturating_add(2);
    [0, 1, 2].map(|message| Tag { op, message: first + message })
}

impl Request {
    pub(crate) fn to_bytes(&self) -> Bytes {
        serde_json::to_vec(self).unwrap_or_default().into()
    }

    /// # Errors
    /// [`Error::Request`] for other bytes.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Self> {
        serde_json::from_slice(bytes)
            .map_err(|error| Error::request(format!("a request that is none: {error}"), "use equal releases"))
    }
}

impl Status {
    pub(crate) fn to_bytes(&self) -> Bytes {
        let mut bytes = vec![0; STATUS_BYTES];
        bytes[..8].copy_from_slice(&u64::from(self.fault.is_some()).to_le_bytes());
        bytes[8..16].copy_from_slice(&self.compute_ns.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.waited_ns.to_le_bytes());
        let text = self.fault.as_deref().unwrap_or_default();
        let fits = |end: &usize| *end <= STATUS_BYTES - STATUS_TEXT && text.is_char_boundary(*end);
        let end = (0..=text.len()).rev().find(fits).unwrap_or(0);
        bytes[STATUS_TEXT..STATUS_TEXT + end].copy_from_slice(&text.as_bytes()[..end]);
        bytes.into()
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Self {
        let number = |at: usize| {
            bytes.get(at..at + 8).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_le_bytes)
        };
        let text = String::from_utf8_lossy(bytes.get(STATUS_TEXT..).unwrap_or_default());
        let text = kyklos_transport::harmless(text.trim_end_matches('\0'));
        Self { fault: (number(0) != 0).then_some(text), compute_ns: number(8), waited_ns: number(16) }
    }
}

fn bits(value: f32) -> u32 {
    value.to_bits()
}

impl Work {
    /// What a helper is asked, to compute `parts` of a call.
    pub(crate) fn new(call: &Call, shape: &Shape, parts: &[Part], deadline_ms: u64) -> Self {
        let mut before: Option<&Part> = None;
        let mut pieces = Vec::new();
        for part in parts {
            let sinks = part.call(&Call { bias: None, ..call.clone() }, shape).sinks;
            pieces.push(Piece {
                kv_heads: part.kv_heads.end - part.kv_heads.start,
                rows: part.rows.end - part.rows.start,
                first_row: part.rows.start,
                new_keys: before.is_none_or(|before| before.kv_heads != part.kv_heads),
                sinks: sinks.into_iter().map(bits).collect(),
            });
            before = Some(part);
        }
        let bias = call.bias.as_ref().map(|(tensor, _)| WorkBias {
            additive: tensor.kind == BiasKind::Additive,
            batch: tensor.batch > 1,
            heads: tensor.heads > 1,
            shared_rows: tensor.shared_rows,
        });
        Self {
            dtype: shape.dtype.name().to_owned(),
            batch: shape.batch,
            kv_len: shape.kv_len,
            head_dim: shape.head_dim,
            group: shape.group(),
            mask: call.mask.to_string(),
            scale: call.scale.map(bits),
            softcap: call.softcap.map(bits),
            q_offset: call.q_offset,
            bias,
            wire: call.wire.name().to_owned(),
            gradients: call.gradients,
            pieces,
            deadline_ms,
        }
    }

    /// How its tensors travel.
    ///
    /// # Errors
    /// [`Error::Request`] for names that are not known.
    pub(crate) fn encoding(&self) -> Result<Encoding> {
        Encoding::new(self.dtype.parse::<Dtype>()?, self.wire.parse::<WireFormat>()?)
    }

    /// The shape of a piece. Its sizes are checked: their product fits memory that a machine may
    /// have.
    ///
    /// # Errors
    /// [`Error::Request`].
    pub(crate) fn piece_shape(&self, piece: &Piece) -> Result<Shape> {
        let beyond =
            || Error::request("a piece with more elements than memory can hold", "use equal releases");
        let q_heads = piece.kv_heads.checked_mul(self.group).ok_or_else(beyond)?;
        let shape = Shape {
            batch: self.batch,
            q_len: piece.rows,
            kv_len: self.kv_len,
            q_heads,
            kv_heads: piece.kv_heads,
            head_dim: self.head_dim,
            dtype: self.dtype.parse()?,
        };
        let tokens = u64::from(piece.rows.max(self.kv_len));
        let all = [u64::from(self.batch), u64::from(q_heads.max(piece.kv_heads)), u64::from(self.head_dim)];
        let elements = all.iter().try_fold(tokens, |product, extent| product.checked_mul(*extent));
        // A bias has no more elements than this.
        let pairs = [u64::from(piece.rows), u64::from(self.kv_len), all[0], all[1]];
        let pairs = pairs.iter().try_fold(1_u64, |product, extent| product.checked_mul(*extent));
        pairs.filter(|pairs| *pairs < 1 << 60).ok_or_else(beyond)?;
        elements.filter(|elements| *elements < 1 << 40).ok_or_else(beyond)?;
        Ok(shape)
    }

    /// The options of a piece; its bias has no rows yet.
    ///
    /// # Errors
    /// [`Error::Request`] for what is no mask or no format.
    pub(crate) fn piece_call(&self, piece: &Piece) -> Result<Call> {
        let shape = self.piece_shape(piece)?;
        let bias = self.bias.map(|bias| BiasTensor {
            kind: if bias.additive { BiasKind::Additive } else { BiasKind::Mask },
            batch: if bias.batch { shape.batch } else { 1 },
            heads: if bias.heads { shape.q_heads } else { 1 },
            shared_rows: bias.shared_rows,
        });
        Ok(Call {
            mask: self.mask.parse::<Mask>()?,
            scale: self.scale.map(f32::from_bits),
            softcap: self.softcap.map(f32::from_bits),
            sinks: piece.sinks.iter().copied().map(f32::from_bits).collect(),
            q_offset: self.q_offset.saturating_add(piece.first_row),
            bias: bias.map(|bias| (bias, Bytes::new())),
            wire: WireFormat::Same,
            gradients: self.gradients,
        })
    }

    /// Bytes of each part of a piece's inputs: q, k and v if they are new, the bias, and the
    /// gradient of the output.
    ///
    /// # Errors
    /// As [`Self::piece_shape`].
    pub(crate) fn input_bytes(&self, piece: &Piece) -> Result<Vec<usize>> {
        let (encoding, shape) = (self.encoding()?, self.piece_shape(piece)?);
        let (q, kv) = (queries_shape(&shape), keys_shape(&shape));
        let mut bytes = encoding.part_bytes(q, Role::Rows);
        if piece.new_keys {
            bytes.extend(encoding.part_bytes(kv, Role::Keys));
            bytes.extend(encoding.part_bytes(kv, Role::Rows));
        }
        if let Some((tensor, _)) = self.piece_call(piece)?.bias {
            let rows = tensor.bytes(shape.dtype, shape.q_len, shape.kv_len);
            bytes.push(usize::try_from(rows).unwrap_or(usize::MAX));
        }
        if self.gradients {
            bytes.extend(encoding.part_bytes(q, Role::Gradients));
        }
        Ok(bytes)
    }

    /// Bytes of each part of a piece's results: o, or the gradients of q, k and v.
    ///
    /// # Errors
    /// As [`Self::piece_shape`].
    pub(crate) fn result_bytes(&self, piece: &Piece) -> Result<Vec<usize>> {
        let (encoding, shape) = (self.encoding()?, self.piece_shape(piece)?);
        let mut bytes = Vec::new();
        for of in result_shapes(&shape, self.gradients) {
            bytes.extend(encoding.part_bytes(of, result_role(self.gradients)));
        }
        Ok(bytes)
    }
}

pub(crate) fn queries_shape(shape: &Shape) -> [usize; 4] {
    [shape.batch, shape.q_len, shape.q_heads, shape.head_dim].map(|extent| extent as usize)
}

pub(crate) fn keys_shape(shape: &Shape) -> [usize; 4] {
    [shape.batch, shape.kv_len, shape.kv_heads, shape.head_dim].map(|extent| extent as usize)
}

/// The shapes of a part's results.
pub(crate) fn result_shapes(shape: &Shape, gradients: bool) -> Vec<[usize; 4]> {
    let (q, kv) = (queries_shape(shape), keys_shape(shape));
    if gradients { vec![q, kv, kv] } else { vec![q] }
}

/// What the results of a part are.
pub(crate) fn result_role(gradients: bool) -> Role {
    if gradients { Role::Gradients } else { Role::Rows }
}

/// Message 0 of a request with a text of so many bytes.
pub(crate) fn header(text_bytes: usize) -> Bytes {
    Bytes::copy_from_slice(&(text_bytes as u64).to_le_bytes())
}

#[cfg(test)]
mod tests;
