//! Fields that several frames have.

use std::net::{IpAddr, SocketAddr};

use super::codec::{Reader, WireError};
use super::frame::MAX_WORLD;
use crate::transport::{Progress, Rank, Tag};

/// IPv4 addresses travel as IPv4-mapped IPv6 ones, so that every entry has 18 bytes.
pub(super) fn put_address(out: &mut Vec<u8>, address: SocketAddr) {
    let ip = match address.ip() {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    };
    out.extend_from_slice(&ip.octets());
    out.extend_from_slice(&address.port().to_le_bytes());
}

pub(super) fn read_address(reader: &mut Reader<'_>) -> Result<SocketAddr, WireError> {
    let ip = IpAddr::from(reader.array::<16>()?).to_canonical();
    Ok(SocketAddr::new(ip, reader.u16()?))
}

/// At most [`MAX_WORLD`] of them.
pub(super) fn put_ranks(out: &mut Vec<u8>, ranks: &[Rank]) {
    let count = u32::try_from(ranks.len()).unwrap_or(MAX_WORLD).min(MAX_WORLD);
    out.extend_from_slice(&count.to_le_bytes());
    for rank in ranks.iter().take(count as usize) {
        out.extend_from_slice(&rank.0.to_le_bytes());
    }
}

pub(super) fn read_ranks(reader: &mut Reader<'_>) -> Result<Vec<Rank>, WireError> {
    let count = reader.u32()?;
    if count > MAX_WORLD {
        return Err(WireError::BadValue { field: "rank count", value: u64::from(count) });
    }
    // Grows as ranks are really there; the count alone reserves nothing.
    let mut ranks = Vec::new();
    for _ in 0..count {
        ranks.push(Rank(reader.u32()?));
    }
    Ok(ranks)
}

pub(super) fn read_flag(reader: &mut Reader<'_>, field: &'static str) -> Result<bool, WireError> {
    match reader.u8()? {
        0 => Ok(false),
        1 => Ok(true),
        value => Err(WireError::BadValue { field, value: u64::from(value) }),
    }
}

pub(super) fn put_tag(out: &mut Vec<u8>, tag: Tag) {
    out.extend_from_slice(&tag.op.to_le_bytes());
    out.extend_from_slice(&tag.message.to_le_bytes());
}

pub(super) fn read_tag(reader: &mut Reader<'_>) -> Result<Tag, WireError> {
    Ok(Tag { op: reader.u64()?, message: reader.u32()? })
}

pub(super) fn put_progress(out: &mut Vec<u8>, progress: Progress) {
    out.extend_from_slice(&progress.op.to_le_bytes());
    out.extend_from_slice(&progress.step.to_le_bytes());
}

pub(super) fn read_progress(reader: &mut Reader<'_>) -> Result<Progress, WireError> {
    Ok(Progress { op: reader.u64()?, step: reader.u32()? })
}
