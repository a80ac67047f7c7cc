//! Keys and values that are beyond the range of the type in which they travel.

use bytes::Bytes;
use kyklos_transport::{Rank, TransportError, Vote};

use super::run::Run;
use super::{AbortOnDrop, Executor};
use crate::backend::Backend;
use crate::collective::Collective;
use crate::error::{Error, Result};
use kyklos_plan::WireFormat;
use kyklos_plan::plan::{BufferId, Content};

/// The hash under which ranks vote after a run in which keys and values travelled as f16.
const RANGE: [u8; 32] = *b"range of keys and values as f16.";

/// Bytes of the word of [`Backend::convert`].
const WORD_BYTES: usize = 16;

impl<B: Backend, C: Collective<B> + ?Sized> Run<'_, '_, B, C> {
    /// The word that tells whether finite elements became infinite, for a conversion to `into`;
    /// none if they cannot.
    pub(super) fn overflow_of(&mut self, into: BufferId) -> Result<Option<B::Buffer>> {
        let narrows = self.executor.set.problem.wire == WireFormat::F16;
        if !narrows || self.content(into) != Content::WireKeyValue {
            return Ok(None);
        }
        if let Some(word) = self.overflow.take() {
            return Ok(Some(word));
        }
        self.executor.backend.upload("overflow", Bytes::from_static(&[0; WORD_BYTES])).map(Some)
    }
}

impl<B: Backend, C: Collective<B> + ?Sized> Executor<'_, B, C> {
    /// Agrees with all ranks, after a run of operation `op`, that all keys and values that
    /// travelled were in the range of their format. `overflow` is the word of this rank's
    /// conversions.
    ///
    /// # Errors
    /// [`Error::Request`] on ranks with elements beyond the range, and on the others
    /// [`TransportError::Refused`] with the text of the first of them. Any other error has
    /// ended the group.
    pub(super) async fn agree_on_range(&self, op: u64, overflow: Option<B::Buffer>) -> Result<()> {
        if !self.lowered.narrows {
            return Ok(());
        }
        let vote = AbortOnDrop::new(|abort| self.collective.abort(abort), Rank(self.plan.rank), op);
        let agreed = self.vote_on_range(overflow).await;
        vote.end();
        agreed.inspect_err(|error| {
            let refused = matches!(error, Error::Transport(TransportError::Refused { .. }));
            if !refused && !error.is_request() {
                self.end_for_all(op, self.plan.steps.len(), error);
            }
        })
    }

    async fn vote_on_range(&self, overflow: Option<B::Buffer>) -> Result<()> {
        let overflows = match overflow {
            Some(mut word) => self.backend.download(&mut word, 0..4).await?.iter().any(|byte| *byte != 0),
            None => false,
        };
        if overflows {
            let fault = format!(
                "keys or values of rank {} that are beyond ±65504, the range of f16, in which they travel",
                self.plan.rank
            );
            return Err(self.refuse(Error::request(fault, "use the wire format same or int8")).await);
        }
        self.collective.agree(Vote::ready(RANGE)).await?;
        Ok(())
    }
}
