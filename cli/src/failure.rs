//! Failures of the program, and what it prints.

use std::fmt;
use std::io::{self, Write};
use std::path::Path;

use kyklos::{Error, Remedy};
use kyklos_transport::{Remedy as TransportRemedy, TransportError, harmless};

/// An error message for standard error, and the exit code.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) exit: u8,
    pub(crate) text: String,
    /// Another rank is, or may be, the cause.
    pub(crate) of_group: bool,
    /// The device of this rank has failed.
    pub(crate) of_device: bool,
}

/// The result type of this program.
pub(crate) type Result<T, E = Failure> = std::result::Result<T, E>;

impl Failure {
    /// The run failed.
    pub(crate) fn run(text: impl Into<String>) -> Self {
        Self { exit: 1, text: text.into(), of_group: false, of_device: false }
    }

    /// The request is wrong: the mismatch, and a request that would work.
    pub(crate) fn request(mismatch: impl fmt::Display, remedy: impl fmt::Display) -> Self {
        Self { exit: 2, text: format!("{mismatch}: {remedy}"), of_group: false, of_device: false }
    }

    /// The file `path` cannot be opened, read or written.
    pub(crate) fn file(what: &str, path: &Path, error: &io::Error) -> Self {
        Self::run(format!("cannot {what} {}: {error}", path.display()))
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let of_group = matches!(error, Error::Group { .. } | Error::Transport(_));
        let of_device = matches!(error, Error::Device { .. });
        let exit = exit_code(&error);
        let text = in_options(error).to_string();
        // An error of the group quotes other ranks. It has one line.
        Self { exit, text: if of_group { harmless(&text) } else { text }, of_group, of_device }
    }
}

/// 2 where the request is wrong, here or on the rank that refused; 1 where a run failed.
fn exit_code(error: &Error) -> u8 {
    match error {
        Error::Request { .. } => 2,
        Error::Transport(TransportError::Refused { reason, .. })
        | Error::Group { source: TransportError::Refused { reason, .. }, .. } => reason.code(),
        _ => 1,
    }
}

/// The same error, with its remedy in the options of this program instead of the library's terms.
pub(crate) fn in_options(error: Error) -> Error {
    match error {
        Error::Request { mismatch, remedy } => Error::Request { mismatch, remedy: option_for(remedy) },
        other => other,
    }
}

/// What a user of this program gives to follow `remedy`.
fn option_for(remedy: Remedy) -> Remedy {
    let text = match remedy {
        Remedy::UseMesh { ulysses, ring } => format!("use --mesh {ulysses}x{ring}, or a ring"),
        Remedy::UseTokens(counts) => {
            let counts: Vec<String> = counts.iter().map(u32::to_string).collect();
            format!("use --tokens {}", counts.join(","))
        }
        Remedy::CompleteTokensOrUseWeights => {
            "give counts that add up to the sequence length, or weights with --split".to_owned()
        }
        Remedy::CountEachSideOrUseWeights => {
            "use --q-tokens and --kv-tokens, or weights (--split), where the two lengths differ".to_owned()
        }
        Remedy::CompleteQueryCounts { total } => format!("give --q-tokens that add up to {total}"),
        Remedy::CompleteKeyCounts { total } => {
            format!("give --kv-tokens that add up to {total}; replicated keys are not counted")
        }
        Remedy::DescribeDtypeOrUseAnother { device } => {
            format!("add a [[device.{device}.attention]] of that dtype, or use another --dtype")
        }
        other => return other,
    };
    Remedy::Text(text)
}

impl From<TransportError> for Failure {
    fn from(error: TransportError) -> Self {
        Error::from(error).into()
    }
}

/// Writes to standard output. A closed reader is no failure.
pub(crate) fn print(text: &str) -> Result<()> {
    let mut stdout = io::stdout().lock();
    written(stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()))
}

