//! The thread on which the I/O of this process's ranks runs.

use std::convert::Infallible;
use std::future::Future;

use tokio::runtime::Handle;
use tokio::sync::mpsc;

use crate::error::TransportError;

/// Keeps the I/O thread running for as long as it exists.
pub(crate) type Alive = mpsc::Sender<Infallible>;

/// A running I/O thread; it ends when the last [`Alive`] is dropped.
#[derive(Debug)]
pub(crate) struct IoThread {
    runtime: Handle,
    alive: Alive,
}

impl IoThread {
    pub(crate) fn start() -> Result<Self, TransportError> {
        let cannot = |error| TransportError::bootstrap(format!("cannot start the I/O thread: {error}"));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(cannot)?;
        let handle = runtime.handle().clone();
        let (alive, mut all_gone) = mpsc::channel::<Infallible>(1);
        let thread = std::thread::Builder::new().name("kyklos-io".into());
        thread
            .spawn(move || {
                runtime.block_on(all_gone.recv());
            })
            .map_err(cannot)?;
        Ok(Self { runtime: handle, alive })
    }

    /// Its runtime, and what keeps it running.
    pub(crate) fn into_parts(self) -> (Handle, Alive) {
        (self.runtime, self.alive)
    }

    pub(crate) fn alive(&self) -> Alive {
        self.alive.clone()
    }

    /// Runs a future on the thread and waits for it. Must not be called on the thread itself.
    pub(crate) fn run<T: Send + 'static>(
        self,
        future: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, TransportError> {
        let (result, ended) = std::sync::mpsc::sync_channel(1);
        self.runtime.spawn(async move {
            let _ = result.send(future.await);
        });
        ended.recv().map_err(|_| TransportError::bootstrap("the I/O thread has ended"))
    }
}
