//! What goes on while the executor waits for something.

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll};

use super::ahead::Ahead;
use crate::collective::{Arrivals, ExchangeError};
use kyklos_plan::plan::Recv;

/// What goes on while the executor waits: exchanges that it has posted, and steps that it has
/// submitted.
pub(super) struct Background<'r, Buffer> {
    pub(super) exchanges: Vec<InFlight<'r, Buffer>>,
    pub(super) ahead: Ahead<'r>,
}

/// An exchange that was posted and not yet waited for.
pub(super) struct InFlight<'r, Buffer> {
    pub(super) id: u32,
    pub(super) recvs: &'r [Recv],
    pub(super) arrivals: Arrivals<'r, Buffer>,
    pub(super) ended: Option<Result<Vec<Vec<Buffer>>, ExchangeError>>,
}

impl<Buffer> Background<'_, Buffer> {
    /// Moves every exchange under way.
    pub(super) fn poll_exchanges(&mut self, context: &mut Context<'_>) {
        for exchange in self.exchanges.iter_mut().filter(|exchange| exchange.ended.is_none()) {
            if let Poll::Ready(ended) = exchange.arrivals.as_mut().poll(context) {
                exchange.ended = Some(ended);
            }
        }
    }
}

/// Runs `future`, moves every exchange under way meanwhile, and notes the ends of submitted steps.
pub(super) async fn drive<T, Buffer>(
    background: &mut Background<'_, Buffer>,
    future: impl Future<Output = T>,
) -> T {
    let mut future = pin!(future);
    std::future::poll_fn(|context| {
        background.poll_exchanges(context);
        background.ahead.advance(context);
        future.as_mut().poll(context)
    })
    .await
}

/// As [`drive`]. `None` if a step that was submitted fails before.
pub(super) async fn drive_unless_failed<T, Buffer>(
    background: &mut Background<'_, Buffer>,
    future: impl Future<Output = T>,
) -> Option<T> {
    let mut future = pin!(future);
    std::future::poll_fn(|context| {
        background.poll_exchanges(context);
        background.ahead.advance(context);
        match future.as_mut().poll(context) {
            Poll::Pending if background.ahead.has_failed() => Poll::Ready(None),
            other => other.map(Some),
        }
    })
    .await
}
