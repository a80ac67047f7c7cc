//! `kyklos attend`: as one rank that a launcher started, or with all ranks in this process.

mod args;
mod here;
mod launched;
mod prepare;
mod result;

pub(crate) use self::args::AttendArgs;
use self::here::here;
use self::launched::as_rank;
pub(crate) use self::prepare::launched_request;
use crate::entrance::Entrance;
use crate::failure::{Failure, Result, note};
use crate::launchers::{self, Variables};

/// Runs the command.
pub(crate) fn attend(args: &AttendArgs) -> Result<()> {
    let variables = Variables::of_this_process();
    if let (Some(ranks), false) = (args.problem.ranks, launchers::by_kyklos(&variables)) {
        if let Some(flag) = args.group.first() {
            return Err(Failure::request(
                format!("--ranks {ranks} with {flag}"),
                "--ranks puts all ranks into this process, so leave one of the two away",
            ));
        }
        if let Some(said) = launchers::hints(&variables) {
            note(&format!(
                "warning: --ranks puts all ranks into this process; {said} in the environment is not used"
            ));
        }
        return here(args);
    }
    let entrance = Entrance::of(&args.group, &variables, &args.network)?;
    match launchers::find(&args.group, &variables, entrance.source()?)? {
        Some(launched) => as_rank(args, &launched, &entrance),
        None => here(args),
    }
}
