//! `kyklos attend`: as one rank that a launcher started, or with all ranks in this process.

mod args;
mod here;
mod launched;
mod prepare;

use kyklos_launch::{Assignment, is_under_kyklos_launch, rank_variables};

pub(crate) use self::args::AttendArgs;
use self::here::here;
use self::launched::as_rank;
pub(crate) use self::prepare::launched_request;
use crate::failure::{Failure, Result, note};
use crate::options::ProgressKind;
use crate::{activity, devices};

/// Runs the command.
pub(crate) fn attend(args: &AttendArgs) -> Result<()> {
    if args.progress == ProgressKind::Auto {
        activity::show();
    }
    let done = run(args);
    devices::say_goodbye();
    done
}

fn run(args: &AttendArgs) -> Result<()> {
    if let (Some(ranks), false) = (args.problem.ranks, is_under_kyklos_launch()) {
        if let Some(flag) = args.group.first() {
            return Err(Failure::request(
                format!("--ranks {ranks} with {flag}"),
                "--ranks puts all ranks into this process, so leave one of the two out",
            ));
        }
        if let Some(set) = rank_variables() {
            note(&format!(
                "warning: --ranks puts all ranks into this process; {set} in the environment is not used"
            ));
        }
        return here(args);
    }
    match Assignment::find(&args.group.options(args.network.settings(), args.on_loss))? {
        Some(assignment) => as_rank(args, assignment),
        None => here(args),
    }
}
