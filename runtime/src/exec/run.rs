//! One operation of one rank: its steps, in order.

use std::sync::{Arc, Mutex, PoisonError};

use kyklos_transport::{Progress, Rank, Tag, Vote, Work};
use tracing::Instrument;

use super::ahead::Ahead;
use super::background::{Background, InFlight, drive, drive_unless_failed};
use super::{Executor, state_mut, state_ref};
use crate::backend::{Attend, Backend, Control, Operand, Results};
use crate::collective::{Collective, ExchangeError, Incoming, Memory, Outgoing};
use crate::error::{Error, Result};
use crate::meter::{Meter, Timeline};
use kyklos_plan::BlockWork;
use kyklos_plan::plan::{BufferId, Recv, Slice, Step, describe};

/// One operation of one rank.
pub(super) struct Run<'r, 'a, B: Backend, C: ?Sized> {
    pub(super) executor: &'r Executor<'a, B, C>,
    pub(super) op: u64,
    pub(super) meter: &'r Meter,
    pub(super) memory: Memory<B::Buffer>,
    /// The attention bias tensor, if all queries share its rows; the plan does not mention it.
    pub(super) shared_bias: Option<B::Buffer>,
    /// In a backward pass: this rank's part of the gradient of these rows, if it is wanted.
    pub(super) d_shared_bias: Option<B::Buffer>,
    /// Index of the current step. The steps before it are done.
    pub(super) step: usize,
    /// The share of the attention that the steps before it, and its layers so far, have done.
    pub(super) worked: f64,
    /// Exchanges that have ended and whose messages may still be on their way to the device
    /// ([`Collective::settled`]).
    pub(super) unsettled: Vec<u32>,
    /// A word that is not 0 once a finite element has become infinite on its way
    /// ([`Backend::convert`]).
    pub(super) overflow: Option<B::Buffer>,
}

/// The results of an operation, and its number of pieces of work.
pub(super) type RunEnd<Buffer> = (Vec<Buffer>, u64);

