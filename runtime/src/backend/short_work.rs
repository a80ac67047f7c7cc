//! The work while a device is measured.

use std::fmt;
use std::time::Duration;

use super::{Backend, Device};

/// While it lives, the work on a device is short, as that of a measurement: a device that completes
/// nothing for [`ShortWork::AT_MOST`] counts as lost, where its backend can tell. For other work it
/// has more time, which a backend chooses.
///
/// ```
/// # #[cfg(feature = "cpu")] {
/// use kyklos::backend::{Device, ShortWork};
///
/// let device = Device::cpu();
/// let short = ShortWork::on(&device);
/// // … short work …
/// drop(short);
/// # }
/// ```
#[must_use = "the time ends when it is dropped"]
pub struct ShortWork(Device);

impl ShortWork {
    /// The longest time in which a device that works completes nothing. Much longer than the first
    /// kernels of a measurement take.
    pub const AT_MOST: Duration = Duration::from_secs(10);

    /// Begins the time. Times of one device may overlap.
    pub fn on(device: &Device) -> Self {
        device.expect_short_work(true);
        Self(device.clone())
    }
}

impl Drop for ShortWork {
    fn drop(&mut self) {
        self.0.expect_short_work(false);
    }
}

impl fmt::Debug for ShortWork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ShortWork").field(&self.0).finish()
    }
}
