//! What fits on the wire.

/// Largest frame on the wire, envelope included.
pub const MAX_FRAME_BYTES: usize = 64 * 1024;

/// Longest text in a frame, in bytes of UTF-8; longer ones are cut.
pub const MAX_TEXT_BYTES: u16 = 4096;

/// Longest request for a signature, and longest certificate, in bytes of DER.
pub const MAX_DER_BYTES: u16 = 4096;

/// Most data connections between two ranks.
pub const MOST_LANES: u8 = 16;

/// Most addresses that a rank may say for itself. Other ranks dial them, so this also bounds what a
/// member can make them dial.
pub const MOST_ADVERTISED: u8 = 8;

/// Most addresses of a rank in a table: what it says, and the one at which it was seen.
pub(super) const MOST_CANDIDATES: u8 = MOST_ADVERTISED + 1;

/// Bytes of a frame before its body: the length of the body.
pub(super) const LENGTH_BYTES: usize = 4;

/// Bytes of a frame after its body: CRC-32C of length and body.
pub(super) const CHECKSUM_BYTES: usize = 4;

/// Bytes of a frame around its body.
pub(super) const ENVELOPE_BYTES: usize = LENGTH_BYTES + CHECKSUM_BYTES;