impl<'r, B: Backend, C: Collective<B> + ?Sized> Run<'r, '_, B, C> {
    /// The results, o and lse or dq, dk, dv and where it is wanted dbias, and the number of pieces
    /// of work.
    pub(super) async fn execute(&mut self) -> Result<RunEnd<B::Buffer>> {
        let Executor { plan, collective, .. } = self.executor;
        let ahead = Ahead::new(collective.steps_ahead(), self.meter);
        let mut background = Background { exchanges: Vec::new(), ahead };
        let span = tracing::info_span!("operation", rank = plan.rank, op = self.op, steps = plan.steps.len());
        self.steps(&mut background).instrument(span).await
    }

    async fn steps(&mut self, background: &mut Background<'r, B::Buffer>) -> Result<RunEnd<B::Buffer>> {
        let Executor { collective, plan, options, .. } = self.executor;
        let pulse = collective.pulse();
        let control = Control::new(collective.stop_flag()).beating(Arc::clone(&pulse));
        self.begin_shared_bias_gradient()?;
        for (index, step) in plan.steps.iter().enumerate() {
            self.step = index;
            let words = || describe(self.executor.set, plan, step);
            options.observer.step(Rank(plan.rank), self.op, index, plan.steps.len(), &words);
            collective
                .report_progress(Progress { op: self.op, step: u32::try_from(index).unwrap_or(u32::MAX) });
            // A wait depends on other ranks. Every other step is this rank's own work; during it the pulse of
            // the rank must beat.
            let work = (!matches!(step, Step::Wait { .. })).then(|| pulse.work());
            let span = tracing::debug_span!("step", index, doing = tracing::field::Empty);
            if !span.is_disabled() {
                span.record("doing", words());
            }
            self.step(step, work, &control, background).instrument(span).await?;
            options.observer.counted(Rank(plan.rank), self.op, &self.meter.report());
        }
        self.until_under_way(0, background).await?;
        self.settle(background).await?;
        self.step = plan.steps.len();
        let _work = pulse.work();
        let mut results = Vec::new();
        for id in plan.results() {
            // The plan of a rank without tokens does not write its results, which are empty.
            results.extend(match self.memory.take(id) {
                Some(tensors) => tensors,
                None if self.content(id).is_sum() => self.sum(id)?,
                None => self.allocate(id)?,
            });
        }
        results.extend(self.d_shared_bias.take());
        Ok((results, control.pieces_done()))
    }

    /// Runs the current step; `work` ends with it.
    async fn step(
        &mut self,
        step: &'r Step,
        work: Option<Work>,
        control: &Control,
        background: &mut Background<'r, B::Buffer>,
    ) -> Result<()> {
        let Executor { backend, collective, plan, lowered, .. } = self.executor;
        let words = || describe(self.executor.set, plan, step);
        let started = self.meter.start();
        // Behind messages that may be on their way the device waits for other ranks, and this rank does not
        // work.
        let work = work.filter(|_| self.unsettled.is_empty() && background.ahead.is_empty());
        match step {
            Step::Repack { from, into } => {
                self.repack(from, into)?;
                self.meter.end(started, Timeline::Copy, words);
            }
            Step::Exchange { id, sends, recvs } => {
                for part in sends.iter().flat_map(|send| &send.parts) {
                    self.ensure_sum(part.buffer)?;
                }
                let sends: Vec<Outgoing> = sends
                    .iter()
                    .map(|send| Outgoing {
                        to: Rank(send.to),
                        pieces: send.parts.iter().flat_map(|part| self.pieces(part)).collect(),
                    })
                    .collect();
                let expects: Vec<Incoming> = recvs
                    .iter()
                    .map(|recv| Incoming {
                        from: Rank(recv.from),
                        piece_bytes: recv.parts.iter().flat_map(|part| self.tensor_bytes(*part)).collect(),
                    })
                    .collect();
                let tag = Tag { op: self.op, message: *id };
                let arrivals =
                    collective.post_exchange(backend, self.meter, tag, &mut self.memory, &sends, &expects);
                background.exchanges.push(InFlight { id: *id, recvs, arrivals, ended: None });
            }
            Step::Wait { id } => {
                self.wait_for(*id, background).await?;
                self.meter.end_wait(started, *id, words);
            }
            Step::Attend { q, kv, state, bias } => {
                self.begin_ahead(started, &mut background.ahead);
                let mut tensors = self.state(*state)?;
                let into = self.finalized_next(*state);
                let mut output = into.map(|into| self.allocate(into)).transpose()?;
                let mut attended = Ok(());
                let works = &lowered.works[self.step];
                for (n, work) in works.iter().enumerate() {
                    let (slices, state) = ([q, kv], (*state, &mut tensors[..]));
                    let output = output.as_deref_mut().filter(|_| n + 1 == works.len());
                    let control = self.telling(control, n);
                    let attend = self.attend(slices, bias.as_deref(), work, state, output, &control);
                    attended = drive(background, attend).await;
                    if attended.is_err() {
                        break;
                    }
                    self.layer_done(n);
                }
                self.memory.put(*state, tensors);
                if let Err(Error::Cancelled) = attended {
                    drop(work);
                    return Err(self.why_stopped(background).await);
                }
                attended?;
                into.into_iter().zip(output).for_each(|(into, output)| self.memory.put(into, output));
                self.end_step(started, background).await?;
            }
            Step::AttendBackward(step) => {
                self.begin_ahead(started, &mut background.ahead);
                let mut sums = self.take_sums(step)?;
                let mut attended = Ok(());
                for (n, work) in lowered.works[self.step].iter().enumerate() {
                    let control = self.telling(control, n);
                    let attend = self.attend_backward(step, work, &mut sums, &control);
                    attended = drive(background, attend).await;
                    if attended.is_err() {
                        break;
                    }
                    self.layer_done(n);
                }
                self.put_sums(step, sums);
                if let Err(Error::Cancelled) = attended {
                    drop(work);
                    return Err(self.why_stopped(background).await);
                }
                attended?;
                self.end_step(started, background).await?;
            }
            Step::Accumulate { from, into } => {
                self.accumulate(*from, into)?;
                self.meter.end(started, Timeline::Compute, words);
            }
            Step::Convert { from, into } => {
                self.convert(from, *into)?;
                self.meter.end(started, Timeline::Copy, words);
            }
            Step::Merge { from, into } => {
                let (from_tensors, mut into_tensors) = (self.state(*from)?, self.state(*into)?);
                let shape = self.shape(*into);
                let merged =
                    backend.merge(&mut state_mut(&mut into_tensors, shape), &state_ref(&from_tensors, shape));
                self.memory.put(*from, from_tensors);
                self.memory.put(*into, into_tensors);
                merged?;
                self.meter.end(started, Timeline::Compute, words);
            }
            // The step before has computed it.
            Step::Finalize { into, .. } if self.memory.is_alive(*into) => {}
            Step::Finalize { state, into } => {
                self.begin_ahead(started, &mut background.ahead);
                let tensors = self.state(*state)?;
                let mut output = self.allocate(*into)?;
                let (o, lse) = output.split_at_mut(1);
                let shape = self.shape(*state);
                let dtype = self.executor.set.problem.dtype;
                let sinks = self.sinks(*state);
                backend.finalize(&state_ref(&tensors, shape), sinks, dtype, &mut o[0], &mut lse[0])?;
                self.memory.put(*state, tensors);
                self.memory.put(*into, output);
                self.end_step(started, background).await?;
            }
            Step::Free { buffer } => drop(self.memory.take(*buffer)),
        }
        drop(work);
        Ok(())
    }

    /// Where the results of a state go, if the current step attends to its last block and nothing
    /// else needs the state: the backend may compute both at once.
    fn finalized_next(&self, state: BufferId) -> Option<BufferId> {
        let Executor { plan, lowered, .. } = self.executor;
        match plan.steps.get(self.step + 1)? {
            Step::Finalize { state: next, into } if *next == state => {
                (!lowered.works[self.step].is_empty()).then_some(*into)
            }
            _ => None,
        }
    }

    /// Attends to a block; with `output`, [`Self::finalized_next`] has named it.
    async fn attend(
        &self,
        [q, kv]: [&Slice; 2],
        bias: Option<&Slice>,
        work: &BlockWork,
        (state, tensors): (BufferId, &mut [B::Buffer]),
        output: Option<&mut [B::Buffer]>,
        control: &Control,
    ) -> Result<()> {
        let (plan, problem) = (self.executor.plan, &self.executor.set.problem);
        let element = |slice| {
            let layout = self.layout(slice, problem.head_dim as usize);
            move |buffer| Operand { buffer, layout }
        };
        let kv_first = plan.slice_heads(kv).start;
        let kv_head_of: Vec<u32> =
            plan.slice_heads(q).map(|head| head / problem.group() - kv_first).collect();
        let args = Attend {
            dtype: problem.dtype,
            scale: problem.scale,
            softcap: problem.softcap,
            q: element(q)(self.memory.view(q.buffer, 0)),
            k: element(kv)(self.memory.view(kv.buffer, 0)),
            v: element(kv)(self.memory.view(kv.buffer, 1)),
            kv_head_of: &kv_head_of,
            work,
            bias: self.bias(q, bias),
            fixed_order: problem.fixed_order,
            inference: problem.inference,
            state: state_mut(tensors, self.shape(state)),
        };
        match output {
            Some([o, lse]) => {
                let results = Results { sinks: self.sinks(state), o, lse };
                self.executor.backend.attend_and_finalize(args, results, control).await
            }
            _ => self.executor.backend.attend(args, control).await,
        }
    }

    /// `control` for layer `n` of the current step: it tells the observer how far the attention is.
    fn telling(&self, control: &Control, n: usize) -> Control {
        let Executor { plan, options, lowered, .. } = self.executor;
        let (observer, rank, op) = (Arc::clone(&options.observer), Rank(plan.rank), self.op);
        let (before, all) = (self.worked, lowered.shares[self.step][n]);
        let of_layer = Mutex::new(0.0);
        control.clone().telling(move |share| {
            let mut done = of_layer.lock().unwrap_or_else(PoisonError::into_inner);
            // Shares are rounded.
            *done = f64::min(*done + share, 1.0);
            observer.worked(rank, op, f64::min(before + all * *done, 1.0));
        })
    }

    /// Layer `n` of the current step is done, or submitted to the device.
    fn layer_done(&mut self, n: usize) {
        let Executor { plan, options, lowered, .. } = self.executor;
        self.worked = f64::min(self.worked + lowered.shares[self.step][n], 1.0);
        options.observer.worked(Rank(plan.rank), self.op, self.worked);
    }

    async fn wait_for(&mut self, id: u32, background: &mut Background<'r, B::Buffer>) -> Result<()> {
        let index = background.exchanges.iter().position(|exchange| exchange.id == id);
        let index = index.expect("a checked plan waits only for what it has posted");
        let mut mine = background.exchanges.swap_remove(index);
        let ended = match mine.ended.take() {
            Some(ended) => ended,
            None => match drive_unless_failed(background, mine.arrivals.as_mut()).await {
                Some(ended) => ended,
                None => return self.failed_ahead(&mut background.ahead),
            },
        };
        let arrived = ended.map_err(|error| self.explain(error))?;
        mine.recvs.iter().zip(arrived).for_each(|(recv, tensors)| self.receive(recv, tensors));
        self.unsettled.push(id);
        Ok(())
    }

    /// Ends when the messages of all exchanges for which the plan has waited have moved.
    pub(super) async fn settle(&mut self, background: &mut Background<'r, B::Buffer>) -> Result<()> {
        let collective = self.executor.collective;
        for id in std::mem::take(&mut self.unsettled) {
            if let Some(settled) = collective.settled(Tag { op: self.op, message: id }) {
                let started = self.meter.start();
                drive(background, settled).await.map_err(|error| self.explain(error))?;
                self.meter.end(started, Timeline::Wait, || format!("wait for exchange {id} on the device"));
            }
        }
        Ok(())
    }

    /// Makes the tensors of a message the buffers of its parts.
    pub(super) fn receive(&mut self, recv: &Recv, tensors: Vec<B::Buffer>) {
        let mut tensors = tensors.into_iter();
        for part in &recv.parts {
            let count = self.tensor_bytes(*part).len();
            self.memory.put(*part, tensors.by_ref().take(count).collect());
        }
    }

    /// The failure of the group that cancelled a computation.
    async fn why_stopped(&self, background: &mut Background<'r, B::Buffer>) -> Error {
        if let Err(error) = self.why_messages_failed(&mut background.ahead).await {
            return error;
        }
        // An exchange under way gives the most detail: peer and bytes.
        for mut exchange in background.exchanges.drain(..) {
            let ended = match exchange.ended.take() {
                Some(ended) => ended,
                None => exchange.arrivals.as_mut().await,
            };
            if let Err(error) = ended {
                return self.explain(error);
            }
        }
        // No exchange is under way: any call of the transport returns the failure.
        match self.executor.collective.agree(Vote::ready(self.executor.lowered.plans.hash())).await {
            Err(error) => self.explain(ExchangeError::Transport(error)),
            Ok(_) => Error::Cancelled,
        }
    }

    fn explain(&self, error: ExchangeError) -> Error {
        self.explain_at(self.step, error)
    }

    /// The error of a step.
    pub(super) fn explain_at(&self, step: usize, error: ExchangeError) -> Error {
        let source = match error {
            ExchangeError::Own(error) => return error,
            ExchangeError::Transport(source) => source,
        };
        let plan = self.executor.plan;
        let doing = describe(self.executor.set, plan, &plan.steps[step]);
        let doing = doing.split_whitespace().collect::<Vec<_>>().join(" ");
        Error::Group { rank: plan.rank, step, doing, source }
    }
}
