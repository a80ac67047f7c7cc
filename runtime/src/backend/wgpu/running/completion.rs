//! Completion of submitted work, without blocking the caller's thread.

use futures_channel::oneshot;

use super::clock::now_s;
use super::health::{Health, Loss};

/// Resolves when all work up to one submission is done, or when the device is lost.
#[derive(Debug)]
pub(in crate::backend::wgpu) struct Done {
    receiver: oneshot::Receiver<f64>,
    loss: Loss,
}

impl Done {
    /// The time at which the work was done, in seconds of [`now_s`]; `None` when the device was
    /// lost first.
    pub(in crate::backend::wgpu) async fn finished(self) -> Option<f64> {
        self.loss.or(self.receiver).await
    }
}

pub(in crate::backend::wgpu) fn done(queue: &wgpu::Queue, loss: Loss) -> Done {
    let (sender, receiver) = oneshot::channel();
    queue.on_submitted_work_done(move || {
        // The receiver may be dropped; then nothing needs the result.
        let _ = sender.send(now_s());
    });
    Done { receiver, loss }
}

#[cfg(not(target_arch = "wasm32"))]
pub(in crate::backend::wgpu) use native::Poller;
#[cfg(not(target_arch = "wasm32"))]
pub use native::WAITING_THREAD;
#[cfg(target_arch = "wasm32")]
pub(in crate::backend::wgpu) use web::Poller;

#[cfg(target_arch = "wasm32")]
mod web {
    use super::Health;

    /// Does nothing: a browser runs callbacks by itself.
    #[derive(Debug)]
    pub(crate) struct Poller;

    impl Poller {
        pub(crate) fn start(_: &wgpu::Device, _: &std::sync::Arc<Health>) -> Self {
            Self
        }

        pub(crate) fn submitted(&self, _: wgpu::SubmissionIndex) {}

        pub(crate) fn close(&self) {}
    }
}

#[cfg(not(target_arch = "wasm32"))]
mod native {
    use std::collections::VecDeque;
    use std::panic::AssertUnwindSafe;
    use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
    use std::thread::ThreadId;
    use std::time::Duration;

    use super::Health;

    /// Name of the thread that waits for a device. It catches wgpu's panics, which become the
    /// device's error; a program can leave out what the panic hook says of them.
    pub const WAITING_THREAD: &str = "kyklos-wgpu";

    /// A thread that waits for submissions one by one, in order, so that callbacks run promptly.
    #[derive(Debug)]
    pub(crate) struct Poller {
        shared: Arc<Shared>,
        /// None where it did not start.
        thread: Option<ThreadId>,
    }

    #[derive(Debug, Default)]
    struct Shared {
        queue: Mutex<Queue>,
        changed: Condvar,
    }

    #[derive(Debug, Default)]
    struct Queue {
        submissions: VecDeque<wgpu::SubmissionIndex>,
        closed: bool,
        /// The thread holds the device no more.
        ended: bool,
    }

    impl Poller {
        pub(crate) fn start(device: &wgpu::Device, health: &Arc<Health>) -> Self {
            let shared = Arc::new(Shared::default());
            let thread = std::thread::Builder::new().name(WAITING_THREAD.to_owned());
            let started = thread.spawn({
                let (shared, device, health) = (shared.clone(), device.clone(), health.clone());
                move || {
                    shared.run(&device, &health);
                    drop(device);
                    shared.lock().ended = true;
                    shared.changed.notify_all();
                }
            });
            if let Err(error) = &started {
                health.lost("start a thread", error.to_string());
            }
            Self { shared, thread: started.ok().map(|thread| thread.thread().id()) }
        }

        pub(crate) fn submitted(&self, index: wgpu::SubmissionIndex) {
            self.shared.lock().submissions.push_back(index);
            self.shared.changed.notify_all();
        }

        /// Ends the thread after all submissions in flight are done: a download may outlive its
        /// backend.
        pub(crate) fn close(&self) {
            self.shared.lock().closed = true;
            self.shared.changed.notify_all();
        }
    }

    impl Drop for Poller {
        /// Waits for the thread: a process that ends while a driver frees its device may crash in
        /// the driver, after its work is done (SwiftShader did in a third of the runs).
        fn drop(&mut self) {
            self.close();
            // A callback may drop the last handle of the device on the thread itself.
            if self.thread.is_some_and(|thread| thread != std::thread::current().id()) {
                let waited = self
                    .shared
                    .changed
                    .wait_timeout_while(self.shared.lock(), PATIENCE, |queue| !queue.ended);
                drop(waited);
            }
        }
    }

    /// Longest wait for a device that hangs.
    const PATIENCE: Duration = Duration::from_secs(5);

    impl Shared {
        fn lock(&self) -> MutexGuard<'_, Queue> {
            self.queue.lock().unwrap_or_else(PoisonError::into_inner)
        }

        /// The next submission; `None` after the last one.
        fn next(&self) -> Option<wgpu::SubmissionIndex> {
            let mut queue = self
                .changed
                .wait_while(self.lock(), |queue| queue.submissions.is_empty() && !queue.closed)
                .unwrap_or_else(PoisonError::into_inner);
            queue.submissions.pop_front()
        }

        fn run(&self, device: &wgpu::Device, health: &Health) {
            while let Some(index) = self.next() {
                // Without a time limit: when a limit expires, wgpu 30 may panic on a submission that has no
                // commands.
                let wait = wgpu::PollType::Wait { submission_index: Some(index), timeout: None };
                // wgpu panics here when the device is lost while it waits.
                match std::panic::catch_unwind(AssertUnwindSafe(|| device.poll(wait))) {
                    Ok(Ok(_)) => {}
                    Ok(Err(error)) => health.lost("wait for the device", error.to_string()),
                    Err(panic) => {
                        let said = panic.downcast_ref::<String>().map(String::as_str);
                        let said =
                            said.or(panic.downcast_ref::<&str>().copied()).unwrap_or("no reason is known");
                        health.lost("wait for the device", format!("the driver gave up: {said}"));
                        return;
                    }
                }
            }
            // A destroyed device frees its memory in this call. Nothing waits any more, so no error can be
            // lost.
            let _ = std::panic::catch_unwind(AssertUnwindSafe(|| device.poll(wgpu::PollType::Poll)));
        }
    }
}
