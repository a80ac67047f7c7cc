//! Calls whose future is dropped before its end: the peers get an error at once, and do not wait
//! until their deadline.

use kyklos_transport::{Abort, AbortCause, Progress, Rank};

use super::Inputs;
use super::run::Run;
use crate::backend::Backend;
use crate::collective::Collective;

/// Aborts the group if it is dropped before [`Self::end`].
pub(crate) struct AbortOnDrop<F: FnOnce(Abort)> {
    abort: Option<F>,
    rank: Rank,
    op: u64,
}

impl<F: FnOnce(Abort)> AbortOnDrop<F> {
    /// `abort` is that of the group; `rank` is this rank, which is in operation `op`.
    pub(crate) fn new(abort: F, rank: Rank, op: u64) -> Self {
        Self { abort: Some(abort), rank, op }
    }

    /// The call has come to its end, in whichever way.
    pub(crate) fn end(mut self) {
        self.abort = None;
    }
}

impl<F: FnOnce(Abort)> Drop for AbortOnDrop<F> {
    fn drop(&mut self) {
        if let Some(abort) = self.abort.take() {
            abort(dropped(self.rank, self.op, 0));
        }
    }
}

fn dropped(culprit: Rank, op: u64, step: usize) -> Abort {
    let how = if is_panicking() {
        "the rank panicked during the call"
    } else {
        "the call was dropped before its end"
    };
    let progress = Progress { op, step: u32::try_from(step).unwrap_or(u32::MAX) };
    Abort { culprit, cause: AbortCause::Failed(how.to_owned()), progress }
}

#[cfg(not(target_arch = "wasm32"))]
fn is_panicking() -> bool {
    std::thread::panicking()
}

/// A panic ends a program in a browser.
#[cfg(target_arch = "wasm32")]
fn is_panicking() -> bool {
    false
}

/// A run that holds its inputs, and gives them back at its end or when it is dropped. A drop before
/// the end aborts the group.
pub(super) struct RunGuard<'i, 'r, 'a, B: Backend, C: Collective<B> + ?Sized> {
    /// `None` after the end.
    run: Option<Run<'r, 'a, B, C>>,
    inputs: &'i mut Inputs<B::Buffer>,
}

impl<'i, 'r, 'a, B: Backend, C: Collective<B> + ?Sized> RunGuard<'i, 'r, 'a, B, C> {
    /// Moves `inputs` into the memory of `run`.
    pub(super) fn new(mut run: Run<'r, 'a, B, C>, inputs: &'i mut Inputs<B::Buffer>) -> Self {
        let plan = run.executor.plan;
        run.memory.put(plan.q, inputs.q.take().into_iter().collect());
        run.memory.put(plan.kv, inputs.k.take().into_iter().chain(inputs.v.take()).collect());
        if let Some(id) = plan.bias {
            run.memory.put(id, inputs.bias.take().into_iter().collect());
        }
        if let Some(own) = plan.gradients {
            run.memory.put(own.d_o, inputs.d_o.take().into_iter().collect());
            run.memory.put(own.stats, inputs.stats.take().into_iter().collect());
        }
        run.shared_bias = inputs.shared_bias.take();
        Self { run: Some(run), inputs }
    }

    pub(super) fn run(&mut self) -> &mut Run<'r, 'a, B, C> {
        self.run.as_mut().expect("a guard has its run until its end")
    }

    /// The run, without its inputs.
    pub(super) fn end(mut self) -> Run<'r, 'a, B, C> {
        let mut run = self.run.take().expect("a guard has its run until its end");
        give_back(&mut run, self.inputs);
        run
    }
}

impl<B: Backend, C: Collective<B> + ?Sized> Drop for RunGuard<'_, '_, '_, B, C> {
    fn drop(&mut self) {
        let Some(mut run) = self.run.take() else { return };
        give_back(&mut run, self.inputs);
        let executor = run.executor;
        executor.collective.abort(dropped(Rank(executor.plan.rank), run.op, run.step));
    }
}

fn give_back<B: Backend, C: ?Sized>(run: &mut Run<'_, '_, B, C>, inputs: &mut Inputs<B::Buffer>) {
    let plan = run.executor.plan;
    if let Some(id) = plan.bias {
        inputs.bias = run.memory.take(id).and_then(|mut rows| rows.pop());
    }
    if let Some(own) = plan.gradients {
        let mut one = |id| run.memory.take(id).and_then(|mut tensors| tensors.pop());
        (inputs.d_o, inputs.stats) = (one(own.d_o), one(own.stats));
    }
    inputs.shared_bias = run.shared_bias.take();
    inputs.q = run.memory.take(plan.q).and_then(|mut q| q.pop());
    let mut kv = run.memory.take(plan.kv).unwrap_or_default();
    (inputs.v, inputs.k) = (kv.pop(), kv.pop());
}
