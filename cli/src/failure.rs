//! Failures of the program, and what it prints.

use std::fmt;
use std::io::{self, Write};
use std::path::Path;

use kyklos_transport::TransportError;

/// An error message for standard error, and the exit code.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) exit: u8,
    pub(crate) text: String,
    /// Another rank is, or may be, the cause.
    pub(crate) of_group: bool,
}

/// The result type of this program.
pub(crate) type Result<T, E = Failure> = std::result::Result<T, E>;

impl Failure {
    /// The run failed.
    pub(crate) fn run(text: impl Into<String>) -> Self {
        Self { exit: 1, text: text.into(), of_group: false }
    }

    /// The request is wrong: the mismatch, and a request that would work.
    pub(crate) fn request(mismatch: impl fmt::Display, remedy: impl fmt::Display) -> Self {
        Self { exit: 2, text: format!("{mismatch}: {remedy}"), of_group: false }
    }

    /// The file `path` cannot be opened, read or written.
    pub(crate) fn file(what: &str, path: &Path, error: &io::Error) -> Self {
        Self::run(format!("cannot {what} {}: {error}", path.display()))
    }
}

impl From<kyklos::Error> for Failure {
    fn from(error: kyklos::Error) -> Self {
        Self {
            exit: error.exit_code(),
            text: error.to_string(),
            of_group: matches!(error, kyklos::Error::Group { .. } | kyklos::Error::Transport(_)),
        }
    }
}

impl From<TransportError> for Failure {
    fn from(error: TransportError) -> Self {
        kyklos::Error::from(error).into()
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
    let _ = io::stderr().lock().write_all(format!("{}\n", harmless(line)).as_bytes());
}

/// Replaces control characters: messages may quote other ranks, and must not control the terminal.
fn harmless(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_peers_cannot_control_the_terminal() {
        assert_eq!(
            harmless("rank 1: \u{1b}[2J\u{7}gone\r\u{9b}31m é\nrank 2"),
            "rank 1:  [2J gone  31m é\nrank 2"
        );
    }
}
