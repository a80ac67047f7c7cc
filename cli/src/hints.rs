//! What this program has for an error of the libraries: an option or a command. It stands behind
//! the library's own text.
//!
//! Only the kind of an error decides. A text may come from another rank, which then would choose
//! what this program says.

use std::fmt::Display;

use kyklos::{Error, PlanError, Remedy};
use kyklos_launch::RequestKind;
use kyklos_transport::{BootstrapKind, TransportError};

/// A text, and a hint behind it if there is one.
pub(crate) fn hinted(text: impl Display, hint: Option<impl Display>) -> String {
    match hint {
        Some(hint) => format!("{text}; hint: {hint}"),
        None => text.to_string(),
    }
}

/// The text of an error of a call, with its hint.
pub(crate) fn of_call(error: &Error) -> String {
    match error {
        Error::Request { remedy, .. } => hinted(error, of_remedy(remedy)),
        Error::Transport(source) | Error::Group { source, .. } => hinted(error, of_transport(source)),
        _ => error.to_string(),
    }
}

/// The text of an error of a plan, with its hint.
pub(crate) fn of_plan(error: &PlanError) -> String {
    match error {
        PlanError::Request { remedy, .. } => hinted(error, of_remedy(remedy)),
        _ => error.to_string(),
    }
}

/// The same refusal, with the hint as a part of its remedy: for the library's own tables of refused
/// plans.
pub(crate) fn in_remedy(error: PlanError) -> PlanError {
    match error {
        PlanError::Request { mismatch, remedy } => {
            let hint = of_remedy(&remedy);
            PlanError::Request { mismatch, remedy: hinted(remedy, hint).into() }
        }
        other => other,
    }
}

/// The text of an error of joining a group, with its hint.
pub(crate) fn of_launch(error: &kyklos_launch::Error) -> String {
    use kyklos_launch::Error;
    match error {
        Error::Request { kind, .. } => hinted(error, of_request(*kind)),
        Error::Token { source, .. }
        | Error::Link(source)
        | Error::Credentials(source)
        | Error::Transport(source) => hinted(error, of_transport(source)),
        _ => error.to_string(),
    }
}

fn of_remedy(remedy: &Remedy) -> Option<String> {
    Some(match remedy {
        Remedy::UseMesh { ulysses, ring } => format!("--mesh {ulysses}x{ring}"),
        Remedy::UseTokens(counts) => {
            let counts: Vec<String> = counts.iter().map(u32::to_string).collect();
            format!("--tokens {}", counts.join(","))
        }
        Remedy::CompleteTokensOrUseWeights => "--tokens takes counts, --split weights".to_owned(),
        Remedy::CountEachSideOrUseWeights => {
            "--q-tokens and --kv-tokens take counts, --split weights".to_owned()
        }
        Remedy::CompleteQueryCounts { .. } => "--q-tokens takes them".to_owned(),
        Remedy::CompleteKeyCounts { .. } => "--kv-tokens takes them".to_owned(),
        Remedy::DescribeDtypeOrUseAnother { .. } => "--dtype takes another one".to_owned(),
        _ => return None,
    })
}

fn of_transport(error: &TransportError) -> Option<&'static str> {
    of_bootstrap(error.bootstrap_kind())
}

/// The hint for a group that does not form, or for a warning of it.
pub(crate) fn of_bootstrap(kind: BootstrapKind) -> Option<&'static str> {
    Some(match kind {
        BootstrapKind::Certificate => {
            "kyklos certs issue makes new ones, and --also-trust lets them trust another authority too; kyklos certs show \
             prints what a file is"
        }
        BootstrapKind::Authority => "kyklos certs init makes one",
        BootstrapKind::Invitation => "kyklos certs invite makes one, and rank 0 takes it with --invite",
        BootstrapKind::Token => {
            "--join takes the whole line that kyklos certs invite prints; that makes a new token too"
        }
        BootstrapKind::GivenAway => "--identity FILE starts a rank with the identity that it got",
        BootstrapKind::Clock => {
            "date -u prints the clock of a host, kyklos certs show from when a file is valid"
        }
        BootstrapKind::Address => "--bind is the address of this rank, --coordinator has the port of rank 0",
        BootstrapKind::SmallMtu => "--network tcp on all ranks",
        BootstrapKind::KeyList => {
            "kyklos certs show prints the hash of a key, and the list of the authority has it"
        }
        _ => return None,
    })
}

