//! Reading and writing of little-endian fields.

use super::limits::MAX_TEXT_BYTES;

/// Why bytes cannot be decoded as a frame.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// The bytes end before the frame does.
    #[error("the frame ends too early")]
    UnexpectedEnd,
    /// Bytes are left over after the last field.
    #[error("{0} bytes follow the last field of the frame")]
    TrailingBytes(usize),
    /// The frame is longer than any frame may be.
    #[error("a frame of {0} bytes is longer than allowed")]
    TooLong(u64),
    /// The checksum does not fit the bytes.
    #[error("the checksum of the frame is {found:08x}, its bytes have {computed:08x}")]
    Checksum {
        /// As sent.
        found: u32,
        /// As computed over the received bytes.
        computed: u32,
    },
    /// The bytes have no known format.
    #[error("the bytes do not begin like a frame of this protocol")]
    Magic,
    /// A frame number that this version does not know.
    #[error("unknown frame number {0}")]
    UnknownFrame(u8),
    /// A layout version that this version does not know.
    #[error("version {found} of {what} is not known here")]
    UnknownVersion {
        /// Which layout.
        what: &'static str,
        /// As sent.
        found: u16,
    },
    /// A field holds an invalid value.
    #[error("{field} cannot be {value}")]
    BadValue {
        /// Which field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// A text is not UTF-8.
    #[error("a text is not UTF-8")]
    BadText,
}

/// A cursor over received bytes.
#[derive(Debug)]
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    pub(crate) fn bytes(&mut self, count: usize) -> Result<&'a [u8], WireError> {
        let (taken, rest) = self.rest.split_at_checked(count).ok_or(WireError::UnexpectedEnd)?;
        self.rest = rest;
        Ok(taken)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        let (taken, rest) = self.rest.split_first_chunk::<N>().ok_or(WireError::UnexpectedEnd)?;
        self.rest = rest;
        Ok(*taken)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, WireError> {
        Ok(u8::from_le_bytes(self.array()?))
    }

    pub(crate) fn u16(&mut self) -> Result<u16, WireError> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    pub(crate) fn u32(&mut self) -> Result<u32, WireError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(crate) fn u64(&mut self) -> Result<u64, WireError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// A text: its length in bytes as u16, at most [`MAX_TEXT_BYTES`], then UTF-8.
    pub(crate) fn text(&mut self) -> Result<String, WireError> {
        let length = self.u16()?;
        if length > MAX_TEXT_BYTES {
            return Err(WireError::BadValue { field: "length of a text", value: u64::from(length) });
        }
        let bytes = self.bytes(usize::from(length))?;
        std::str::from_utf8(bytes).map(str::to_owned).map_err(|_| WireError::BadText)
    }

    /// Bytes: their number as u16, at most `limit`, then the bytes.
    pub(crate) fn blob(&mut self, limit: u16) -> Result<Vec<u8>, WireError> {
        let length = self.u16()?;
        if length > limit {
            return Err(WireError::BadValue { field: "number of bytes", value: u64::from(length) });
        }
        self.bytes(usize::from(length)).map(<[u8]>::to_vec)
    }

    pub(crate) fn finish(self) -> Result<(), WireError> {
        if self.rest.is_empty() { Ok(()) } else { Err(WireError::TrailingBytes(self.rest.len())) }
    }
}

/// Appends bytes, at most `limit` of them.
pub(crate) fn put_blob(out: &mut Vec<u8>, bytes: &[u8], limit: u16) {
    let length = u16::try_from(bytes.len()).unwrap_or(limit).min(limit);
    out.extend_from_slice(&length.to_le_bytes());
    out.extend_from_slice(&bytes[..usize::from(length)]);
}

/// Appends a text of at most `limit` bytes, cut between two characters.
pub(crate) fn put_text(out: &mut Vec<u8>, text: &str, limit: u16) {
    let mut end = text.len().min(usize::from(limit));
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    // `end <= limit`, so the conversion keeps the value.
    out.extend_from_slice(&u16::try_from(end).unwrap_or(limit).to_le_bytes());
    out.extend_from_slice(&text.as_bytes()[..end]);
}
