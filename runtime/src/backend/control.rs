//! Cancelling a long computation.

use std::fmt;
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
    told: Told,
}

/// Called with the share of each piece.
#[derive(Clone, Default)]
struct Told(Option<Arc<dyn Fn(f64) + Send + Sync>>);

impl fmt::Debug for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Told").field(&self.0.is_some()).finish()
    }
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

    /// The same control, which also calls `told` with the argument of [`Self::share_done`].
    pub fn telling(self, told: impl Fn(f64) + Send + Sync + 'static) -> Self {
        Self { told: Told(Some(Arc::new(told))), ..self }
    }

    /// [`Self::piece_done`] of a backend that knows which share of the work of this call, above 0
    /// and at most 1, the piece is. The shares of a call add up to 1, about.
    ///
    /// # Errors
    /// As [`Self::piece_done`].
    pub fn share_done(&self, share: f64) -> Result<()> {
        if let Told(Some(told)) = &self.told {
            told(share);
        }
        self.piece_done()
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