fn of_request(kind: RequestKind) -> Option<&'static str> {
    Some(match kind {
        RequestKind::Size => "--world N; --ranks N instead puts all ranks into this process",
        RequestKind::Rank => "--rank R",
        RequestKind::Coordinator => "--coordinator HOST:PORT",
        RequestKind::Contradiction => "--ranks N puts all ranks into this process",
        RequestKind::Identity => {
            "make identities with kyklos certs init and kyklos certs issue and name one with --identity FILE, or a token with \
             kyklos certs invite and give it with --join TOKEN"
        }
        RequestKind::Rejoin => "--identity FILE",
        RequestKind::TwoProofs => {
            "rank 0 has --invite FILE alone; the others have --join TOKEN, with --identity FILE for the new identity"
        }
        RequestKind::IdentityExists => {
            "without --join, --identity FILE goes with --rank, --world and --coordinator"
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use kyklos_transport::Rank;

    use super::*;
    use crate::failure::Failure;

    #[test]
    fn a_remedy_of_the_library_gets_the_option_of_this_program() {
        for (remedy, option) in [
            (Remedy::UseMesh { ulysses: 2, ring: 3 }, "use a mesh of 2 x 3, or a ring; hint: --mesh 2x3"),
            (Remedy::UseTokens(vec![512, 256]), "use token counts 512, 256; hint: --tokens 512,256"),
            (Remedy::CompleteTokensOrUseWeights, "--split weights"),
            (Remedy::CountEachSideOrUseWeights, "--q-tokens and --kv-tokens take counts, --split weights"),
            (Remedy::CompleteQueryCounts { total: 9 }, "add up to 9; hint: --q-tokens"),
            (Remedy::CompleteKeyCounts { total: 9 }, "hint: --kv-tokens"),
            (Remedy::DescribeDtypeOrUseAnother { device: "gpu".to_owned() }, "hint: --dtype"),
        ] {
            let error = PlanError::request("it does not fit", remedy);
            let failure = Failure::from(error.clone());
            assert_eq!(failure.exit, 2);
            assert!(failure.text.starts_with("it does not fit: "), "{}", failure.text);
            assert!(failure.text.contains(option), "{}", failure.text);
            assert_eq!(in_remedy(error).to_string(), failure.text);
        }
    }

    #[test]
    fn the_hint_for_a_group_that_does_not_form_is_by_the_kind_of_the_error() {
        for kind in [
            BootstrapKind::Certificate,
            BootstrapKind::Authority,
            BootstrapKind::Invitation,
            BootstrapKind::Token,
            BootstrapKind::GivenAway,
            BootstrapKind::KeyList,
            BootstrapKind::Clock,
            BootstrapKind::Address,
            BootstrapKind::SmallMtu,
        ] {
            let error = TransportError::Bootstrap { text: "a reason".to_owned(), kind };
            let hint = of_bootstrap(kind).unwrap();
            assert!(hint.contains("kyklos certs") || hint.contains("--"), "{hint}");
            assert_eq!(Failure::from(error).text, format!("a reason; hint: {hint}"));
        }
    }

    #[test]
    fn a_text_of_a_peer_with_the_words_of_a_remedy_is_printed_unchanged() {
        let reason = kyklos_transport::RefusalReason::WrongRequest;
        for words in [
            "the certificate of rank 1 has expired: issue a new certificate",
            "make a new invitation; copy the whole token; make a new authority",
            "start that rank again with the identity that it got",
            "use a mesh of 2 x 2, or a ring",
            "set the option size or KYKLOS_WORLD",
        ] {
            let text = words.to_owned();
            let refused = TransportError::Refused { rank: Rank(1), reason, text: text.clone() };
            assert_eq!(Failure::from(refused).text, words);
            let quoted = TransportError::Bootstrap { text: text.clone(), kind: BootstrapKind::Other };
            assert_eq!(Failure::from(quoted.clone()).text, words);
            assert_eq!(Failure::from(kyklos_launch::Error::from(quoted)).text, words);
            let misbehaved = TransportError::PeerMisbehaved { peer: Rank(1), text };
            assert_eq!(Failure::from(misbehaved).text, format!("rank 1 broke the protocol: {words}"));
        }
    }
}
