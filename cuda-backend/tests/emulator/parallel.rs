//! Independent work on all cores.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Calls `work` for each of `0..count` and collects its results, in no particular order.
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
                        said.lock().expect("no thread panicked").push(word);
                    }
                }
            });
        }
    });
    said.into_inner().expect("no thread panicked")
}
