//! How frames follow each other on a stream: each with its length before it and its checksum behind
//! it.

use super::codec::WireError;
use super::frame::Frame;
use super::limits::{CHECKSUM_BYTES, ENVELOPE_BYTES, LENGTH_BYTES, MAX_FRAME_BYTES};

impl Frame {
    /// The frame in its wire format: length of the body (u32), body, CRC-32C of both. Cannot fail.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(USUAL_BYTES);
        out.extend_from_slice(&[0; LENGTH_BYTES]);
        self.put_body(&mut out);
        // A body is bounded by MAX_FRAME_BYTES: texts are cut, a table has at most MAX_RANKS
        // entries, and notes are split.
        let body_bytes = u32::try_from(out.len() - LENGTH_BYTES).unwrap_or(u32::MAX);
        out[..LENGTH_BYTES].copy_from_slice(&body_bytes.to_le_bytes());
        let checksum = crc32c::crc32c(&out);
        out.extend_from_slice(&checksum.to_le_bytes());
        out
    }

    /// Decodes the frame at the start of `bytes`. Returns the frame and its length, or `None` if
    /// more bytes are needed.
    ///
    /// # Errors
    ///
    /// Any [`WireError`]. After an error the stream cannot be read any further.
    pub fn decode(bytes: &[u8]) -> Result<Option<(Self, usize)>, WireError> {
        let Some(length) = bytes.first_chunk::<LENGTH_BYTES>() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes(*length);
        let body_bytes = usize::try_from(length).unwrap_or(usize::MAX);
        if body_bytes > MAX_FRAME_BYTES - ENVELOPE_BYTES {
            return Err(WireError::TooLong(u64::from(length)));
        }
        let covered_bytes = LENGTH_BYTES + body_bytes;
        let Some((covered, rest)) = bytes.split_at_checked(covered_bytes) else {
            return Ok(None);
        };
        let Some(checksum) = rest.first_chunk::<CHECKSUM_BYTES>() else {
            return Ok(None);
        };
        let (found, computed) = (u32::from_le_bytes(*checksum), crc32c::crc32c(covered));
        if found != computed {
            return Err(WireError::Checksum { found, computed });
        }
        let frame = Self::decode_body(&covered[LENGTH_BYTES..])?;
        Ok(Some((frame, covered_bytes + CHECKSUM_BYTES)))
    }
}

/// Most frames are not longer: they are encoded in one allocation.
const USUAL_BYTES: usize = 64;

/// Decodes frames from bytes that arrive in pieces of any size. Holds at most one frame, and the
/// bytes that arrived with its end.
#[derive(Debug, Default)]
pub struct FrameStream {
    pending: Vec<u8>,
}

impl FrameStream {
    /// Adds received bytes. Take out every complete frame before the next call.
    pub fn put(&mut self, bytes: &[u8]) {
        self.pending.extend_from_slice(bytes);
    }

    /// The next frame, or `None` if more bytes are needed.
    ///
    /// # Errors
    ///
    /// Any [`WireError`]. After the first error every call returns the same error.
    pub fn take(&mut self) -> Result<Option<Frame>, WireError> {
        Ok(Frame::decode(&self.pending)?.map(|(frame, taken)| {
            self.pending.drain(..taken);
            frame
        }))
    }

    /// Whether the received bytes end with a complete frame.
    pub fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }
}
