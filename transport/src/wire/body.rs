//! The part of a frame between its length and its checksum: its number, its layout, its fields.

use super::candidates::Candidates;
use super::codec::{Reader, WireError, put_blob, put_text};
use super::fields::{
    put_addresses, put_claims, put_lane_ports, put_progress, put_ranks, put_tag, put_wish, read_addresses,
    read_claims, read_flag, read_lane_ports, read_progress, read_ranks, read_tag, read_wish,
};
use super::frame::{Frame, MemoryOffer, Purpose, RejectCode};
use super::limits::{MAX_DER_BYTES, MAX_TEXT_BYTES};
use super::notes::{Notes, put_note, read_note};
use crate::error::{Abort, AbortCause};
use crate::rank::{Rank, RefusalReason, Vote};

/// The one table of frame numbers.
mod number {
    pub(super) const HELLO: u8 = 1;
    pub(super) const WELCOME: u8 = 2;
    pub(super) const REJECT: u8 = 3;
    pub(super) const ADDRESS_TABLE: u8 = 4;
    pub(super) const MESHED: u8 = 5;
    pub(super) const START: u8 = 6;
    pub(super) const VOTE: u8 = 7;
    pub(super) const VERDICT: u8 = 8;
    pub(super) const PING: u8 = 9;
    pub(super) const PONG: u8 = 10;
    pub(super) const ABORT: u8 = 11;
    pub(super) const LINK_LOST: u8 = 12;
    pub(super) const LEAVE: u8 = 13;
    pub(super) const GOODBYE: u8 = 14;
    pub(super) const WANT: u8 = 15;
    pub(super) const DONE: u8 = 16;
    pub(super) const REFUSE: u8 = 17;
    pub(super) const MISSING: u8 = 18;
    pub(super) const WITHDRAW: u8 = 19;
    pub(super) const JOIN: u8 = 20;
    pub(super) const MEMBERS: u8 = 21;
    pub(super) const APPLY: u8 = 22;
    pub(super) const GRANT: u8 = 23;
    pub(super) const NOTES: u8 = 24;
    pub(super) const ADVERTISE: u8 = 25;
    pub(super) const SHARE_MEMORY: u8 = 26;
    pub(super) const NO_SHARED_MEMORY: u8 = 27;
    pub(super) const UNREACHED: u8 = 28;
}

/// Layout version of a frame; a frame that changes gets a new one of its own.
fn layout(number: u8) -> u8 {
    match number {
        number::WELCOME => 3,
        number::ADDRESS_TABLE | number::VOTE | number::PING | number::MEMBERS => 2,
        _ => 1,
    }
}

impl Frame {
    fn number(&self) -> u8 {
        match self {
            Self::Hello { .. } => number::HELLO,
            Self::Welcome { .. } => number::WELCOME,
            Self::Reject { .. } => number::REJECT,
            Self::Advertise { .. } => number::ADVERTISE,
            Self::AddressTable { .. } => number::ADDRESS_TABLE,
            Self::Unreached { .. } => number::UNREACHED,
            Self::Meshed => number::MESHED,
            Self::Start => number::START,
            Self::Vote { .. } => number::VOTE,
            Self::Notes { .. } => number::NOTES,
            Self::Verdict { .. } => number::VERDICT,
            Self::Ping { .. } => number::PING,
            Self::Pong => number::PONG,
            Self::Abort { .. } => number::ABORT,
            Self::LinkLost { .. } => number::LINK_LOST,
            Self::Leave => number::LEAVE,
            Self::Goodbye => number::GOODBYE,
            Self::Want { .. } => number::WANT,
            Self::Done { .. } => number::DONE,
            Self::Refuse { .. } => number::REFUSE,
            Self::Missing { .. } => number::MISSING,
            Self::Withdraw { .. } => number::WITHDRAW,
            Self::Join { .. } => number::JOIN,
            Self::Members { .. } => number::MEMBERS,
            Self::Apply { .. } => number::APPLY,
            Self::Grant { .. } => number::GRANT,
            Self::ShareMemory { .. } => number::SHARE_MEMORY,
            Self::NoSharedMemory { .. } => number::NO_SHARED_MEMORY,
        }
    }

