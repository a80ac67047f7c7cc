//! What is decided about a rank by its hello.

use quinn::Connection;

use super::admission::{Admission, GroupStatus, left_out_text};
use super::config::QuicConfig;
use crate::quic::trust::names::Claims;
use crate::rank::Rank;
use crate::wire::{Frame, PROTOCOL_VERSION, Purpose, RejectCode};

impl Admission {
    /// The rank and purpose of a connection, or why it is refused.
    pub(crate) fn judge(
        &self,
        hello: &Frame,
        claims: &Claims,
        (negotiated, lane): (Option<Purpose>, usize),
        connection: &Connection,
    ) -> Result<(Rank, Purpose, u32), (RejectCode, String)> {
        let Frame::Hello { protocol, purpose, job: said_job, epoch: said_epoch, rank, size: said_size } =
            *hello
        else {
            return Err((RejectCode::Protocol, "the first frame was not a hello".into()));
        };
        let QuicConfig { rank: me, size, job, .. } = &self.config;
        if protocol != PROTOCOL_VERSION {
            let text =
                format!("rank {me} speaks protocol version {PROTOCOL_VERSION}, rank {rank} {protocol}");
            return Err((RejectCode::Version, text));
        }
        let status = self.status();
        let again = matches!(purpose, Purpose::Reform | Purpose::Rejoin);
        let (epoch, fits) = match status {
            GroupStatus::First { epoch } | GroupStatus::Group { epoch, .. } => {
                (epoch, again || said_epoch == epoch)
            }
            GroupStatus::Between { from_epoch, .. } => {
                let data = matches!(purpose, Purpose::Data | Purpose::Lane);
                (from_epoch, again || (data && said_epoch >= from_epoch))
            }
        };
        let fits = fits || (purpose == Purpose::Control && said_epoch == self.config.epoch);
        if said_job != job.0 || claims.job != *job || !fits {
            let text = format!(
                "this is job {job}, epoch {epoch}: {claims}, epoch {said_epoch}, is another job that uses this address"
            );
            return Err((RejectCode::Job, text));
        }
        let address = connection.remote_address().ip();
        claims
            .check_rank(rank, self.config.known(rank), Some(address))
            .map_err(|text| (RejectCode::Rank, text))?;
        if said_size != *size {
            let text = format!("rank {me} was told {size} ranks, rank {rank} was told {said_size}");
            return Err((RejectCode::Size, text));
        }
        if rank.0 >= *size || rank == *me {
            let text = format!("rank {rank} has no place here: this is rank {me} of {size}");
            return Err((RejectCode::Rank, text));
        }
        let channel = match purpose {
            Purpose::Data | Purpose::Lane => Purpose::Data,
            _ => Purpose::Control,
        };
        if Some(channel) != negotiated
            || (purpose == Purpose::Lane) != (lane > 0)
            || (purpose == Purpose::Control && *me != Rank::COORDINATOR)
        {
            let text = format!("rank {me} does not take a connection for {purpose:?}");
            return Err((RejectCode::Protocol, text));
        }
        if purpose == Purpose::Control {
            match status {
                GroupStatus::First { .. } => {}
                GroupStatus::Group { .. } => {
                    let text = format!(
                        "the group is complete, and rank {rank} is connected already: was it started twice? A rank that takes the \
                         place of a lost one says so (rejoin)"
                    );
                    return Err((RejectCode::Duplicate, text));
                }
                GroupStatus::Between { .. } => {
                    return Err((RejectCode::Busy, format!("rank {me} is forming the group again")));
                }
            }
        }
        if again {
            return match status {
                GroupStatus::First { .. } if purpose == Purpose::Rejoin && *me == Rank::COORDINATOR => {
                    self.replace(rank, connection);
                    Ok((rank, purpose, said_epoch))
                }
                GroupStatus::First { .. } => {
                    Err((RejectCode::Busy, format!("rank {me} is forming the first group")))
                }
                GroupStatus::Group { epoch, members }
                    if purpose == Purpose::Reform && said_epoch < epoch && !members.contains(&rank) =>
                {
                    Err((RejectCode::Gone, left_out_text(rank, epoch)))
                }
                GroupStatus::Group { epoch, .. } => {
                    Err((RejectCode::Busy, format!("rank {me} is in the group of epoch {epoch}")))
                }
                GroupStatus::Between { everyone, .. } if everyone != (purpose == Purpose::Rejoin) => {
                    Err((RejectCode::Busy, format!("rank {me} is forming a group of other ranks")))
                }
                GroupStatus::Between { .. } if rank < *me => {
                    Err((RejectCode::Busy, format!("rank {me} dials lower ranks itself")))
                }
                GroupStatus::Between { .. } => Ok((rank, purpose, said_epoch)),
            };
        }
        if !self.take(purpose, lane, rank, connection) {
            let text = format!("rank {rank} is connected already: was it started twice?");
            return Err((RejectCode::Duplicate, text));
        }
        Ok((rank, purpose, said_epoch))
    }
}
