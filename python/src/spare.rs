//! Memory for copies of arrays, used again by later calls: to the system, each new page costs as
//! much as copying several.

use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;

/// Most bytes that are kept between calls.
const KEPT: usize = 256 << 20;
/// Smaller ones are left to the allocator, which keeps them itself.
const LEAST: usize = 1 << 20;

static SPARE: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());

/// Memory that becomes spare when it is no longer in use.
struct Lent(Vec<u8>);

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let bytes = self.0.capacity();
        if !(LEAST..=KEPT).contains(&bytes) {
            return;
        }
        let mut spare = lock();
        // The oldest go first.
        while spare.iter().map(Vec::capacity).sum::<usize>() + bytes > KEPT {
            spare.remove(0);
        }
        spare.push(std::mem::take(&mut self.0));
    }
}

fn lock() -> MutexGuard<'static, Vec<Vec<u8>>> {
    SPARE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `bytes` bytes that `fill` appends to an empty vector; `None` without memory for them.
pub(crate) fn filled(bytes: usize, fill: impl FnOnce(&mut Vec<u8>)) -> Option<Bytes> {
    let kept = {
        let mut spare = lock();
        // At most half of it unused.
        let fits = |kept: &Vec<u8>| (bytes..=bytes.saturating_mul(2)).contains(&kept.capacity());
        spare.iter().position(fits).map(|index| spare.remove(index))
    };
    let mut memory = kept.unwrap_or_default();
    memory.clear();
    memory.try_reserve_exact(bytes).ok()?;
    fill(&mut memory);
    Some(Bytes::from_owner(Lent(memory)))
}
