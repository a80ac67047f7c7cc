//! How the program words the errors and notes of `kyklos-launch`: options by their flags, remedies by what to write on
//! the command line.

use std::fmt::Display;

use kyklos_launch::{Error, OptionName, Remedy, Wording};

use crate::failure::Failure;

/// Options by their flags.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Flags;

impl Wording for Flags {
    fn option(&self, option: OptionName, value: Option<&dyn Display>) -> String {
        let flag = match option {
            OptionName::Rank => "--rank",
            OptionName::World => "--world",
            OptionName::Coordinator => "--coordinator",
            OptionName::ClusterFile => "--cluster",
            OptionName::Identity => "--identity",
            OptionName::Invitation => "--invite",
            OptionName::Token => "--join",
            OptionName::Revoked => "--revoked",
            OptionName::Job => kyklos_launch::variables::JOB_ID,
            OptionName::Rejoin => "--rejoin",
            OptionName::Bind => "--bind",
            OptionName::Port => "--port",
            OptionName::Advertise => "--advertise",
        };
        value.map_or_else(|| flag.to_owned(), |value| format!("{flag} {value}"))
    }

    fn remedy(&self, remedy: &Remedy) -> String {
        let text = match remedy {
            Remedy::SetWorld => {
                "add --world N or KYKLOS_WORLD; --ranks N instead puts all ranks into this process"
            }
            Remedy::SetRank => "add --rank R, or start the processes with a launcher",
            Remedy::SetCoordinator => {
                "set MASTER_ADDR and MASTER_PORT or KYKLOS_COORDINATOR, or add --coordinator HOST:PORT"
            }
            Remedy::SyntaxOrCoordinator { example } => {
                return format!(
                    "it is written like {example}; name rank 0 with --coordinator HOST:PORT instead"
                );
            }
            Remedy::RemoveOneSetting => {
                "leave one of them out, or unset it; --ranks N puts all ranks into this process"
            }
            Remedy::RemoveUnderKyklosLaunch => {
                "leave it out: kyklos launch says who is which rank, and where"
            }
            Remedy::ObtainIdentity => {
                "make identities with kyklos certs init and kyklos certs issue, or a token with kyklos certs invite"
            }
            Remedy::RejoinWithIdentity => "to rejoin, use the identity of the lost rank: --identity FILE",
            Remedy::UnsetIdentityVariable => {
                "unset the variable; --identity FILE says where to store the new identity"
            }
            Remedy::IdentityFileOrToken => {
                "to use this file, drop the token and give --rank, --world and --coordinator; to get a new identity, name another file"
            }
            Remedy::RenewIdentity => "issue a new one with kyklos certs issue",
            Remedy::Text(text) => text,
        };
        text.to_owned()
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        // The transport's words, as for its other errors; but no rank has tried anything yet.
        let request = |text: String| Self { exit: 2, ..Self::run(text) };
        match error {
            Error::Request { mismatch, remedy } => Self::request(mismatch, Flags.remedy(&remedy)),
            Error::Token { origin, source } => request(format!("{origin}: {}", Self::from(source).text)),
            Error::Link(source) => request(Self::from(source).text),
            Error::Transport(error) => error.into(),
            Error::Device { .. } => request(error.to_string()),
            Error::ClusterFile { .. } => Self::run(error.to_string()),
        }
    }
}

/// A cluster file may list as many ranks as can be planned for.
const _: () = assert!(kyklos_launch::MAX_WORLD == kyklos::MAX_WORLD, "the two limits are one");