    pub(super) fn put_body(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&[self.number(), layout(self.number())]);
        match self {
            Self::Hello { protocol, purpose, job, epoch, rank, size } => {
                out.extend_from_slice(&protocol.to_le_bytes());
                out.push(match purpose {
                    Purpose::Control => 0,
                    Purpose::Data => 1,
                    Purpose::Reform => 2,
                    Purpose::Rejoin => 3,
                    Purpose::Lane => 4,
                });
                out.extend_from_slice(job);
                out.extend_from_slice(&epoch.to_le_bytes());
                out.extend_from_slice(&rank.0.to_le_bytes());
                out.extend_from_slice(&size.to_le_bytes());
            }
            Self::Welcome { protocol, lane_ports, heartbeat_us, wan } => {
                out.extend_from_slice(&protocol.to_le_bytes());
                put_lane_ports(out, lane_ports);
                out.extend_from_slice(&heartbeat_us.to_le_bytes());
                out.push(u8::from(*wan));
            }
            Self::Reject { code, text } => {
                out.push(code.number());
                put_text(out, text, MAX_TEXT_BYTES);
            }
            Self::Advertise { addresses } => put_addresses(out, addresses),
            Self::AddressTable { candidates } => candidates.put(out),
            Self::Join { claims, patience_ms } => {
                put_claims(out, claims);
                out.extend_from_slice(&patience_ms.to_le_bytes());
            }
            Self::Members { epoch, members } => {
                out.extend_from_slice(&epoch.to_le_bytes());
                put_ranks(out, members);
            }
            Self::Apply { rank, request, proof } => {
                put_wish(out, *rank);
                put_blob(out, request, MAX_DER_BYTES);
                out.extend_from_slice(proof);
            }
            Self::Grant { rank, size, certificate } => {
                out.extend_from_slice(&rank.0.to_le_bytes());
                out.extend_from_slice(&size.to_le_bytes());
                put_blob(out, certificate, MAX_DER_BYTES);
            }
            Self::Unreached { peers } => put_ranks(out, peers),
            Self::Meshed | Self::Start | Self::Pong | Self::Leave | Self::Goodbye => {}
            Self::Vote { vote: Vote::Ready { plan_hash, note } } => {
                out.push(0);
                out.extend_from_slice(plan_hash);
                put_note(out, note);
            }
            Self::Vote { vote: Vote::Refuse { reason, text } } => {
                out.extend_from_slice(&[1, reason.code()]);
                put_text(out, text, MAX_TEXT_BYTES);
            }
            Self::Notes { round, notes } => {
                out.extend_from_slice(&round.to_le_bytes());
                notes.put(out);
            }
            Self::Verdict { round, refusal } => {
                out.extend_from_slice(&round.to_le_bytes());
                match refusal {
                    None => out.push(0),
                    Some((rank, reason, text)) => {
                        out.push(1);
                        out.extend_from_slice(&rank.0.to_le_bytes());
                        out.push(reason.code());
                        put_text(out, text, MAX_TEXT_BYTES);
                    }
                }
            }
            Self::Missing { round, rank, left } => {
                out.extend_from_slice(&round.to_le_bytes());
                out.extend_from_slice(&rank.0.to_le_bytes());
                out.push(u8::from(*left));
            }
            Self::Ping { progress, beats, works, waits_for } => {
                put_progress(out, *progress);
                out.extend_from_slice(&beats.to_le_bytes());
                out.push(u8::from(*works));
                put_ranks(out, waits_for);
            }
            Self::Abort { abort: Abort { culprit, cause, progress } } => {
                out.extend_from_slice(&culprit.0.to_le_bytes());
                let (number, text) = match cause {
                    AbortCause::Died(text) => (0, text),
                    AbortCause::Failed(text) => (1, text),
                    AbortCause::Stuck(text) => (2, text),
                };
                out.push(number);
                put_progress(out, *progress);
                put_text(out, text, MAX_TEXT_BYTES);
            }
            Self::LinkLost { peer, text } => {
                out.extend_from_slice(&peer.0.to_le_bytes());
                put_text(out, text, MAX_TEXT_BYTES);
            }
            Self::Want { tag } | Self::Done { tag } | Self::Withdraw { tag } => put_tag(out, *tag),
            Self::Refuse { tag, text } => {
                put_tag(out, *tag);
                put_text(out, text, MAX_TEXT_BYTES);
            }
            Self::ShareMemory { offer: MemoryOffer { socket, secret_of_guest, secret_of_host } } => {
                out.extend_from_slice(socket);
                out.extend_from_slice(secret_of_guest);
                out.extend_from_slice(secret_of_host);
            }
            Self::NoSharedMemory { text } => put_text(out, text, MAX_TEXT_BYTES),
        }
    }

    pub(super) fn decode_body(body: &[u8]) -> Result<Self, WireError> {
        let mut reader = Reader::new(body);
        let number = reader.u8()?;
        let found = reader.u8()?;
        if found != layout(number) {
            return Err(WireError::UnknownVersion { what: "a frame", found: u16::from(found) });
        }
        let frame = match number {
            number::HELLO => Self::Hello {
                protocol: reader.u16()?,
                purpose: match reader.u8()? {
                    0 => Purpose::Control,
                    1 => Purpose::Data,
                    2 => Purpose::Reform,
                    3 => Purpose::Rejoin,
                    4 => Purpose::Lane,
                    value => {
                        return Err(WireError::BadValue { field: "purpose", value: u64::from(value) });
                    }
                },
                job: reader.array()?,
                epoch: reader.u32()?,
                rank: Rank(reader.u32()?),
                size: reader.u32()?,
            },
            number::WELCOME => Self::Welcome {
                protocol: reader.u16()?,
                lane_ports: read_lane_ports(&mut reader)?,
                heartbeat_us: reader.u32()?,
                wan: read_flag(&mut reader, "wan")?,
            },
            number::REJECT => Self::Reject { code: RejectCode::read(&mut reader)?, text: reader.text()? },
            number::ADVERTISE => Self::Advertise { addresses: read_addresses(&mut reader)? },
            number::ADDRESS_TABLE => Self::AddressTable { candidates: Candidates::read(&mut reader)? },
            number::JOIN => Self::Join { claims: read_claims(&mut reader)?, patience_ms: reader.u32()? },
            number::MEMBERS => Self::Members { epoch: reader.u32()?, members: read_ranks(&mut reader)? },
            number::APPLY => Self::Apply {
                rank: read_wish(&mut reader)?,
                request: reader.blob(MAX_DER_BYTES)?,
                proof: reader.array()?,
            },
            number::GRANT => Self::Grant {
                rank: Rank(reader.u32()?),
                size: reader.u32()?,
                certificate: reader.blob(MAX_DER_BYTES)?,
            },
            number::UNREACHED => Self::Unreached { peers: read_ranks(&mut reader)? },
            number::MESHED => Self::Meshed,
            number::START => Self::Start,
            number::VOTE => Self::Vote {
                vote: match reader.u8()? {
                    0 => Vote::Ready { plan_hash: reader.array()?, note: read_note(&mut reader)? },
                    1 => {
                        Vote::Refuse { reason: RefusalReason::from_code(reader.u8()?), text: reader.text()? }
                    }
                    value => {
                        return Err(WireError::BadValue { field: "vote", value: u64::from(value) });
                    }
                },
            },
            number::NOTES => Self::Notes { round: reader.u64()?, notes: Notes::read(&mut reader)? },
            number::VERDICT => Self::Verdict {
                round: reader.u64()?,
                refusal: match reader.u8()? {
                    0 => None,
                    1 => {
                        let (rank, reason) = (Rank(reader.u32()?), RefusalReason::from_code(reader.u8()?));
                        Some((rank, reason, reader.text()?))
                    }
                    value => {
                        return Err(WireError::BadValue { field: "verdict", value: u64::from(value) });
                    }
                },
            },
            number::MISSING => Self::Missing {
                round: reader.u64()?,
                rank: Rank(reader.u32()?),
                left: read_flag(&mut reader, "left")?,
            },
            number::PING => Self::Ping {
                progress: read_progress(&mut reader)?,
                beats: reader.u64()?,
                works: read_flag(&mut reader, "works")?,
                waits_for: read_ranks(&mut reader)?,
            },
            number::PONG => Self::Pong,
            number::ABORT => {
                let culprit = Rank(reader.u32()?);
                let cause = reader.u8()?;
                let progress = read_progress(&mut reader)?;
                let text = reader.text()?;
                let cause = match cause {
                    0 => AbortCause::Died(text),
                    1 => AbortCause::Failed(text),
                    2 => AbortCause::Stuck(text),
                    value => {
                        return Err(WireError::BadValue { field: "cause", value: u64::from(value) });
                    }
                };
                Self::Abort { abort: Abort { culprit, cause, progress } }
            }
            number::LINK_LOST => Self::LinkLost { peer: Rank(reader.u32()?), text: reader.text()? },
            number::LEAVE => Self::Leave,
            number::GOODBYE => Self::Goodbye,
            number::WANT => Self::Want { tag: read_tag(&mut reader)? },
            number::DONE => Self::Done { tag: read_tag(&mut reader)? },
            number::WITHDRAW => Self::Withdraw { tag: read_tag(&mut reader)? },
            number::REFUSE => Self::Refuse { tag: read_tag(&mut reader)?, text: reader.text()? },
            number::SHARE_MEMORY => Self::ShareMemory {
                offer: MemoryOffer {
                    socket: reader.array()?,
                    secret_of_guest: reader.array()?,
                    secret_of_host: reader.array()?,
                },
            },
            number::NO_SHARED_MEMORY => Self::NoSharedMemory { text: reader.text()? },
            unknown => return Err(WireError::UnknownFrame(unknown)),
        };
        reader.finish()?;
        Ok(frame)
    }
}

impl RejectCode {
    fn number(self) -> u8 {
        match self {
            Self::Version => 1,
            Self::Job => 2,
            Self::Rank => 3,
            Self::Size => 4,
            Self::Duplicate => 5,
            Self::Protocol => 6,
            Self::Busy => 7,
            Self::Gone => 8,
            Self::Token => 9,
        }
    }

    fn read(reader: &mut Reader<'_>) -> Result<Self, WireError> {
        Ok(match reader.u8()? {
            1 => Self::Version,
            2 => Self::Job,
            3 => Self::Rank,
            4 => Self::Size,
            5 => Self::Duplicate,
            6 => Self::Protocol,
            7 => Self::Busy,
            8 => Self::Gone,
            9 => Self::Token,
            value => {
                return Err(WireError::BadValue { field: "reject code", value: u64::from(value) });
            }
        })
    }
}
