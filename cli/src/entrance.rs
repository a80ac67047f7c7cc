//! How this process is let into its group: by the file of an identity, as the one who invites, or with a token.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kyklos_transport::Rank;
use kyklos_transport::quic::{Date, EnrolConfig, Enrolled, Invitation, Token, enrol};

use crate::failure::{Failure, Result, note};
use crate::group::resolve;
use crate::launchers::{self, GroupArgs, HostPort, IDENTITY, Source, Variables, enrolled, invited};
use crate::network::NetworkArgs;
use crate::options::RANK;

/// What a process has before it knows its group.
pub(crate) enum Entrance {
    /// The file of an identity, if it needs one.
    File,
    /// Rank 0, and the file that says so.
    Invites(Arc<Invitation>, PathBuf),
    /// A rank that rank 0 has let in.
    Enrolled(Enrolled, HostPort),
}

impl Entrance {
    /// As the options say. With a token this asks rank 0 for an identity, and waits for it.
    pub(crate) fn of(args: &GroupArgs, variables: &Variables<'_>, network: &NetworkArgs) -> Result<Self> {
        let variable = variables.text(JOIN).filter(|_| !launchers::by_kyklos(variables));
        let (token, words) = match (&args.join, variable) {
            (Some(text), _) => (Some(text.clone()), "--join"),
            (None, Some(said)) => (Some(said.value), JOIN),
            (None, None) => (None, ""),
        };
        let identity = variables.text(IDENTITY).map(|said| said.words);
        match (&args.invite, token) {
            (None, None) => Ok(Self::File),
            (Some(path), Some(_)) => Err(Failure::request(
                format!("--invite {} with {words}", path.display()),
                "rank 0 invites and the others join, so leave one of the two away",
            )),
            (Some(path), None) => {
                let given = args.identity.as_ref().map(|path| format!("--identity {}", path.display()));
                match given.or(identity) {
                    Some(said) => Err(Failure::request(
                        format!("--invite {} with {said}", path.display()),
                        "the invitation holds the identity of rank 0, so leave the other one away",
                    )),
                    None => Ok(Self::Invites(Arc::new(Invitation::read_file(path)?), path.clone())),
                }
            }
            (None, Some(_)) if args.rejoin => Err(Failure::request(
                format!("--rejoin with {words}"),
                "whoever joins again comes with the identity that it had: --identity FILE",
            )),
            (None, Some(token)) => match identity.filter(|_| args.identity.is_none()) {
                Some(said) => Err(Failure::request(
                    format!("{said} with {words}"),
                    "unset the variable; --identity FILE says where the identity that this rank gets is to be kept",
                )),
                None => Self::join(&token, words, args, variables, network),
            },
        }
    }

    fn join(
        text: &str,
        words: &str,
        args: &GroupArgs,
        variables: &Variables<'_>,
        network: &NetworkArgs,
    ) -> Result<Self> {
        // The request is wrong; the token itself is not repeated.
        let wrong = |error| Failure { exit: 2, ..Failure::run(format!("{words}: {error}")) };
        let token: Token = text.parse().map_err(wrong)?;
        let place = HostPort::parse(token.place(), &format!("{words} …@{}", token.place()))?;
        let asked = launchers::rank_said(args, variables)?;
        if let Some(path) = args.identity.as_ref().filter(|path| path.exists()) {
            return Err(Failure::request(
                format!("--identity {} with {words}, and the file exists", path.display()),
                "to use it leave the token away and say --rank, --world and --coordinator; to get another one name another file",
            ));
        }
        let patience = Duration::from_secs(u64::from(args.join_deadline.get()));
        let address = resolve(&place, false, Instant::now() + patience)?;
        let mut config = EnrolConfig::new(token, address);
        config.rank = asked.map(Rank);
        config.bind = args.bind.unwrap_or(config.bind);
        config.link = network.settings(config.bind, 2)?;
        config.deadline = patience;
        let got = enrol(config)?;
        if let Some(path) = &args.identity {
            let path = PathBuf::from(path.to_string_lossy().replace(RANK, &got.rank.to_string()));
            got.identity.write_file(&path)?;
            let claims = got.identity.claims()?;
            note(&format!("{}: {claims}, until {}", path.display(), Date(claims.validity.until)));
        }
        Ok(Self::Enrolled(got, place))
    }

    /// What it says of the group.
    pub(crate) fn source(&self) -> Result<Option<Source>> {
        match self {
            Self::File => Ok(None),
            Self::Invites(invitation, path) => invited(invitation, path).map(Some),
            Self::Enrolled(got, place) => Ok(Some(enrolled(got, place))),
        }
    }
}

/// The token, where processes are not to show it in their arguments.
const JOIN: &str = "KYKLOS_JOIN";
