//! A copy from the device to the host, as a future.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll};

use bytes::Bytes;
use futures_channel::oneshot;
use kyklos::{Error, Result};

use super::status::DeviceStatus;

/// Ends with bytes of the device on the host; may be dropped, and may outlive its backend. The bytes lie in pinned
/// memory, which goes back to the backend with the last of them.
pub struct Download(Copying);

#[derive(Debug)]
enum Copying {
    Coming(oneshot::Receiver<Result<Bytes>>, Arc<DeviceStatus>),
    Failed(Error),
}

impl Download {
    pub(super) fn coming(receiver: oneshot::Receiver<Result<Bytes>>, status: &Arc<DeviceStatus>) -> Self {
        Self(Copying::Coming(receiver, status.clone()))
    }

    pub(super) fn failed(error: Error) -> Self {
        Self(Copying::Failed(error))
    }
}

impl Future for Download {
    type Output = Result<Bytes>;

    fn poll(mut self: Pin<&mut Self>, context: &mut TaskContext<'_>) -> Poll<Self::Output> {
        match &mut self.0 {
            Copying::Failed(error) => Poll::Ready(Err(error.clone())),
            Copying::Coming(receiver, status) => Pin::new(receiver).poll(context).map(|got| {
                got.unwrap_or_else(|_| {
                    status.check()?;
                    Err(status.device_error("copy to the host", "nobody looks after the device any more"))
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
