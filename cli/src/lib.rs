//! The `kyklos` program: [`main`] is all of it. The library is no interface for other programs.
//!
//! Exit codes: 0 done, 1 the run failed (a device or driver that is not there among it) or `doctor` found something,
//! 2 the request is wrong.
//! A wrong request is one line on standard error.
#![forbid(unsafe_code)]

#[cfg(target_endian = "big")]
compile_error!("tensor files are little-endian, and so must be the machine");

mod against;
mod alone;
mod args;
mod attend;
mod bench;
mod certs;
#[doc(hidden)]
pub mod decoders;
mod demo;
mod device;
mod devices;
mod doctor;
mod driver;
mod explain;
mod failure;
mod group;
mod input;
mod interrupt;
mod launch;
mod launch_words;
mod median;
mod metrics;
mod network;
mod on_loss;
mod output;
mod pairs;
mod plan;
mod positioned;
mod probe;
mod progress;
mod rank;
mod record;
mod report;
mod request;
mod resident;
mod support;
mod switches;
mod timed;
mod trace;
mod tune;
mod tuned;
mod verify;

use std::process::ExitCode;

use args::Command;
use failure::{Failure, note, print};

/// Runs the program with the arguments of this process.
pub fn main() -> ExitCode {
    driver::give_a_runtime_folder();
    let cli = match args::parse(std::env::args_os()) {
        Ok(cli) => cli,
        Err(help) if !help.use_stderr() => {
            return end(print(&help.render().to_string()));
        }
        Err(error) => {
            return end(Err(Failure { exit: 2, ..Failure::run(args::one_line(&error)) }));
        }
    };
    // Whatever the command: a switch that is set wrongly is refused.
    if let Err(failure) = switches::check() {
        return end(Err(failure));
    }
    end(match cli.command {
        None => demo::demo(),
        Some(Command::Devices(args)) => devices::devices(&args),
        Some(Command::Attend(args)) => attend::attend(&args),
        Some(Command::Plan(args)) => plan::plan(&args),
        Some(Command::Bench(args)) => bench::bench(&args),
        Some(Command::Tune(args)) => tune::tune(&args),
        Some(Command::Certs(args)) => certs::certs(&args),
        Some(Command::Support(args)) => support::support(&args),
        Some(Command::Doctor(args)) => {
            return doctor::doctor(&args).map_or_else(|failure| end(Err(failure)), ExitCode::from);
        }
        Some(Command::Launch(args)) => {
            return launch::launch(&args).map_or_else(|failure| end(Err(failure)), ExitCode::from);
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
