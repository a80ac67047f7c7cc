//! Steps that are submitted to the device before those in front of them are done.
//!
//! Where the device keeps the order of work and messages by itself ([`Collective::steps_ahead`]), no step has to wait for the host
//! to have noticed the end of the step before it. The executor then submits a few steps, and waits for the oldest one before it
//! submits another: so the memory of steps under way stays bounded, and so does what an abort has to wait for. Before a result
//! leaves, it waits for all.
//!
//! The times of such steps are taken when their ends are noticed, one after the other, and so have no overlap: a step takes
//! from the end of the one before it to its own, first the part in which the device waited for messages. What the host does
//! meanwhile is not counted.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use kyklos_transport::Tag;

use super::background::{Background, drive};
use super::run::Run;
use crate::Result;
use crate::backend::Backend;
use crate::collective::{Collective, ExchangeError, Settled};
use crate::meter::{Meter, Started, Timeline};
use crate::plan::describe;

/// The steps that were submitted and whose end was not noticed yet, the first one in front.
pub(super) struct Ahead<'r> {
    /// The most steps that are submitted and not done. 0: the executor waits for each step.
    most: usize,
    meter: &'r Meter,
    steps: VecDeque<Submitted<'r>>,
    /// The first step that failed on the device, and why.
    failed: Option<(usize, ExchangeError)>,
}

struct Submitted<'r> {
    index: usize,
    started: Started,
    /// The exchanges whose messages the device waits for before this step.
    messages: VecDeque<(u32, Settled<'r>)>,
    /// Ends when the device has done everything up to this step. `None` while the step is being submitted.
    end: Option<Pin<Box<dyn Future<Output = Result<()>> + 'r>>>,
    words: Box<dyn Fn() -> String + 'r>,
}

impl<'r> Ahead<'r> {
    pub(super) fn new(most: usize, meter: &'r Meter) -> Self {
        Self { most, meter, steps: VecDeque::new(), failed: None }
    }

    pub(super) fn is_on(&self) -> bool {
        self.most > 0
    }

    /// Whether no step is under way whose end was not noticed.
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

impl<'r, B: Backend, C: Collective<B> + ?Sized> Run<'r, '_, B, C> {
    /// Begins the current step, which the device may do later than the host goes on: from here on it counts as work of the device.
    pub(super) fn begin_ahead(&mut self, started: Started, ahead: &mut Ahead<'r>) {
        if !ahead.is_on() {
            return;
        }
        let (collective, world, plan) = (self.executor.collective, self.executor.world, self.executor.plan);
        let unsettled = std::mem::take(&mut self.unsettled).into_iter();
        let settled = |id| Some((id, collective.settled(Tag { op: self.op, message: id })?));
        let step = &plan.steps[self.step];
        self.meter.begin_ahead();
        ahead.steps.push_back(Submitted {
            index: self.step,
            started,
            messages: unsettled.filter_map(settled).collect(),
            end: None,
            words: Box::new(move || describe(world, plan, step)),
        });
    }

    /// Ends when the current step is done; or, if the executor runs ahead, when it is submitted and no more steps are under way than
    /// may be.
    pub(super) async fn end_step(
        &mut self,
        started: Started,
        background: &mut Background<'r, B::Buffer>,
    ) -> Result<()> {
        let backend = self.executor.backend;
        if !background.ahead.is_on() {
            self.settle(background).await?;
            drive(background, backend.wait()).await?;
            let Run { executor, step, .. } = self;
            let words = || describe(executor.world, executor.plan, &executor.plan.steps[*step]);
            self.meter.end(started, Timeline::Compute, words);
            return Ok(());
        }
        if let Some(step) = background.ahead.steps.back_mut() {
            step.end = Some(Box::pin(backend.wait()));
        }
        // The first poll of the wait asks for the end of what is submitted by now.
        std::future::poll_fn(|context| {
            if let Some(end) = background.ahead.steps.back_mut().and_then(|step| step.end.as_mut())
                && let Poll::Ready(ended) = end.as_mut().poll(context)
            {
                // Polled again only behind the steps before it.
                background.ahead.steps.back_mut().expect("it was there").end =
                    Some(Box::pin(std::future::ready(ended)));
            }
            Poll::Ready(())
        })
        .await;
        self.until_under_way(background.ahead.most, background).await
    }

    /// Ends when at most `most` of the steps that were submitted are not done.
    pub(super) async fn until_under_way(
        &self,
        most: usize,
        background: &mut Background<'r, B::Buffer>,
    ) -> Result<()> {
        std::future::poll_fn(|context| {
            background.poll_exchanges(context);
            background.ahead.advance(context);
            let ahead = &background.ahead;
            if ahead.steps.len() <= most || ahead.failed.is_some() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        self.failed_ahead(&mut background.ahead)
    }

    /// The failure of a step that was submitted before, if there is one.
    pub(super) fn failed_ahead(&self, ahead: &mut Ahead<'r>) -> Result<()> {
        match ahead.failed.take() {
            Some((step, error)) => Err(self.explain_at(step, error)),
            None => Ok(()),
        }
    }

    /// Once the group has been aborted: the failure of the messages for which submitted steps wait, if there is one. It tells more
    /// than the group.
    pub(super) async fn why_messages_failed(&self, ahead: &mut Ahead<'r>) -> Result<()> {
        self.failed_ahead(ahead)?;
        for step in &mut ahead.steps {
            while let Some((_, settled)) = step.messages.front_mut() {
                settled.as_mut().await.map_err(|error| self.explain_at(step.index, error))?;
                step.messages.pop_front();
            }
        }
        Ok(())
    }
}
