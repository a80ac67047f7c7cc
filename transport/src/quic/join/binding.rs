//! The binding of a proof of a token's secret: to one connection and one request.

use quinn::Connection;

use crate::rank::Rank;

/// Keying material that only the two ends of this connection can compute, for exactly this request.
pub(super) fn binding(
    connection: &Connection,
    asked: Option<Rank>,
    request: &[u8],
) -> Option<[u8; BINDING_BYTES]> {
    let mut context = asked.map_or(u32::MAX, |rank| rank.0).to_le_bytes().to_vec();
    context.extend_from_slice(request);
    let mut out = [0; BINDING_BYTES];
    connection.export_keying_material(&mut out, EXPORTER_LABEL, &context).ok()?;
    Some(out)
}

/// Names the use of the keying material, as RFC 5705 asks; part of the protocol.
const EXPORTER_LABEL: &[u8] = b"EXPERIMENTAL kyklos join";

/// Bytes that a proof is made of.
pub(super) const BINDING_BYTES: usize = 32;
