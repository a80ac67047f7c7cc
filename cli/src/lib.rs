//! The `kyklos` program: [`main`] is all of it. The library is no interface for other programs.
//!
//! Exit codes: 0 done, 1 the run failed (a device or driver that is not there among it) or `doctor` found something,
//! 2 the request is wrong.
//! A wrong request is one line on standard error.
#![forbid(unsafe_code)]

#[cfg(target_endian = "big")]
compile_error!("tensor files are little-endian, and so must be the machine");

mod commands;
#[doc(hidden)]
pub mod decoders;
mod demo;
mod devices;
mod failure;
mod group;
mod interrupt;
mod job;
mod launch_words;
mod median;
mod messages;
mod network;
mod observe;
mod options;
mod request;
mod run;
mod switches;
mod tensors;
mod verify;

use std::process::ExitCode;

use clap::Parser;
use commands::Cli;
use failure::{Failure, note, print};

/// Runs the program with the arguments of this process.
pub fn main() -> ExitCode {
    devices::driver::give_a_runtime_folder();
    let cli = match Cli::try_parse_from(std::env::args_os()) {
        Ok(cli) => cli,
        Err(help) if !help.use_stderr() => {
            return end(print(&help.render().to_string()).map(|()| 0));
        }
        Err(error) => {
            return end(Err(Failure { exit: 2, ..Failure::run(options::one_line(&error)) }));
        }
    };
    // A switch with a wrong value is refused by every command.
    if let Err(failure) = switches::check() {
        return end(Err(failure));
    }
    end(cli.command.map_or_else(|| demo::demo().map(|()| 0), |command| command.run()))
}

fn end(result: failure::Result<u8>) -> ExitCode {
    match result {
        Ok(exit) => ExitCode::from(exit),
        Err(failure) => {
            let text = match failure.exit {
                2 => failure.text.split_whitespace().collect::<Vec<_>>().join(" "),
                _ => failure.text,
            };
            note(&format!("error: {text}"));
            ExitCode::from(failure.exit)
        }
    }
}
