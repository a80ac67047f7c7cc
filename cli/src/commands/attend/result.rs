//! What `kyklos attend` prints and writes at the end.

use super::args::AttendArgs;
use crate::failure::{Result, print};
use crate::job::Job;
use crate::job::rank::RankDone;

/// Prints the report, and writes timelines. A rejected or incomplete result is a failure.
pub(super) fn tell(args: &AttendArgs, job: &Job, mut done: Vec<(u32, RankDone)>) -> Result<()> {
    if let Some(path) = &args.trace {
        for (rank, done) in &mut done {
            if let Some(trace) = done.trace.take() {
                trace.write(path, *rank)?;
            }
        }
    }
    for summary in done.iter().filter_map(|(_, done)| done.summary.as_ref()) {
        print(&if args.json {
            summary.json(&job.agreed.request)?
        } else {
            summary.table(&job.agreed.request)
        })?;
    }
    match done.into_iter().find_map(|(_, done)| done.rejected.or(done.lacks)) {
        Some(failure) => Err(failure),
        None => Ok(()),
    }
}
