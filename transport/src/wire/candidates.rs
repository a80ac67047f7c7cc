//! A part of a table of addresses on its way from the coordinator to a rank.

use std::net::SocketAddr;

use super::codec::{Reader, WireError};
use super::fields::{put_address, read_address};
use super::limits::{ENVELOPE_BYTES, MAX_FRAME_BYTES, MOST_CANDIDATES};
use crate::rank::MAX_RANKS;

/// The addresses of ranks that follow each other: as many rows as fit one frame.
///
/// Rows have no allocations of their own, so that empty ones cost no more than they do on the wire.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Candidates {
    counts: Vec<u8>,
    addresses: Vec<SocketAddr>,
}

impl Candidates {
    /// The rows of all ranks, in rank order, in as few frames as they fit; one frame at least. A
    /// row is cut at nine addresses.
    pub fn split(rows: &[Vec<SocketAddr>]) -> Vec<Self> {
        let (mut parts, mut part, mut bytes) = (Vec::new(), Self::default(), FIXED_BYTES);
        for row in rows {
            let row = &row[..row.len().min(usize::from(MOST_CANDIDATES))];
            let length = 1 + ADDRESS_BYTES * row.len();
            if bytes + length > MAX_FRAME_BYTES {
                parts.push(std::mem::take(&mut part));
                bytes = FIXED_BYTES;
            }
            bytes += length;
            part.counts.push(u8::try_from(row.len()).unwrap_or(MOST_CANDIDATES));
            part.addresses.extend_from_slice(row);
        }
        parts.push(part);
        parts
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.counts.len()
    }

    /// Whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.counts.is_empty()
    }

    /// The rows, in rank order.
    pub fn iter(&self) -> impl Iterator<Item = &[SocketAddr]> {
        let mut rest = &self.addresses[..];
        self.counts.iter().map(move |&count| {
            let (row, after) = rest.split_at(usize::from(count));
            rest = after;
            row
        })
    }

    pub(super) fn put(&self, out: &mut Vec<u8>) {
        let count = u32::try_from(self.counts.len()).unwrap_or(u32::MAX);
        out.extend_from_slice(&count.to_le_bytes());
        for (count, row) in self.counts.iter().zip(self.iter()) {
            out.push(*count);
            row.iter().for_each(|address| put_address(out, *address));
        }
    }

    pub(super) fn read(reader: &mut Reader<'_>) -> Result<Self, WireError> {
        let rows = reader.u32()?;
        if rows > MAX_RANKS {
            return Err(WireError::BadValue { field: "row count", value: u64::from(rows) });
        }
        // Grows with the rows that are present; the count alone reserves no memory.
        let mut part = Self::default();
        for _ in 0..rows {
            let count = reader.u8()?;
            if count > MOST_CANDIDATES {
                return Err(WireError::BadValue { field: "address count", value: u64::from(count) });
            }
            part.counts.push(count);
            for _ in 0..count {
                part.addresses.push(read_address(reader)?);
            }
        }
        Ok(part)
    }
}

/// Bytes of an address: IPv6 and port.
const ADDRESS_BYTES: usize = 18;

/// Bytes of a frame besides its rows: envelope, number and layout of the frame, count.
const FIXED_BYTES: usize = ENVELOPE_BYTES + 2 + 4;
