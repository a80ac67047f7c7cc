//! Failures that the driver reports outside a call, and the futures that they end.

use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_channel::oneshot;
use futures_util::FutureExt;
use futures_util::future::{Either, Shared, select};

use crate::error::{Error, Result};

/// Whether a device works. Shared by the device, its callbacks and its futures.
#[derive(Debug)]
pub(in crate::backend::wgpu) struct Health {
    device: Arc<str>,
    state: Mutex<Failures>,
    loss: Loss,
}

/// Resolves when the device is lost. When a driver dies, wgpu drops the callbacks of work in
/// flight, so every future that waits for a callback waits for this as well.
#[derive(Clone, Debug)]
pub(in crate::backend::wgpu) struct Loss(Shared<oneshot::Receiver<Infallible>>);

#[derive(Debug)]
struct Failures {
    /// Why the device was lost: every later call fails with it.
    lost: Option<Error>,
    /// A failure that the next call returns, once.
    failed: Option<Error>,
    /// Dropped when the device is lost.
    alive: Option<oneshot::Sender<Infallible>>,
}

impl Health {
    pub(in crate::backend::wgpu) fn new(device: Arc<str>) -> Self {
        let (alive, loss) = oneshot::channel();
        Self {
            device,
            state: Mutex::new(Failures { lost: None, failed: None, alive: Some(alive) }),
            loss: Loss(loss.shared()),
        }
    }

    /// The device is lost. The first reason is kept.
    pub(in crate::backend::wgpu) fn lost(&self, operation: &str, native: String) {
        let error = self.error(operation, native);
        let alive = {
            let mut state = self.lock();
            state.lost.get_or_insert(error);
            state.alive.take()
        };
        // Wakes the waiting futures after the lock is released.
        drop(alive);
    }

    pub(in crate::backend::wgpu) fn failed(&self, operation: &str, native: String) {
        let error = self.error(operation, native);
        self.lock().failed.get_or_insert(error);
    }

    /// Returns the failure since the last call, if there is one.
    pub(in crate::backend::wgpu) fn check(&self) -> Result<()> {
        let mut state = self.lock();
        match state.failed.take().or_else(|| state.lost.clone()) {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    pub(in crate::backend::wgpu) fn is_lost(&self) -> bool {
        self.lock().lost.is_some()
    }

    /// Resolves when the device is lost.
    pub(in crate::backend::wgpu) fn loss(&self) -> Loss {
        self.loss.clone()
    }

    pub(in crate::backend::wgpu) fn error(&self, operation: &str, native: impl ToString) -> Error {
        Error::Device {
            device: self.device.to_string(),
            operation: operation.to_owned(),
            native: native.to_string(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Failures> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Loss {
    /// The value of `receiver`; `None` when the device is lost first.
    pub(in crate::backend::wgpu) async fn or<T>(self, receiver: oneshot::Receiver<T>) -> Option<T> {
        match select(receiver, self.0).await {
            Either::Left((got, _)) => got.ok(),
            Either::Right(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    fn health() -> Health {
        Health::new(Arc::from("a device"))
    }

    #[test]
    fn a_loss_ends_every_wait_and_stays() {
        let health = health();
        let (_forgotten, first) = oneshot::channel::<()>();
        let (_forgotten_too, second) = oneshot::channel::<()>();
        let (mut first, mut second) = (Box::pin(health.loss().or(first)), Box::pin(health.loss().or(second)));
        assert_eq!((&mut first).now_or_never(), None);
        assert_eq!((&mut second).now_or_never(), None);
        health.lost("wait for the device", "it was reset".to_owned());
        health.lost("use the device", "a consequence".to_owned());
        assert_eq!(first.now_or_never(), Some(None));
        assert_eq!(second.now_or_never(), Some(None));
        for _ in 0..2 {
            let text = health.check().expect_err("the device is lost").to_string();
            assert_eq!(text, "a device: wait for the device failed: it was reset");
        }
    }

    #[test]
    fn a_value_that_arrived_before_the_loss_is_returned() {
        let health = health();
        let (sender, receiver) = oneshot::channel();
        sender.send(7).expect("the receiver lives");
        health.lost("use the device", "gone".to_owned());
        assert_eq!(health.loss().or(receiver).now_or_never(), Some(Some(7)));
    }

    #[test]
    fn a_failure_is_returned_once() {
        let health = health();
        health.failed("use the device", "a bad call".to_owned());
        assert!(health.check().is_err());
        assert_eq!(health.check(), Ok(()));
    }
}
