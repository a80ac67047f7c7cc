//! Errors, sorted by the party at fault, and their remedies.

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::path::PathBuf;

use kyklos_transport::TransportError;

/// Why a process cannot join a group.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Options, environment and cluster file do not describe one rank of one group. Nothing has been sent.
    #[error("{mismatch}: {remedy}")]
    Request {
        /// The settings that do not match, both sides, named as [`Wording::option`](crate::Wording::option) names them.
        mismatch: String,
        /// A setting that is valid instead.
        remedy: Remedy,
    },
    /// A device in the cluster file, refused by [`Options::check_device`](crate::Options::check_device).
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
    /// An identity, an invitation or a list of revoked keys cannot be used, or the group did not form.
    #[error(transparent)]
    Transport(#[from] TransportError),
}

/// The result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// Options, environment or cluster file are wrong: the setting that does not match, and a valid one.
    pub(crate) fn request(mismatch: impl Into<String>, remedy: impl Into<Remedy>) -> Self {
        Self::Request { mismatch: mismatch.into(), remedy: remedy.into() }
    }

    /// Whether the request itself is wrong, so that another attempt fails the same way.
    pub fn is_request(&self) -> bool {
        match self {
            Self::Request { .. } | Self::Device { .. } | Self::Token { .. } | Self::Link(_) => true,
            Self::ClusterFile { .. } | Self::Transport(_) => false,
        }
    }
}

/// What to do about an error. `Display` says it in the terms of this library; a front end says it in its own
/// ([`Wording::remedy`](crate::Wording::remedy)). Exhaustive, so that the compiler shows a front end each new one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Remedy {
    /// Set the number of ranks.
    SetWorld,
    /// Set the rank, or start the processes with a launcher.
    SetRank,
    /// Set the address of rank 0.
    SetCoordinator,
    /// Write the environment variable in this syntax, or set the address of rank 0 instead.
    SyntaxOrCoordinator {
        /// An example of the syntax.
        example: &'static str,
    },
    /// Remove one of two settings that contradict each other.
    RemoveOneSetting,
    /// Remove the option: `kyklos launch` sets rank, world and coordinator.
    RemoveUnderKyklosLaunch,
    /// Give this rank an identity file or a join token.
    ObtainIdentity,
    /// Use the identity file that this rank had before, not a token.
    RejoinWithIdentity,
    /// Unset the environment variable; with a token only the option says where to keep the new identity.
    UnsetIdentityVariable,
    /// Use the existing identity file without a token, or name a file that does not exist for the new identity.
    IdentityFileOrToken,
    /// Issue a new identity before this one expires.
    RenewIdentity,
    /// A sentence that needs no option's name.
    Text(Cow<'static, str>),
}

impl From<&'static str> for Remedy {
    fn from(text: &'static str) -> Self {
        Self::Text(text.into())
    }
}

impl From<String> for Remedy {
    fn from(text: String) -> Self {
        Self::Text(text.into())
    }
}

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SetWorld => "set the option world or KYKLOS_WORLD",
            Self::SetRank => "set the option rank, or start the processes with a launcher",
            Self::SetCoordinator => {
                "set MASTER_ADDR and MASTER_PORT, or KYKLOS_COORDINATOR, or the option coordinator"
            }
            Self::SyntaxOrCoordinator { example } => {
                return write!(f, "write it like {example}, or set the option coordinator");
            }
            Self::RemoveOneSetting => "remove one of them",
            Self::RemoveUnderKyklosLaunch => "remove it: kyklos launch sets rank, world and coordinator",
            Self::ObtainIdentity => "issue an identity for this rank, or set the option token",
            Self::RejoinWithIdentity => {
                "a rank that rejoins uses the identity that it had: set the option identity"
            }
            Self::UnsetIdentityVariable => {
                "unset the variable; the option identity says where to keep the identity that the token obtains"
            }
            Self::IdentityFileOrToken => {
                "to use the file, remove the token and set rank, world and coordinator; to keep another identity, name another file"
            }
            Self::RenewIdentity => "issue a new one",
            Self::Text(text) => text,
        })
    }
}
