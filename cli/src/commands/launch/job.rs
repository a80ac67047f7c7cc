//! The command that `kyklos launch` starts.

use crate::commands::attend::{AttendArgs, launched_request};
use crate::commands::bench::strategies::{StrategiesArgs, cells_left, check_launched};
use crate::failure::{Failure, Result, note};
use crate::group::GroupArgs;
use crate::network::NetworkArgs;
use crate::options::{OnLoss, one_line};

/// What all processes run.
#[derive(Debug)]
pub(super) enum Job {
    Attend(OnLoss),
    Strategies(Box<Cells>),
}

/// A bench, which goes on after a cell that has ended its group.
#[derive(Debug)]
pub(super) struct Cells {
    args: StrategiesArgs,
    ranks: u32,
    /// Cells that were to run when the processes started.
    left: usize,
}

impl Job {
    /// Reads the words of the command for `ranks` processes. Refuses wrong options once, before any
    /// process starts.
    pub(super) fn read(words: &[String], ranks: u32) -> Result<Self> {
        let wrong = |error: clap::Error| Failure::refused(one_line(&error));
        let texts: Vec<&str> = words.iter().map(String::as_str).collect();
        match &texts[..] {
            ["attend", ..] => {
                let attend = AttendArgs::of_words(words.iter().map(Into::into)).map_err(wrong)?;
                check_group(&attend.group, &attend.network, ranks)?;
                // They are in the control group of this process.
                launched_request(&attend, ranks, ranks)?.fits_in_memory(ranks, 1)?;
                Ok(Self::Attend(attend.on_loss))
            }
            ["bench", "strategies", ..] => {
                let args = StrategiesArgs::of_words(words[1..].iter().map(Into::into)).map_err(wrong)?;
                check_group(&args.group, &args.network, ranks)?;
                check_launched(&args, ranks)?;
                let left = cells_left(&args, ranks, !args.retry)?;
                Ok(Self::Strategies(Box::new(Cells { args, ranks, left })))
            }
            _ => Err(Failure::request(
                format!("launch cannot run `{}`", words.join(" ")),
                "write kyklos launch -n 4 -- attend and its options, or bench strategies and its options",
            )),
        }
    }

    pub(super) fn on_loss(&self) -> OnLoss {
        match self {
            Self::Attend(on_loss) => *on_loss,
            Self::Strategies(_) => OnLoss::Stop,
        }
    }

    /// Whether the processes start again, after they have ended with this exit code: a cell of a
    /// bench has ended them, and others are left.
    pub(super) fn goes_on(&mut self, code: u8) -> Result<bool> {
        let Self::Strategies(cells) = self else { return Ok(false) };
        let left = cells_left(&cells.args, cells.ranks, true)?;
        let has_moved = left < cells.left;
        cells.left = left;
        let goes_on = code == 1 && has_moved && left > 0;
        if goes_on {
            note(&format!("launch: all ranks start again; cells left: {left}"));
        }
        Ok(goes_on)
    }
}

/// Refuses options that belong to other launchers.
fn check_group(group: &GroupArgs, network: &NetworkArgs, ranks: u32) -> Result<()> {
    if let Some(flag) = group.first() {
        return Err(Failure::request(
            format!("{flag} under kyklos launch"),
            "leave it out: kyklos launch assigns the ranks and the address of rank 0",
        ));
    }
    if group.rejoin {
        return Err(Failure::request(
            "--rejoin under kyklos launch",
            "leave it out: kyklos launch gives it to the processes that it starts again",
        ));
    }
    network.here(ranks).map(|_| ())
}
