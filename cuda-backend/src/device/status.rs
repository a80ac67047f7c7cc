//! Whether a device still works, and errors that name it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use kyklos::{Error, Result};

use crate::driver::DriverError;

/// The device's name, and the error by which it was lost, if it was. Every later call returns that
/// error.
#[derive(Debug)]
pub(crate) struct DeviceStatus {
    device: Arc<str>,
    lost: Mutex<Option<Error>>,
    /// Exchanges of messages that are under way.
    exchanges: AtomicUsize,
    /// Times of short work that last, and when the first of them began.
    short_work: Mutex<(usize, Option<Instant>)>,
}

/// While this lives, the device may wait for messages of other ranks, and does not count as stuck:
/// whoever has this looks after them.
#[derive(Debug)]
pub(crate) struct AwaitsMessages(Arc<DeviceStatus>);

impl Drop for AwaitsMessages {
    fn drop(&mut self) {
        self.0.exchanges.fetch_sub(1, Ordering::Relaxed);
    }
}

impl DeviceStatus {
    pub(crate) fn new(device: Arc<str>) -> Self {
        Self { device, lost: Mutex::default(), exchanges: AtomicUsize::new(0), short_work: Mutex::default() }
    }

    /// Notes that the device may wait for messages.
    pub(crate) fn await_messages(self: &Arc<Self>) -> AwaitsMessages {
        self.exchanges.fetch_add(1, Ordering::Relaxed);
        AwaitsMessages(self.clone())
    }

    pub(crate) fn awaits_messages(&self) -> bool {
        self.exchanges.load(Ordering::Relaxed) > 0
    }

    /// Begins or ends a time of short work; see [`kyklos::backend::ShortWork`].
    pub(crate) fn expect_short_work(&self, on: bool) {
        let mut times = self.short_work.lock().unwrap_or_else(PoisonError::into_inner);
        let (count, began) = &mut *times;
        *count = if on { *count + 1 } else { count.saturating_sub(1) };
        *began = (*count > 0).then(|| began.unwrap_or_else(Instant::now));
    }

    /// When the time of short work began, if it lasts.
    pub(super) fn short_work_since(&self) -> Option<Instant> {
        self.short_work.lock().unwrap_or_else(PoisonError::into_inner).1
    }

    pub(crate) fn device(&self) -> &str {
        &self.device
    }

    /// # Errors
    /// The error by which the device was lost.
    pub(crate) fn check(&self) -> Result<()> {
        self.lock().clone().map_or(Ok(()), Err)
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.lock().is_some()
    }

    /// The error of an operation whose call of the driver failed. Marks the device as lost if the
    /// context is destroyed.
    pub(crate) fn error(&self, operation: &str, cause: &DriverError) -> Error {
        let error = self.device_error(operation, &cause.to_string());
        if cause.ends_context() { self.mark_lost(error) } else { error }
    }

    /// Marks the device as lost by `error`, unless it is lost already. Returns the error by which
    /// it was lost.
    pub(crate) fn mark_lost(&self, error: Error) -> Error {
        self.lock().get_or_insert(error).clone()
    }

    pub(crate) fn device_error(&self, operation: &str, native: &str) -> Error {
        Error::Device {
            device: self.device.to_string(),
            operation: operation.to_owned(),
            native: native.to_owned(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Error>> {
        self.lost.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn driver_error(code: u32) -> DriverError {
        DriverError { call: "cuX", code, name: "CUDA_ERROR_X".to_owned(), text: "it broke".to_owned() }
    }

    #[test]
    fn short_work_lasts_from_the_first_time_that_begins_to_the_last_that_ends() {
        let status = DeviceStatus::new("GPU 0".into());
        assert_eq!(status.short_work_since(), None);
        status.expect_short_work(true);
        let began = status.short_work_since();
        assert!(began.is_some());
        status.expect_short_work(true);
        status.expect_short_work(false);
        assert_eq!(status.short_work_since(), began);
        status.expect_short_work(false);
        assert_eq!(status.short_work_since(), None);
    }

    #[test]
    fn after_the_context_is_destroyed_every_call_returns_the_first_error() {
        let status = DeviceStatus::new("GPU 0".into());
        let error = status.error("copy to the host", &driver_error(1));
        assert_eq!(error.to_string(), "GPU 0: copy to the host failed: cuX: CUDA_ERROR_X (1): it broke");
        assert_eq!(status.check(), Ok(()));
        let first = status.error("launch attend", &driver_error(700));
        assert_eq!(status.error("launch merge", &driver_error(719)), first);
        assert_eq!(status.check(), Err(first));
    }
}
