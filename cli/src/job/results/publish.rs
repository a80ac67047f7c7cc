//! The end of a job: files get their names, the report is printed, and all ranks learn whether that
//! went well.

use kyklos_transport::{Rank, Transport, TransportError, Vote};

use super::collect::Collected;
use super::page::PageParts;
use super::report::Summary;
use crate::failure::{Failure, Result, note, print};
use crate::job::call::Job;
use crate::job::refusal::{REFUSE, refuse};
use crate::observe::trace::Trace;
use crate::tensors::output::OutputTarget;

/// What this rank draws of the run.
#[derive(Debug, Default)]
pub(in crate::job) struct Pictures {
    pub(in crate::job) trace: Option<Trace>,
    pub(in crate::job) page: Option<PageParts>,
}

impl Job {
    /// Writes and prints what this rank has to. Then all ranks vote: a rank ends well only if all
    /// ranks have delivered. Returns the reason if not.
    ///
    /// # Errors
    /// When the group fails before the vote ends, on a rank that cannot know whether the result is
    /// complete.
    pub(in crate::job) fn publish(
        &self,
        transport: &dyn Transport,
        collected: Collected,
        pictures: Pictures,
    ) -> Result<Option<Failure>> {
        let rank = transport.rank();
        let Collected { summary, file, rejected } = collected;
        // A wrong result does not get its final name. Its report still has the measurements.
        let named = match (&rejected, file) {
            (None, Some(file)) => file.commit(),
            _ => Ok(()),
        };
        let told = named.and_then(|()| self.tell(rank, pictures, summary));
        match (rejected, told) {
            (Some(rejected), _) => {
                refuse(transport, Failure::run("verification failed, rank 0 says how"));
                Ok(Some(rejected))
            }
            (None, Err(failure)) => Ok(Some(refuse(transport, self.named(rank, failure)))),
            (None, Ok(())) => self.end_together(transport),
        }
    }

    /// Writes the timelines and the page and prints the report, where this rank has them.
    fn tell(&self, rank: Rank, pictures: Pictures, summary: Option<Summary>) -> Result<()> {
        let Pictures { trace, page } = pictures;
        if let (Some(path), Some(trace)) = (&self.outputs.trace, trace) {
            trace.write(path, rank.0)?;
        }
        let Some(summary) = summary else { return Ok(()) };
        if let Some(page) = page {
            self.write_page(page, &summary)?;
        }
        self.watch.phase(None);
        let request = &self.request;
        print(&if self.outputs.json { summary.json(request)? } else { summary.table(request) })
    }

    fn end_together(&self, transport: &dyn Transport) -> Result<Option<Failure>> {
        let vote = Vote::ready(DELIVERED);
        // Other ranks may have large files to write.
        match pollster::block_on(transport.agree(vote, self.settings.deadline.max(REFUSE))) {
            Ok(_) => Ok(None),
            Err(refused @ TransportError::Refused { .. }) => Ok(Some(refused.into())),
            // Rank 0 has written the whole result: a peer that fails now changes nothing.
            Err(error) if transport.rank().0 == 0 && !self.has_parts() => {
                note(&format!("warning: the result is complete; {error}"));
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }

    fn has_parts(&self) -> bool {
        matches!(self.outputs.result, Some(OutputTarget::Parts(_)))
    }
}

/// The hash under which ranks vote that they have delivered.
const DELIVERED: [u8; 32] = *b"kyklos attend: delivered, rel. 1";
