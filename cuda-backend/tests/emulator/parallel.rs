//! Independent pieces of work on all cores.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Does `work` for each of `0..count`; what it has to say, in no order.
pub(crate) fn in_parallel<T: Send>(count: usize, work: impl Fn(usize) -> Option<T> + Sync) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let said = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                loop {
                    let n = next.fetch_add(1, Ordering::Relaxed);
                    if n >= count {
                        break;
                    }
                    if let Some(word) = work(n) {
                        said.lock().expect("nobody panicked").push(word);
                    }
                }
            });
        }
    });
    said.into_inner().expect("nobody panicked")
}
