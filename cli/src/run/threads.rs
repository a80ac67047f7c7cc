//! Ranks of one process, each on a thread of its own.

use crate::failure::{Failure, Result};

/// Calls `run` for every rank, each on its own thread. Returns the results in the order of `ranks`,
/// or the failure that caused the others.
pub(crate) fn on_threads<R: Send, T: Send>(
    ranks: impl IntoIterator<Item = R>,
    run: impl Fn(R) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let run = &run;
    let results: Vec<Result<T>> = std::thread::scope(|scope| {
        let threads: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(move || run(rank))).collect();
        threads
            .into_iter()
            .map(|thread| {
                thread.join().unwrap_or_else(|_| Err(Failure::run("a rank panicked: this is a bug")))
            })
            .collect()
    });
    // A rank that failed by itself is the cause; the others report the failure of the group.
    let cause =
        results.iter().filter_map(|result| result.as_ref().err()).min_by_key(|failure| failure.of_group);
    match cause {
        Some(failure) => Err(failure.clone()),
        None => results.into_iter().collect(),
    }
}
