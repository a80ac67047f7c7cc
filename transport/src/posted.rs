//! Completions of calls.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures_channel::oneshot;

use crate::error::TransportError;

/// Completion of a call: a future that any thread may wait for with any executor.
#[must_use = "the call continues if this is dropped, but then its error is lost"]
#[derive(Debug)]
pub struct Posted<T> {
    receiver: oneshot::Receiver<Result<T, TransportError>>,
}

/// The sending side of a [`Posted`].
#[derive(Debug)]
pub(crate) struct Completer<T> {
    sender: oneshot::Sender<Result<T, TransportError>>,
}

impl<T> Posted<T> {
    pub(crate) fn pair() -> (Completer<T>, Self) {
        let (sender, receiver) = oneshot::channel();
        (Completer { sender }, Self { receiver })
    }
}

impl<T> Completer<T> {
    /// Ends the completion. It is no error if the caller has dropped the future.
    pub(crate) fn complete(self, value: Result<T, TransportError>) {
        let _ = self.sender.send(value);
    }
}

impl<T> Future for Posted<T> {
    type Output = Result<T, TransportError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.receiver)
            .poll(context)
            .map(|result| result.unwrap_or_else(|_| Err(TransportError::Closed)))
    }
}
