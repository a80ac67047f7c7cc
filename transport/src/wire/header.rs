//! The fixed-size header before the payload of each message.

use super::codec::{Reader, WireError};
use crate::rank::{Rank, Tag};

/// Bytes of a [`MessageHeader`] on the wire.
pub const HEADER_BYTES: usize = 64;

/// The description of a message. The receiver compares every field with its own plan; no field
/// sizes an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageHeader {
    /// Low 64 bits of the job's number: bytes 8..16 of it, little-endian.
    pub job_low: u64,
    /// Epoch of the group.
    pub epoch: u32,
    /// Sender.
    pub from: Rank,
    /// Receiver.
    pub to: Rank,
    /// Which message.
    pub tag: Tag,
    /// Number of parts.
    pub part_count: u32,
    /// [`part_digest`] of the lengths of the parts.
    pub part_digest: u32,
    /// Bytes of all parts.
    pub total_bytes: u64,
    /// Which of the message's chunks follows; the first is 0.
    pub chunk: u32,
}

/// First bytes of a header.
const MAGIC: [u8; 4] = *b"KYK1";

/// Layout version of the header.
const LAYOUT: u8 = 2;

/// The only kind of message so far: raw parts.
const KIND_PARTS: u8 = 1;

impl MessageHeader {
    /// The header in its wire format. Cannot fail.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = Vec::with_capacity(HEADER_BYTES);
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&[LAYOUT, KIND_PARTS, 0, 0]);
        out.extend_from_slice(&self.job_low.to_le_bytes());
        out.extend_from_slice(&self.epoch.to_le_bytes());
        out.extend_from_slice(&self.from.0.to_le_bytes());
        out.extend_from_slice(&self.to.0.to_le_bytes());
        out.extend_from_slice(&self.tag.op.to_le_bytes());
        out.extend_from_slice(&self.tag.message.to_le_bytes());
        out.extend_from_slice(&self.part_count.to_le_bytes());
        out.extend_from_slice(&self.part_digest.to_le_bytes());
        out.extend_from_slice(&self.total_bytes.to_le_bytes());
        out.extend_from_slice(&self.chunk.to_le_bytes());
        let checksum = crc32c::crc32c(&out);
        out.extend_from_slice(&checksum.to_le_bytes());
        let mut bytes = [0; HEADER_BYTES];
        bytes.copy_from_slice(&out);
        bytes
    }

    /// Decodes a header.
    ///
    /// # Errors
    ///
    /// [`WireError`] unless the bytes are exactly a header of this version whose checksum fits.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let mut reader = Reader::new(bytes);
        if reader.array::<4>()? != MAGIC {
            return Err(WireError::Magic);
        }
        let layout = reader.u8()?;
        if layout != LAYOUT {
            return Err(WireError::UnknownVersion { what: "the message header", found: u16::from(layout) });
        }
        let kind = reader.u8()?;
        let reserved = reader.u16()?;
        let header = Self {
            job_low: reader.u64()?,
            epoch: reader.u32()?,
            from: Rank(reader.u32()?),
            to: Rank(reader.u32()?),
            tag: Tag { op: reader.u64()?, message: reader.u32()? },
            part_count: reader.u32()?,
            part_digest: reader.u32()?,
            total_bytes: reader.u64()?,
            chunk: reader.u32()?,
        };
        let found = reader.u32()?;
        reader.finish()?;
        let computed = crc32c::crc32c(&bytes[..HEADER_BYTES - 4]);
        if found != computed {
            return Err(WireError::Checksum { found, computed });
        }
        if kind != KIND_PARTS {
            return Err(WireError::BadValue { field: "kind of message", value: u64::from(kind) });
        }
        if reserved != 0 {
            return Err(WireError::BadValue { field: "reserved field", value: u64::from(reserved) });
        }
        Ok(header)
    }
}

/// CRC-32C over the lengths of the parts, each as u64: two sides whose plans cut a message
/// differently notice.
pub fn part_digest(part_bytes: impl Iterator<Item = usize>) -> u32 {
    part_bytes.fold(0, |digest, bytes| crc32c::crc32c_append(digest, &(bytes as u64).to_le_bytes()))
}
