//! Bytes on the wire: control frames, and the header before each message. `WIRE.md` beside this
//! crate's sources shows the layout; the golden tests hold both to the same bytes.
//!
//! Decoding returns a `Result`, never panics and never allocates by a length that the wire names
//! without having the bytes in hand. Encoding cannot fail: texts are cut to [`MAX_TEXT_BYTES`].

mod body;
mod candidates;
mod codec;
mod envelope;
mod fields;
mod frame;
#[cfg(feature = "quic")]
pub(crate) mod harmless;
mod header;
mod limits;
mod notes;

#[cfg(test)]
mod garbage;
#[cfg(test)]
mod golden;

pub use candidates::Candidates;
pub use codec::WireError;
pub use envelope::FrameStream;
pub use frame::{Frame, MemoryOffer, Purpose, RejectCode};
pub use header::{HEADER_BYTES, MessageHeader, part_digest};
pub use limits::{MAX_DER_BYTES, MAX_FRAME_BYTES, MAX_TEXT_BYTES, MOST_ADVERTISED, MOST_LANES};
pub use notes::Notes;

/// Version of everything on the wire. Peers with another version refuse each other.
pub const PROTOCOL_VERSION: u16 = 8;
