//! What two ranks tell each other about their shared memory, over their Unix socket: a chunk is
//! there, chunks have been read. Chunks fill the slots of a segment one after the other, so a
//! notice names no slot.

use crate::wire::HEADER_BYTES;

/// A notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Notice {
    /// The next slot holds this chunk.
    Chunk {
        /// A [`MessageHeader`](crate::wire::MessageHeader).
        header: [u8; HEADER_BYTES],
        /// xxh3-64 of the bytes.
        checksum: u64,
    },
    /// So many slots are free again.
    Free(u32),
}

/// Bytes of a notice on the socket.
pub(crate) const NOTICE_BYTES: usize = 1 + HEADER_BYTES + 8;

const CHUNK: u8 = 1;
const FREE: u8 = 2;

impl Notice {
    pub(crate) fn encode(&self) -> [u8; NOTICE_BYTES] {
        let mut out = [0; NOTICE_BYTES];
        match self {
            Self::Chunk { header, checksum } => {
                out[0] = CHUNK;
                out[1..=HEADER_BYTES].copy_from_slice(header);
                out[1 + HEADER_BYTES..].copy_from_slice(&checksum.to_le_bytes());
            }
            Self::Free(count) => {
                out[0] = FREE;
                out[1..5].copy_from_slice(&count.to_le_bytes());
            }
        }
        out
    }

    pub(crate) fn decode(bytes: &[u8; NOTICE_BYTES]) -> Result<Self, &'static str> {
        let (&[kind], rest) = bytes.split_first_chunk().ok_or(UNKNOWN)?;
        match kind {
            CHUNK => {
                let (header, checksum) = rest.split_first_chunk().ok_or(UNKNOWN)?;
                let checksum = u64::from_le_bytes(checksum.try_into().map_err(|_| UNKNOWN)?);
                Ok(Self::Chunk { header: *header, checksum })
            }
            FREE => {
                let (count, padding) = rest.split_first_chunk().ok_or(UNKNOWN)?;
                if padding.iter().any(|&byte| byte != 0) {
                    return Err(UNKNOWN);
                }
                Ok(Self::Free(u32::from_le_bytes(*count)))
            }
            _ => Err(UNKNOWN),
        }
    }
}

const UNKNOWN: &str = "bytes beside its shared memory that are no notice";
