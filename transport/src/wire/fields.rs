//! Fields that several frames share.

use std::net::{IpAddr, SocketAddr};

use super::codec::{Reader, WireError};
use super::limits::{MOST_ADVERTISED, MOST_LANES};
use crate::membership::{Claim, MOST_CLAIMS};
use crate::rank::{MAX_RANKS, Progress, Rank, Tag};

/// At most [`MOST_ADVERTISED`] of them.
pub(super) fn put_addresses(out: &mut Vec<u8>, addresses: &[SocketAddr]) {
    let count = u8::try_from(addresses.len()).unwrap_or(MOST_ADVERTISED).min(MOST_ADVERTISED);
    out.push(count);
    for address in addresses.iter().take(usize::from(count)) {
        put_address(out, *address);
    }
}

pub(super) fn read_addresses(reader: &mut Reader<'_>) -> Result<Vec<SocketAddr>, WireError> {
    let count = reader.u8()?;
    if count > MOST_ADVERTISED {
        return Err(WireError::BadValue { field: "address count", value: u64::from(count) });
    }
    (0..count).map(|_| read_address(reader)).collect()
}

/// At most [`MOST_LANES`] - 1 of them.
pub(super) fn put_lane_ports(out: &mut Vec<u8>, ports: &[u16]) {
    let count = u8::try_from(ports.len()).unwrap_or(u8::MAX).min(MOST_LANES - 1);
    out.push(count);
    for port in ports.iter().take(usize::from(count)) {
        out.extend_from_slice(&port.to_le_bytes());
    }
}

pub(super) fn read_lane_ports(reader: &mut Reader<'_>) -> Result<Vec<u16>, WireError> {
    let count = reader.u8()?;
    if count >= MOST_LANES {
        return Err(WireError::BadValue { field: "lane count", value: u64::from(count) });
    }
    (0..count).map(|_| reader.u16()).collect()
}

/// At most [`MOST_CLAIMS`] of them.
pub(super) fn put_claims(out: &mut Vec<u8>, claims: &[Claim]) {
    let claims = &claims[..claims.len().min(MOST_CLAIMS)];
    out.push(u8::try_from(claims.len()).unwrap_or(u8::MAX));
    for Claim { epoch, started, members } in claims {
        out.extend_from_slice(&epoch.to_le_bytes());
        out.push(u8::from(*started));
        put_ranks(out, members);
    }
}

pub(super) fn read_claims(reader: &mut Reader<'_>) -> Result<Vec<Claim>, WireError> {
    let count = reader.u8()?;
    if usize::from(count) > MOST_CLAIMS {
        return Err(WireError::BadValue { field: "claim count", value: u64::from(count) });
    }
    let claim = |reader: &mut Reader<'_>| {
        Ok(Claim {
            epoch: reader.u32()?,
            started: read_flag(reader, "started")?,
            members: read_ranks(reader)?,
        })
    };
    (0..count).map(|_| claim(reader)).collect()
}

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

/// At most [`MAX_RANKS`] of them.
pub(super) fn put_ranks(out: &mut Vec<u8>, ranks: &[Rank]) {
    let count = u32::try_from(ranks.len()).unwrap_or(MAX_RANKS).min(MAX_RANKS);
    out.extend_from_slice(&count.to_le_bytes());
    for rank in ranks.iter().take(count as usize) {
        out.extend_from_slice(&rank.0.to_le_bytes());
    }
}

pub(super) fn read_ranks(reader: &mut Reader<'_>) -> Result<Vec<Rank>, WireError> {
    let count = reader.u32()?;
    if count > MAX_RANKS {
        return Err(WireError::BadValue { field: "rank count", value: u64::from(count) });
    }
    // Grows with the ranks that are present; the count alone reserves no memory.
    let mut ranks = Vec::new();
    for _ in 0..count {
        ranks.push(Rank(reader.u32()?));
    }
    Ok(ranks)
}

/// The rank that an applicant asks for: 0 for any, or 1 and the rank.
pub(super) fn put_wish(out: &mut Vec<u8>, rank: Option<Rank>) {
    out.push(u8::from(rank.is_some()));
    rank.iter().for_each(|rank| out.extend_from_slice(&rank.0.to_le_bytes()));
}

pub(super) fn read_wish(reader: &mut Reader<'_>) -> Result<Option<Rank>, WireError> {
    let is_said = read_flag(reader, "wish for a rank")?;
    if is_said { Ok(Some(Rank(reader.u32()?))) } else { Ok(None) }
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