/// Prints an object as JSON, without a copy of the text in memory: it may be large.
pub(crate) fn print_json(value: &impl serde::Serialize) -> Result<()> {
    let mut stdout = io::BufWriter::new(io::stdout().lock());
    let json = serde_json::to_writer_pretty(&mut stdout, value).map_err(io::Error::from);
    written(json.and_then(|()| stdout.write_all(b"\n")).and_then(|()| stdout.flush()))
}

fn written(written: io::Result<()>) -> Result<()> {
    match written {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(Failure::run(format!("cannot write to standard output: {error}")))
        }
        _ => Ok(()),
    }
}

/// Writes one line to standard error; errors of writing are ignored.
pub(crate) fn note(line: &str) {
    // One call, so that lines of several ranks do not mix.
    let line = with_commands(line).split('\n').map(harmless).collect::<Vec<_>>().join("\n");
    let _ = io::stderr().lock().write_all(format!("{line}\n").as_bytes());
}

/// A text in which each remedy of the transport, also one that a peer has sent, names the command or option of this
/// program.
pub fn with_commands(text: &str) -> String {
    TransportRemedy::ALL.iter().fold(text.to_owned(), |text, remedy| match command(*remedy) {
        Some(command) => text.replace(remedy.words(), command),
        None => text,
    })
}

/// A remedy as this program offers it.
fn command(remedy: TransportRemedy) -> Option<&'static str> {
    Some(match remedy {
        TransportRemedy::IssueCertificate => "issue a new one with kyklos certs issue",
        TransportRemedy::TrustBothAuthorities => {
            "issue all identities from one, or let them trust both (kyklos certs issue --also-trust)"
        }
        TransportRemedy::MakeAuthority => "make one with kyklos certs init",
        TransportRemedy::MakeInvitation => "make a new one with kyklos certs invite",
        TransportRemedy::CopyWholeToken => "copy the line that kyklos certs invite printed",
        TransportRemedy::StartWithInvitation => "start rank 0 with --invite",
        TransportRemedy::KeepIdentity => "start that rank again with the identity that it got (--identity)",
        TransportRemedy::WriteKeyHash => {
            "write the hash of a key: the 64 hexadecimal digits that kyklos certs show prints and that the list of the authority has"
        }
        // A remedy that is newer than this program.
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_remedy_of_the_library_names_the_option_of_this_program() {
        for (remedy, option) in [
            (Remedy::UseMesh { ulysses: 2, ring: 3 }, "--mesh 2x3"),
            (Remedy::UseTokens(vec![512, 256]), "--tokens 512,256"),
            (Remedy::CompleteTokensOrUseWeights, "--split"),
            (Remedy::CountEachSideOrUseWeights, "--q-tokens and --kv-tokens, or weights (--split)"),
            (Remedy::CompleteQueryCounts { total: 9 }, "--q-tokens that add up to 9"),
            (Remedy::CompleteKeyCounts { total: 9 }, "--kv-tokens that add up to 9"),
            (Remedy::DescribeDtypeOrUseAnother { device: "gpu".to_owned() }, "--dtype"),
        ] {
            let failure = Failure::from(Error::request("it does not fit", remedy));
            assert_eq!(failure.exit, 2);
            assert!(failure.text.contains(option), "{}", failure.text);
        }
    }

    #[test]
    fn every_remedy_names_a_command_or_an_option_of_the_program() {
        for remedy in TransportRemedy::ALL {
            let said = with_commands(&format!("rank 0 refused this rank: {remedy}; rank 2 did not come"));
            assert!(said.contains("kyklos certs") || said.contains(" --") || said.contains("(--"), "{said}");
            assert!(said.starts_with("rank 0 refused") && said.ends_with("rank 2 did not come"), "{said}");
        }
    }

    #[test]
    fn an_error_of_the_group_is_one_line() {
        let text = "rank 1: gone\nerror: all is well\u{1b}[2J".to_owned();
        let reason = kyklos_transport::RefusalReason::Failed;
        let failure =
            Failure::from(TransportError::Refused { rank: kyklos_transport::Rank(1), reason, text });
        assert!(failure.of_group && !failure.text.contains(['\n', '\u{1b}']), "{failure:?}");
    }
}
