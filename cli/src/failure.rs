//! Failures of the program, and what it prints.

use std::fmt;
use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use kyklos::{Error, PlanError};
use kyklos_transport::{RefusalReason, TransportError, harmless};

use crate::{activity, hints};

/// An error message for standard error, and the exit code.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) exit: u8,
    pub(crate) text: String,
    /// Another rank is, or may be, the cause.
    pub(crate) of_group: bool,
    /// The device of this rank has failed.
    pub(crate) of_device: bool,
    /// This machine does not have what the request names: a device, a file.
    pub(crate) of_place: bool,
}

/// The result type of this program.
pub(crate) type Result<T, E = Failure> = std::result::Result<T, E>;

impl Failure {
    /// The run failed.
    pub(crate) fn run(text: impl Into<String>) -> Self {
        Self { exit: 1, text: text.into(), of_group: false, of_device: false, of_place: false }
    }

    /// The request is wrong: the mismatch, and a request that would work.
    pub(crate) fn request(mismatch: impl fmt::Display, remedy: impl fmt::Display) -> Self {
        Self::refused(format!("{mismatch}: {remedy}"))
    }

    /// This process refuses, before anything runs: the same command fails again.
    pub(crate) fn refused(text: impl Into<String>) -> Self {
        Self { exit: 2, ..Self::run(text) }
    }

    /// The same, where only this machine does not have what the request names.
    pub(crate) fn refused_here(text: impl Into<String>) -> Self {
        Self::run(text).into_refusal()
    }

    /// This failure as a refusal: nothing has run, and this machine does not have what the request
    /// names.
    pub(crate) fn into_refusal(self) -> Self {
        Self { exit: 2, of_place: true, ..self }
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
        let text = hints::of_call(&error);
        // An error of the group quotes other ranks. It has one line.
        Self {
            exit,
            text: if of_group { harmless(&text) } else { text },
            of_group,
            of_device,
            of_place: false,
        }
    }
}

impl From<PlanError> for Failure {
    fn from(error: PlanError) -> Self {
        Error::from(error).into()
    }
}

/// 2 where the request is wrong, here or on the rank that refused; 1 where a run failed.
fn exit_code(error: &Error) -> u8 {
    let is_wrong = match error {
        Error::Request { .. } => true,
        Error::Transport(TransportError::Refused { reason, .. })
        | Error::Group { source: TransportError::Refused { reason, .. }, .. } => {
            *reason == RefusalReason::WrongRequest
        }
        _ => false,
    };
    if is_wrong { 2 } else { 1 }
}

impl From<TransportError> for Failure {
    fn from(error: TransportError) -> Self {
        Error::from(error).into()
    }
}

impl From<kyklos_launch::Error> for Failure {
    fn from(error: kyklos_launch::Error) -> Self {
        let text = hints::of_launch(&error);
        match error {
            // No rank has tried anything yet.
            error if error.is_refusal() => Self::refused(text),
            kyklos_launch::Error::Transport(error) => error.into(),
            _ => Self::run(text),
        }
    }
}

/// What this program prints for an error of a group.
pub fn printed(error: TransportError) -> String {
    Failure::from(error).text
}

/// From now on an error is one JSON object on standard output too: the command line has `--json`.
pub(crate) fn answer_in_json() {
    IN_JSON.store(true, Ordering::Relaxed);
}

/// Whether this process is the one of its group that prints the result, and the error in its place.
/// Until a process knows its group, it is rank 0 or has no rank.
pub(crate) fn answers_for_group(yes: bool) {
    ANSWERS.store(yes, Ordering::Relaxed);
}

/// Something is on standard output, so that no error may follow it there.
pub(crate) fn has_answered() {
    ANSWERED.store(true, Ordering::Relaxed);
}

/// Tells the error of a run that has printed nothing to programs that read JSON.
pub(crate) fn answer_with_error(text: &str, exit_code: u8) {
    let [in_json, answers, answered] = [&IN_JSON, &ANSWERS, &ANSWERED].map(|it| it.load(Ordering::Relaxed));
    if in_json && answers && !answered {
        // If it cannot be written, standard error has it.
        let _ = print_json(&serde_json::json!({ "error": text, "exit_code": exit_code }));
    }
}

static IN_JSON: AtomicBool = AtomicBool::new(false);
static ANSWERS: AtomicBool = AtomicBool::new(true);
static ANSWERED: AtomicBool = AtomicBool::new(false);

/// Prints the parser's help or version, in bold where standard output is a terminal and NO_COLOR is
/// not set.
pub(crate) fn print_help(help: &clap::Error) -> Result<()> {
    written(help.print())
}

/// Writes to standard output. A closed reader is no failure.
pub(crate) fn print(text: &str) -> Result<()> {
    has_answered();
    activity::aside(|| {
        let mut stdout = io::stdout().lock();
        written(stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()))
    })
}

/// Prints an object as JSON, without a copy of the text in memory: it may be large.
pub(crate) fn print_json(value: &impl serde::Serialize) -> Result<()> {
    has_answered();
    activity::aside(|| {
        let mut stdout = io::BufWriter::new(io::stdout().lock());
        let json = serde_json::to_writer_pretty(&mut stdout, value).map_err(io::Error::from);
        written(json.and_then(|()| stdout.write_all(b"\n")).and_then(|()| stdout.flush()))
    })
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
    let line = line.split('\n').map(harmless).collect::<Vec<_>>().join("\n");
    let _ = activity::aside(|| io::stderr().lock().write_all(format!("{line}\n").as_bytes()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_the_group_is_one_line() {
        let text = "rank 1: gone\nerror: all is well\u{1b}[2J".to_owned();
        let reason = RefusalReason::Failed;
        let failure =
            Failure::from(TransportError::Refused { rank: kyklos_transport::Rank(1), reason, text });
        assert!(failure.of_group && !failure.text.contains(['\n', '\u{1b}']), "{failure:?}");
    }
}
