//! How this process proves that it belongs to the group: by an identity file, as rank 0 with an
//! invitation, or with a token.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use kyklos_transport::quic::{Date, EnrolConfig, Enrolled, Identity, Invitation, Token, enrol};
use kyklos_transport::{BootstrapKind, Rank};

use crate::address::{HostPort, left, resolve};
use crate::error::{Error, RequestKind, Result};
use crate::options::{Options, RANK, named};
use crate::source::Source;
use crate::sources::requested_rank;
use crate::token::{of_enrolment, of_invitation};
use crate::variables::{IDENTITY, JOIN, Variables};

/// The proof that this process belongs to its group.
#[derive(Clone, Debug)]
pub(crate) enum Credentials {
    /// An identity file, which is read when the rank is known; a group of one needs none.
    IdentityFile,
    /// An identity in memory.
    Given(Box<Identity>),
    /// Rank 0's invitation, and its path.
    Invitation(Arc<Invitation>, PathBuf),
    /// The grant of rank 0 for a token, and rank 0's address.
    Enrolled(Enrolled, HostPort),
}

impl Credentials {
    /// Reads the invitation, if there is one. With a token this asks rank 0 for an identity, and
    /// blocks until it answers.
    pub(crate) fn obtain(options: &Options, variables: &Variables<'_>) -> Result<Self> {
        let variable = variables.text(JOIN).filter(|_| !variables.under_kyklos_launch());
        let token = match (&options.token, variable) {
            (Some(token), _) => Some((token.0.clone(), "option token".to_owned())),
            (None, variable) => variable.map(|token| (token.value, JOIN.to_owned())),
        };
        let identity_variable = variables.text(IDENTITY).map(|path| path.origin);
        match (&options.invitation, token) {
            (None, None) => Ok(Self::IdentityFile),
            (Some(path), Some((_, origin))) => Err(Error::request(
                format!("invitation {} with {origin}", path.display()),
                "rank 0 invites and the others join, so leave one of the two out",
            )
            .of(RequestKind::TwoProofs)),
            (Some(path), None) => {
                let option = options.identity.as_ref().map(|path| named("identity", path.display()));
                match option.or(identity_variable) {
                    Some(identity) => Err(Error::request(
                        format!("invitation {} with {identity}", path.display()),
                        "the invitation holds the identity of rank 0, so leave the other one out",
                    )
                    .of(RequestKind::TwoProofs)),
                    None => {
                        let invitation = Invitation::read_file(path).map_err(Error::Credentials)?;
                        Ok(Self::Invitation(Arc::new(invitation), path.clone()))
                    }
                }
            }
            (None, Some((_, origin))) if options.rejoin => Err(Error::request(
                format!("option rejoin with {origin}"),
                "a rank that rejoins uses the identity that it had: set the option identity",
            )
            .of(RequestKind::Rejoin)),
            (None, Some((token, origin))) => match identity_variable.filter(|_| options.identity.is_none()) {
                Some(identity) => Err(Error::request(
                    format!("{identity} with {origin}"),
                    "unset the variable; the option identity says where to keep the identity that the token obtains",
                )
                .of(RequestKind::TwoProofs)),
                None => Self::enrol(&token, &origin, options, variables),
            },
        }
    }

    /// `origin` names the option or the variable that holds the token. No message repeats the
    /// token.
    fn enrol(text: &str, origin: &str, options: &Options, variables: &Variables<'_>) -> Result<Self> {
        let token: Token =
            text.parse().map_err(|source| Error::Token { origin: origin.to_owned(), source })?;
        let coordinator = HostPort::parse(token.place(), &format!("{origin} …@{}", token.place()))?;
        let rank = requested_rank(options, variables)?;
        if let Some(path) = options.identity.as_ref().filter(|path| path.exists()) {
            return Err(Error::request(
                format!("option identity={} with {origin}, and the file exists", path.display()),
                "to use the file, remove the token and set rank, size and coordinator; to keep another identity, name another \
                 file",
            )
            .of(RequestKind::IdentityExists));
        }
        // Before a place is spent on it.
        let folder = options
            .identity
            .as_deref()
            .and_then(Path::parent)
            .filter(|folder| !folder.as_os_str().is_empty() && !folder.to_string_lossy().contains(RANK));
        if let Some(folder) = folder.filter(|folder| !folder.is_dir()) {
            return Err(Error::request(
                format!("the identity would be written to {}, which is no folder", folder.display()),
                "make it, or name a file in another one",
            ));
        }
        let until = Instant::now() + options.join_deadline;
        let addresses = resolve(&coordinator, until, options.note)?;
        let mut config = EnrolConfig::new(token, addresses[0]);
        config.coordinator_also = addresses[1..].to_vec();
        config.bind_both_families();
        config.rank = rank.map(Rank);
        config.bind = options.bind.unwrap_or(config.bind);
        options.link.check(config.bind, 2).map_err(Error::Link)?;
        config.link = options.link;
        config.deadline = left(until);
        let enrolled = enrol(config).map_err(|error| match error.bootstrap_kind() {
            BootstrapKind::Token | BootstrapKind::GivenAway => Error::Credentials(error),
            _ => error.into(),
        })?;
        if let Some(path) = &options.identity {
            let path = PathBuf::from(path.to_string_lossy().replace(RANK, &enrolled.rank.to_string()));
            enrolled.identity.write_file(&path)?;
            let claims = enrolled.identity.claims()?;
            (options.note)(&format!("{}: {claims}, until {}", path.display(), Date(claims.validity.until)));
        }
        Ok(Self::Enrolled(enrolled, coordinator))
    }

    /// The settings of the group in these credentials.
    pub(crate) fn source(&self) -> Result<Option<Source>> {
        match self {
            Self::IdentityFile | Self::Given(_) => Ok(None),
            Self::Invitation(invitation, path) => of_invitation(invitation, path).map(Some),
            Self::Enrolled(enrolled, coordinator) => Ok(Some(of_enrolment(enrolled, coordinator))),
        }
    }
}
