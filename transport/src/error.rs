//! Errors of the transport, one variant for each party at fault.

use std::fmt;
use std::time::Duration;

use crate::ballot::Refusal;
use crate::rank::{Progress, Rank, RefusalReason, Tag};

/// Why a transport call ended without its value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// The group has been aborted; the same [`Abort`] on every rank unless the coordinator died.
    #[error("{abort}{}", .pending.as_ref().map(|pending| format!("; {pending}")).unwrap_or_default())]
    Aborted {
        /// The rank that failed, and why.
        abort: Abort,
        /// The call of this rank that the abort ended, if one was outstanding.
        pending: Option<Pending>,
    },
    /// A rank refused before any data moved (see [`crate::Vote::Refuse`]), or the ranks were about
    /// to run different plans.
    #[error("{text}")]
    Refused {
        /// The lowest refusing rank.
        rank: Rank,
        /// What kind of refusal it is.
        reason: RefusalReason,
        /// The refusing rank's own line.
        text: String,
    },
    /// A call did not end in time, and no rank is known to have died.
    #[error("{pending} after {waited:?}, and no rank is known to have died")]
    Deadline {
        /// The call that was not done.
        pending: Pending,
        /// How long it waited.
        waited: Duration,
    },
    /// An exchange of messages with several ranks did not end in time. Which of them is the cause
    /// is not known, and no rank is known to have died.
    #[error(
        "the exchange of {tag} with ranks {} had not ended after {waited:?}; which of these ranks is the cause is not known, and no rank \
         is known to have died",
        list(peers)
    )]
    LateExchange {
        /// The exchange.
        tag: Tag,
        /// The ranks on the other side of its messages, in order.
        peers: Vec<Rank>,
        /// How long it waited.
        waited: Duration,
    },
    /// A peer sent something that the protocol does not allow.
    #[error("rank {peer} broke the protocol: {text}")]
    PeerMisbehaved {
        /// The peer at fault.
        peer: Rank,
        /// The violation, with both sides of the mismatch.
        text: String,
    },
    /// The group could not be formed.
    #[error("{text}")]
    Bootstrap {
        /// What failed and what to do about it. It may quote another rank.
        text: String,
        /// What kind of failure it is, as this rank knows it; never read from the text.
        kind: BootstrapKind,
    },
    /// A call that this transport's contract does not allow: a bug of the caller.
    #[error("{text}")]
    Misuse {
        /// What was called wrongly.
        text: String,
    },
    /// The transport was closed while the call was outstanding.
    #[error("the transport was closed")]
    Closed,
}

impl TransportError {
    /// The group could not be formed, because of `text`, which may come from a peer.
    pub(crate) fn bootstrap(text: impl Into<String>) -> Self {
        BootstrapKind::Other.error(text)
    }

    /// The kind of a failure to form a group; [`BootstrapKind::Other`] of every other error.
    ///
    /// ```
    /// use kyklos_transport::{BootstrapKind, TransportError};
    ///
    /// let error = TransportError::Bootstrap {
    ///     text: "the certificate of rank 1 has expired: issue a new certificate".into(),
    ///     kind: BootstrapKind::Certificate,
    /// };
    /// // The words of the library, and what this program has for it.
    /// let hint = match error.bootstrap_kind() {
    ///     BootstrapKind::Certificate => "; hint: run issue-certificates",
    ///     _ => "",
    /// };
    /// assert!(format!("{error}{hint}").ends_with("issue a new certificate; hint: run issue-certificates"));
    /// assert_eq!(TransportError::Closed.bootstrap_kind(), BootstrapKind::Other);
    /// ```
    pub fn bootstrap_kind(&self) -> BootstrapKind {
        match self {
            Self::Bootstrap { kind, .. } => *kind,
            _ => BootstrapKind::Other,
        }
    }
}

