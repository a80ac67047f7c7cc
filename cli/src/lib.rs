//! The `kyklos` program. This library is not an interface for other programs; tests reach the
//! decoders through it.
//!
//! Exit codes: 0 success; 1 the run failed, or `doctor` found a problem; 2 nothing has run, because
//! the request is wrong or names what is not there. A refusal is one line on standard error. With
//! `--json` an error is one JSON object on standard output too. `docs/errors.md` has the table.
//!
//! # Modules, from the bottom up
//!
//! A module uses only modules above it in this list (`cargo run -p xtask -- layers` checks it).
//!
//! | module | holds |
//! |---|---|
//! | `activity` | the line on a terminal that says what this process does |
//! | `hints`, `failure`, `interrupt`, `cores`, `switches`, `median`, `messages`, `new_file` | hints of errors, errors and printing, signals, core dumps without keys, environment switches, small messages between ranks, files that get their names when complete |
//! | `devices` | names of devices, the table of backends, tuned choices |
//! | `options` | values of options, and options that several commands share |
//! | `tensors` | input and output files |
//! | `request` | from options to a problem on a mesh |
//! | `run` | proved plans, and runs on ranks of this process |
//! | `verify` | comparison with the f64 oracle |
//! | `observe` | progress, timelines, metrics, records and their diagnosis |
//! | `network`, `group` | how this process joins its group: its options |
//! | `job` | one attention call over all ranks of a group |
//! | `commands` | one module for each command, with its options |
//! | `support` | tests only: the table of combinations, and `docs/support.md` |
#![forbid(unsafe_code)]

#[cfg(target_endian = "big")]
compile_error!("tensor files are little-endian, and so must be the machine");

mod activity;
mod commands;
mod cores;
#[doc(hidden)]
pub mod decoders;
mod devices;
mod failure;
mod group;
mod hints;
mod interrupt;
mod job;
mod median;
mod messages;
mod network;
mod new_file;
mod observe;
mod options;
mod request;
mod run;
#[cfg(test)]
mod support;
mod switches;
mod tensors;
mod verify;

use std::process::ExitCode;

use clap::error::ErrorKind;
use commands::Cli;
#[doc(hidden)]
pub use failure::printed;
use failure::{Failure, note, print_help};

/// Runs the program with the arguments of this process.
pub fn main() -> ExitCode {
    let exit = run_command();
    activity::ends();
    interrupt::tell_launcher();
    exit
}

fn run_command() -> ExitCode {
    devices::driver::give_a_runtime_folder();
    devices::driver::leave_out_caught_panics();
    cores::leave_memory_out();
    // Also where the parser refuses the command line.
    let words: Vec<String> = std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
    if words.iter().any(|word| word == "--json") {
        failure::answer_in_json();
        failure::answers_for_group(answers_before_joining(&words));
    }
    let cli = match Cli::read() {
        Ok(cli) => cli,
        Err(help) if !help.use_stderr() => return end(print_help(&help).map(|()| 0)),
        Err(help) if help.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            return end(print_help(&help).map(|()| 2));
        }
        Err(error) => return end(Err(Failure::refused(options::one_line(&error)))),
    };
    // A switch with a wrong value is refused by every command.
    if let Err(failure) = switches::check() {
        return end(Err(failure));
    }
    end(cli.command.run())
}

/// Whether this process is rank 0 as far as the command line and a launcher say, or alone.
fn answers_before_joining(words: &[String]) -> bool {
    let value = |option: &str| {
        words.iter().enumerate().find_map(|(at, word)| match word.strip_prefix(option)? {
            "" => Some(words.get(at + 1).map_or("", String::as_str)),
            value => value.strip_prefix('='),
        })
    };
    let is_rank = words.get(1).is_some_and(|command| command == "attend") && value("--ranks").is_none();
    // Who has an invitation is rank 0, who has a token another rank.
    let answers =
        || match value("--rank").map_or_else(kyklos_launch::rank_in_environment, |rank| rank.parse().ok()) {
            _ if value("--invite").is_some() => true,
            Some(rank) => rank == 0,
            None => value("--join").is_none() && std::env::var_os(kyklos_launch::variables::JOIN).is_none(),
        };
    !is_rank || answers()
}

fn end(result: failure::Result<u8>) -> ExitCode {
    interrupt::leave_the_end_to_an_interruption();
    match result {
        Ok(exit) => ExitCode::from(exit),
        Err(failure) => {
            let text = match failure.exit {
                2 => failure.text.split_whitespace().collect::<Vec<_>>().join(" "),
                _ => failure.text,
            };
            note(&format!("error: {text}"));
            failure::answer_with_error(&text, failure.exit);
            ExitCode::from(failure.exit)
        }
    }
}
