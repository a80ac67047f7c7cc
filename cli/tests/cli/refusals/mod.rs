//! Refusals as transcripts: every command or call, and the message that it really gives, in
//! `snapshots/`, one file for each concept. A message that changes fails its test;
//! `INSTA_UPDATE=always` accepts it. Linux only, because some messages quote the operating system.

mod backward;
mod bias;
mod caches;
mod descriptions;
mod devices;
mod files;
mod groups;
mod launchers;
mod made;
mod masks;
mod problem;
mod sessions;
mod sharing;

use std::fmt::Display;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

use kyklos::backend::Device;
use kyklos::local::on_threads;
use kyklos::{AttentionProblem, Dtype, Error, Mask, Session, Tensor};
use kyklos_transport::in_process_group;
use tempfile::TempDir;

use crate::free_address::free_address;
use crate::support::*;

/// What the program says to each command line.
fn of_program(commands: &[&str]) -> String {
    let place = Place::new();
    commands.iter().map(|line| place.says(line)).collect()
}

/// Where command lines run: `DIR` in them is a folder with the files of `made.rs`, `PORT` a port
/// that nobody has.
pub(crate) struct Place {
    folder: TempDir,
    port: u16,
}

impl Place {
    pub(crate) fn new() -> Self {
        let place = Self { folder: tempfile::tempdir().unwrap(), port: free_address().port() };
        made::make(place.folder.path());
        place
    }

    /// The process of a command line. Words with `=` before its command are environment variables.
    pub(crate) fn start(&self, line: &str) -> Child {
        let line = in_full(line).replace(":PORT", &format!(":{}", self.port)).replace("DIR", &self.path());
        let (variables, arguments) = in_parts(&line);
        let mut command = command(&arguments);
        command.env("KYKLOS_SETTINGS_DIR", self.folder.path().join("settings"));
        command.envs(variables.iter().filter_map(|word| word.split_once('='))).current_dir(&self.folder);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    pub(crate) fn path(&self) -> String {
        self.folder.path().to_str().unwrap().to_owned()
    }

    /// A command line and its one message, without what differs between machines and runs.
    fn says(&self, line: &str) -> String {
        let output = finish(self.start(line), Duration::from_secs(120));
        let text = stderr(&output);
        assert_eq!(stdout(&output), "", "{line}: {text}");
        // An error is one line, and nothing follows it.
        let message = text.lines().last().unwrap_or_default();
        assert!(message.starts_with("error: ") && text.matches("error: ").count() == 1, "{line}: {text}");
        let mut message = message
            .replace(&self.path(), "DIR")
            .replace(&format!("127.0.0.1:{}", self.port), "127.0.0.1:PORT");
        for (before, after) in
            [("this machine has ", ": "), ("(the clock here says ", ")"), (" trusts ", ": ")]
        {
            message = without(&message, before, after);
        }
        // A refusal has exit code 2.
        let code = match output.status.code() {
            Some(2) => String::new(),
            code => format!("exit code {}\n", code.unwrap()),
        };
        let line = in_full(line);
        let (variables, arguments) = in_parts(&line);
        format!("$ {}\n{message}\n{code}\n", [variables, vec!["kyklos"], arguments].concat().join(" "))
    }
}

/// The command line with what its words in capitals stand for.
fn in_full(line: &str) -> String {
    line.replace("ATTEND", "attend --shape 1,64,8,2,64")
        .replace("EXPLAIN", "plan --explain --shape 1,64,8,2,64 --ranks 2 --hardware")
}

/// The variables of a command line, and its arguments.
fn in_parts(line: &str) -> (Vec<&str>, Vec<&str>) {
    let words: Vec<&str> = line.split(' ').collect();
    let (variables, arguments) = words.split_at(words.iter().take_while(|word| word.contains('=')).count());
    (variables.to_vec(), arguments.to_vec())
}

/// `text` with `…` between `before` and `after`.
fn without(text: &str, before: &str, after: &str) -> String {
    let cut = || {
        let (head, rest) = text.split_once(before)?;
        Some(format!("{head}{before}…{}", &rest[rest.find(after)?..]))
    };
    cut().unwrap_or_else(|| text.to_owned())
}

/// What the library says to each call.
fn of_calls<E: Display>(calls: impl IntoIterator<Item = (&'static str, E)>) -> String {
    calls.into_iter().map(|(call, error)| format!("> {call}\n{error}\n\n")).collect()
}

/// 8 tokens, 2 query heads, one KV head of 8.
fn problem() -> AttentionProblem {
    AttentionProblem::new([1, 8, 2, 1, 8], Dtype::F32, Mask::full()).unwrap()
}

/// Zeros, with heads of 8.
fn tensor(tokens: usize, heads: usize) -> Tensor {
    Tensor::new([1, tokens, heads, 8], vec![0.0_f32; tokens * heads * 8]).unwrap()
}

/// The session of a group of one rank.
fn alone() -> Session {
    Session::new(in_process_group(1).remove(0), Device::cpu())
}

/// The error of rank 0 of two; `run` gets the session of a rank, and whether it is rank 1.
fn of_two(run: impl Fn(&mut Session, bool) -> Error + Sync) -> Error {
    let errors = on_threads(in_process_group(2), |transport| {
        let odd = transport.rank().0 == 1;
        run(&mut Session::new(transport, Device::cpu()), odd)
    });
    errors.into_iter().next().unwrap()
}

/// Every message that `docs/errors.md` quotes is in a transcript; `…` stands for any text. A test
/// of the Python package looks for those that only Python has.
#[test]
fn the_page_of_errors_quotes_what_is_said() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let snapshots = std::fs::read_dir(root.join("tests/cli/refusals/snapshots")).unwrap();
    let snapshots = snapshots.map(|entry| entry.unwrap().path());
    let snapshots = snapshots.filter(|path| path.extension().is_some_and(|extension| extension == "snap"));
    let said: String = snapshots.map(|path| std::fs::read_to_string(path).unwrap()).collect();
    let page = std::fs::read_to_string(root.join("../docs/errors.md")).unwrap();
    let quoted = page.lines().filter_map(|line| line.strip_prefix("- `")?.strip_suffix("`<br>"));
    let quoted: Vec<&str> = quoted.map(|text| text.trim_matches(['`', ' '])).collect();
    assert!(quoted.len() >= 20, "{quoted:#?}");
    for message in quoted.into_iter().filter(|message| !message.starts_with("RequestError: ")) {
        let says = |line: &str| {
            let mut rest = Some(line);
            message.split('…').for_each(|part| rest = rest.and_then(|rest| Some(rest.split_once(part)?.1)));
            rest.is_some()
        };
        assert!(said.lines().any(says), "no transcript has: {message}");
    }
}