/// What kind of failure kept a group from forming, for callers that know more about it than the
/// text says: a program has a command that issues certificates.
///
/// This rank's own code decides it, or a number that a peer sends: a TLS alert, the code of a
/// `Reject`. A text never does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum BootstrapKind {
    /// This rank or another one refuses a certificate: it does not hold now, it has been revoked,
    /// or it is of an authority that is not trusted.
    Certificate,
    /// There is no authority, or it does not hold now.
    Authority,
    /// There is no invitation that can be used: the file is none, its token lets nobody in any
    /// more, or rank 0 has none.
    Invitation,
    /// A text is no token, or rank 0 does not take the token.
    Token,
    /// The ranks that the token gives are given away.
    GivenAway,
    /// A list of keys has a line that is none.
    KeyList,
    /// A certificate is not valid yet: a clock is wrong.
    Clock,
    /// The address at which this rank should listen is not one of this machine, or is closed to
    /// this user.
    Address,
    /// The packets of QUIC are larger than those that the network carries.
    SmallMtu,
    /// Anything else.
    #[default]
    Other,
}

impl BootstrapKind {
    pub(crate) fn error(self, text: impl Into<String>) -> TransportError {
        TransportError::Bootstrap { text: text.into(), kind: self }
    }
}

impl AbortCause {
    /// The reason, without the kind of failure.
    pub fn text(&self) -> &str {
        let (Self::Died(text) | Self::Failed(text) | Self::Stuck(text)) = self;
        text
    }
}

impl From<Refusal> for TransportError {
    fn from(Refusal { rank, reason, text }: Refusal) -> Self {
        Self::Refused { rank, reason, text }
    }
}

/// An outstanding call, and how far it got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pending {
    /// `send`, `receive`, `agree` or `close`.
    pub operation: &'static str,
    /// The other side: of an `agree` or a `close` the rank that was waited for, as far as it is
    /// known.
    pub peer: Rank,
    /// Which message. Of an `agree`, `op` is the number of the agreement.
    pub tag: Tag,
    /// Bytes that had moved.
    pub bytes_done: u64,
    /// Bytes that should have.
    pub bytes_expected: u64,
}

fn list(ranks: &[Rank]) -> String {
    ranks.iter().map(Rank::to_string).collect::<Vec<_>>().join(", ")
}

impl std::error::Error for Pending {}

impl fmt::Display for Pending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { operation, peer, tag, bytes_done, bytes_expected } = self;
        match *operation {
            "agree" => write!(f, "agreement {} waited for rank {peer}", tag.op),
            "close" => write!(f, "close waited for rank {peer}"),
            _ => {
                let direction = if *operation == "send" { "to" } else { "from" };
                write!(
                    f,
                    "{operation} {direction} rank {peer} ({tag}) had {bytes_done} of {bytes_expected} bytes"
                )
            }
        }
    }
}

/// Why a group was aborted, and which rank is the cause.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("rank {culprit} {cause} (operation {}, step {})", .progress.op, .progress.step)]
pub struct Abort {
    /// The rank that failed or died.
    pub culprit: Rank,
    /// What happened to it.
    pub cause: AbortCause,
    /// The position of the culprit in its operation, as last reported.
    pub progress: Progress,
}

impl Abort {
    /// The abort that `sender` asks for. It says so if another rank is to blame: nobody else has
    /// seen that.
    pub(crate) fn said_by(mut self, sender: Rank) -> Self {
        if sender != self.culprit {
            let (AbortCause::Died(text) | AbortCause::Failed(text) | AbortCause::Stuck(text)) =
                &mut self.cause;
            text.insert_str(0, &format!("rank {sender} says: "));
        }
        self
    }
}

/// What happened to the rank that caused an abort.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AbortCause {
    /// Its process or its link is gone.
    #[error("died: {0}")]
    Died(String),
    /// It reported an error of its own.
    #[error("failed: {0}")]
    Failed(String),
    /// It is alive, but makes no progress while others wait for it.
    #[error("is stuck: {0}")]
    Stuck(String),
}
