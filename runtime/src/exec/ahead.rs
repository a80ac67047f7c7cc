//! Steps that are submitted to the device before those in front of them are done.
//!
//! Where the device keeps the order of work and messages by itself
//! ([`Collective::steps_ahead`](crate::collective::Collective::steps_ahead)), no step has to wait
//! for the host to have noticed the end of the step before it. The executor then submits a few
//! steps, and waits for the oldest one before it submits another: so the memory of steps under way
//! stays bounded, and so does what an abort has to wait for. Before a result leaves, it waits for
//! all.
//!
//! The times of such steps are taken when their ends are noticed, one after the other, and so have
//! no overlap: a step takes from the end of the one before it to its own, first the part in which
//! the device waited for messages. What the host does meanwhile is not counted.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use crate::collective::{ExchangeError, Settled};
use crate::error::Result;
use crate::meter::{Meter, Started, Timeline};

/// The submitted steps that are not known to have completed, the first one in front.
pub(super) struct Ahead<'r> {
    /// The most steps that are submitted and not done. 0: the executor waits for each step.
    pub(super) most: usize,
    meter: &'r Meter,
    pub(super) steps: VecDeque<Submitted<'r>>,
    /// The first step that failed on the device, and why.
    pub(super) failed: Option<(usize, ExchangeError)>,
}

pub(super) struct Submitted<'r> {
    pub(super) index: usize,
    pub(super) started: Started,
    /// The exchanges whose messages the device waits for before this step.
    pub(super) messages: VecDeque<(u32, Settled<'r>)>,
    /// Ends when the device has done everything up to this step. `None` while the step is being
    /// submitted.
    pub(super) end: Option<Pin<Box<dyn Future<Output = Result<()>> + 'r>>>,
    pub(super) words: Box<dyn Fn() -> String + 'r>,
}

impl<'r> Ahead<'r> {
    pub(super) fn new(most: usize, meter: &'r Meter) -> Self {
        Self { most, meter, steps: VecDeque::new(), failed: None }
    }

    pub(super) fn is_on(&self) -> bool {
        self.most > 0
    }

    /// Whether every submitted step is known to have completed.
    pub(super) fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failed.is_some()
    }

    /// Notes which steps have ended, in their order, and the first failure.
    pub(super) fn advance(&mut self, context: &mut Context<'_>) {
        while self.failed.is_none()
            && let Some(step) = self.steps.front_mut()
        {
            while let Some((id, settled)) = step.messages.front_mut() {
                let Poll::Ready(settled) = settled.as_mut().poll(context) else { return };
                if let Err(error) = settled {
                    self.failed = Some((step.index, error));
                    return;
                }
                let name = || format!("wait for exchange {id} on the device");
                self.meter.count_ahead(step.started, Timeline::Wait, name);
                step.messages.pop_front();
            }
            let Some(end) = &mut step.end else { return };
            let Poll::Ready(ended) = end.as_mut().poll(context) else { return };
            if let Err(error) = ended {
                self.failed = Some((step.index, ExchangeError::Own(error)));
                return;
            }
            self.meter.count_ahead(step.started, Timeline::Compute, &step.words);
            self.meter.end_ahead();
            self.steps.pop_front();
        }
    }
}
