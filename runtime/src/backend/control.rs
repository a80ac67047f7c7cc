//! Cancelling a long computation.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use kyklos_transport::Pulse;

use crate::error::{Error, Result};

/// Cancels a long computation, and counts its pieces.
#[derive(Clone, Debug, Default)]
pub struct Control {
    /// Set by the caller: the computation ends between two pieces.
    cancel: Arc<AtomicBool>,
    /// Pieces done so far.
    pieces: Arc<AtomicU64>,
    /// Beats with every piece.
    pulse: Arc<Pulse>,
}

impl Control {
    /// A control that is cancelled when `cancel` becomes true.
    pub fn new(cancel: Arc<AtomicBool>) -> Self {
        Self { cancel, ..Self::default() }
    }

    /// The same control, which also beats `pulse` with every piece.
    pub fn beating(self, pulse: Arc<Pulse>) -> Self {
        Self { pulse, ..self }
    }

    /// Called by backends between two pieces.
    ///
    /// # Errors
    /// [`Error::Cancelled`] when the cancel flag is set.
    pub fn piece_done(&self) -> Result<()> {
        self.pieces.fetch_add(1, Ordering::Relaxed);
        self.pulse.beat();
        if self.cancel.load(Ordering::Relaxed) { Err(Error::Cancelled) } else { Ok(()) }
    }

    /// Pieces done so far, over all calls with this control.
    pub fn pieces_done(&self) -> u64 {
        self.pieces.load(Ordering::Relaxed)
    }
}

/// Lets other futures of the same task run once; backends call it between pieces.
pub async fn yield_now() {
    let mut yielded = false;
    std::future::poll_fn(|context| {
        if std::mem::replace(&mut yielded, true) {
            return std::task::Poll::Ready(());
        }
        context.waker().wake_by_ref();
        std::task::Poll::Pending
    })
    .await;
}
