//! Copies from the device to the host, as futures.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll};

use bytes::Bytes;
use futures_channel::oneshot;
use kyklos::{Error, Result};

use crate::device::status::DeviceStatus;

/// A copy from the device to the host. It may be dropped, and it may outlive its backend. The bytes
/// are in pinned memory, which returns to the backend when the last reference to them is dropped.
pub struct Download(State);

#[derive(Debug)]
enum State {
    Pending(oneshot::Receiver<Result<Bytes>>, Arc<DeviceStatus>),
    Failed(Error),
}

impl Download {
    pub(in crate::device) fn pending(
        receiver: oneshot::Receiver<Result<Bytes>>,
        status: &Arc<DeviceStatus>,
    ) -> Self {
        Self(State::Pending(receiver, status.clone()))
    }

    pub(in crate::device) fn failed(error: Error) -> Self {
        Self(State::Failed(error))
    }
}

impl Future for Download {
    type Output = Result<Bytes>;

    fn poll(mut self: Pin<&mut Self>, context: &mut TaskContext<'_>) -> Poll<Self::Output> {
        match &mut self.0 {
            State::Failed(error) => Poll::Ready(Err(error.clone())),
            State::Pending(receiver, status) => Pin::new(receiver).poll(context).map(|got| {
                got.unwrap_or_else(|_| {
                    status.check()?;
                    Err(status.device_error("copy to the host", "the polling thread has ended"))
                })
            }),
        }
    }
}

impl fmt::Debug for Download {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Download").finish_non_exhaustive()
    }
}
