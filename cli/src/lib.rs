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
mod entrance;
mod failure;
mod group;
mod interrupt;
mod job;
mod launchers;
mod median;
mod network;
mod observe;
mod options;
mod request;
mod run;
mod switches;
mod tensors;
mod verify;

use std::process::ExitCode;

use commands::Command;
use failure::{Failure, note, print};

/// Runs the program with the arguments of this process.
pub fn main() -> ExitCode {
    devices::driver::give_a_runtime_folder();
    let cli = match commands::parse(std::env::args_os()) {
        Ok(cli) => cli,
        Err(help) if !help.use_stderr() => {
            return end(print(&help.render().to_string()));
        }
        Err(error) => {
            return end(Err(Failure { exit: 2, ..Failure::run(commands::one_line(&error)) }));
        }
    };
    // Whatever the command: a switch that is set wrongly is refused.
    if let Err(failure) = switches::check() {
        return end(Err(failure));
    }
    end(match cli.command {
        None => demo::demo(),
        Some(Command::Devices(args)) => commands::devices::devices(&args),
        Some(Command::Attend(args)) => commands::attend::attend(&args),
        Some(Command::Plan(args)) => commands::plan::plan(&args),
        Some(Command::Bench(args)) => commands::bench::bench(&args),
        Some(Command::Tune(args)) => commands::tune::tune(&args),
        Some(Command::Certs(args)) => commands::certs::certs(&args),
        Some(Command::Support(args)) => commands::support::support(&args),
        Some(Command::Doctor(args)) => {
            return observe::doctor::doctor(&args).map_or_else(|failure| end(Err(failure)), ExitCode::from);
        }
        Some(Command::Launch(args)) => {
            return commands::launch::launch(&args).map_or_else(|failure| end(Err(failure)), ExitCode::from);
        }
    })
}

fn end(result: failure::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
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
