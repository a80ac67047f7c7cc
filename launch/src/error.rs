//! Errors, sorted by the party at fault.

use std::fmt::Display;
use std::io;
use std::path::PathBuf;

use kyklos_transport::{BootstrapKind, TransportError};

/// Why a process cannot join a group.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Options, environment and cluster file do not describe one rank of one group. Nothing has
    /// been sent.
    #[error("{text}")]
    Request {
        /// The settings that do not match, both sides, and a setting that is valid instead.
        text: String,
        /// What kind of mismatch it is.
        kind: RequestKind,
    },
    /// A device in the cluster file, refused by
    /// [`Options::check_device`](crate::Options::check_device).
    #[error("{origin}, rank {rank}: {text}")]
    Device {
        /// The cluster file.
        origin: String,
        /// The rank in whose entry the device is.
        rank: usize,
        /// The refusal's own words.
        text: String,
    },
    /// The join token is no token. The text does not repeat it.
    #[error("{origin}: {source}")]
    Token {
        /// The option or variable that holds it.
        origin: String,
        /// What is wrong with it.
        source: TransportError,
    },
    /// The link settings do not fit each other, or not a group of this size.
    #[error(transparent)]
    Link(TransportError),
    /// The cluster file cannot be read.
    #[error("cannot read the cluster file {}: {source}", .path.display())]
    ClusterFile {
        /// Its path.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// An identity, an invitation, a token or a list of revoked keys cannot be used. Nothing has
    /// been sent but a word of that to rank 0, or the token.
    #[error(transparent)]
    Credentials(TransportError),
    /// The group did not form.
    #[error(transparent)]
    Transport(#[from] TransportError),
}

/// The result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// Options, environment or cluster file are wrong: the setting that does not match, and a valid
    /// one.
    pub(crate) fn request(mismatch: impl Display, remedy: impl Display) -> Self {
        Self::Request { text: format!("{mismatch}: {remedy}"), kind: RequestKind::Other }
    }

    /// The same wrong request, of this kind.
    pub(crate) fn of(self, kind: RequestKind) -> Self {
        match self {
            Self::Request { text, .. } => Self::Request { text, kind },
            other => other,
        }
    }

    /// Whether the request itself is wrong, so that another attempt fails the same way.
    pub fn is_request(&self) -> bool {
        match self {
            Self::Request { .. } | Self::Device { .. } | Self::Token { .. } | Self::Link(_) => true,
            Self::ClusterFile { .. } | Self::Credentials(_) | Self::Transport(_) => false,
        }
    }

    /// Whether this process refuses before it belongs to a group: the request or a file that it
    /// names is wrong, so that another attempt fails the same way.
    pub fn is_refusal(&self) -> bool {
        match self {
            Self::ClusterFile { .. } | Self::Credentials(_) => true,
            Self::Transport(error) => error.bootstrap_kind() == BootstrapKind::Address,
            _ => self.is_request(),
        }
    }
}

/// What kind of wrong request it is, for callers that know more about it than the text says: a
/// program has a flag for the setting.
///
/// ```
/// use kyklos_launch::{Error, Options, RequestKind};
///
/// let options = Options { rank: Some(1), ..Options::default() };
/// match options.join() {
///     Err(error @ Error::Request { kind: RequestKind::Size, .. }) => eprintln!("{error}; hint: --ranks N"),
///     other => panic!("{other:?}"),
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RequestKind {
    /// Nothing says how many ranks there are.
    Size,
    /// Nothing says which rank this process is.
    Rank,
    /// Nothing says where rank 0 is, or not in a form that can be read.
    Coordinator,
    /// Two settings contradict each other.
    Contradiction,
    /// There is no identity for this rank.
    Identity,
    /// A rank that rejoins has a token instead of the identity that it had.
    Rejoin,
    /// There are two proofs of who this rank is: an invitation, a token, an identity.
    TwoProofs,
    /// The file for the identity that the token obtains exists.
    IdentityExists,
    /// Anything else: the text says all.
    Other,
}
