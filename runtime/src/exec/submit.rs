//! Ends of steps: the executor waits for the device, or submits further steps ([`Ahead`]).

use std::task::Poll;

use kyklos_transport::Tag;

use super::ahead::{Ahead, Submitted};
use super::background::{Background, drive};
use super::run::Run;
use crate::backend::Backend;
use crate::collective::Collective;
use crate::error::Result;
use crate::meter::{Started, Timeline};
use kyklos_plan::plan::describe;

impl<'r, B: Backend, C: Collective<B> + ?Sized> Run<'r, '_, B, C> {
    /// Begins the current step, which the device may do later than the host goes on: from here on
    /// it counts as work of the device.
    pub(super) fn begin_ahead(&mut self, started: Started, ahead: &mut Ahead<'r>) {
        if !ahead.is_on() {
            return;
        }
        let (collective, set, plan) = (self.executor.collective, self.executor.set, self.executor.plan);
        let unsettled = std::mem::take(&mut self.unsettled).into_iter();
        let settled = |id| Some((id, collective.settled(Tag { op: self.op, message: id })?));
        let step = &plan.steps[self.step];
        self.meter.begin_ahead();
        ahead.steps.push_back(Submitted {
            index: self.step,
            started,
            messages: unsettled.filter_map(settled).collect(),
            end: None,
            words: Box::new(move || describe(set, plan, step)),
        });
    }

    /// Ends when the current step is done; or, if the executor runs ahead, when it is submitted and
    /// no more steps are under way than may be.
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
            let words = || describe(executor.set, executor.plan, &executor.plan.steps[*step]);
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

    /// Once the group has been aborted: the failure of the messages for which submitted steps wait,
    /// if there is one. It tells more than the group.
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
