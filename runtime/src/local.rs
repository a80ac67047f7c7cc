//! All ranks of a group in one process.

use std::time::Duration;

use kyklos_transport::Group;

/// Runs every rank of a group on a thread of its own, and returns the results by rank. A rank
/// leaves the group in order when its function returns. Blocks until all ranks have ended.
///
/// ```
/// use kyklos::local::on_threads;
/// use kyklos_transport::in_process_group;
///
/// assert_eq!(on_threads(in_process_group(3), |group| group.rank().0), [0, 1, 2]);
/// ```
///
/// # Panics
/// When `run` panics on any rank. The other ranks see that it has died, and end with an error
/// first.
pub fn on_threads<T: Send>(groups: Vec<Group>, run: impl Fn(Group) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let run = &run;
        // The thread owns the rank's group. A rank that panics drops it, which tells the other ranks.
        let threads: Vec<_> = groups
            .into_iter()
            .map(|group| {
                scope.spawn(move || {
                    let done = run(group.clone());
                    // The work is done. Peers that still wait for a message report their own error.
                    let _ = pollster::block_on(group.close(LEAVE));
                    done
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}

/// Longest wait for peers that have not taken all messages of a rank.
const LEAVE: Duration = Duration::from_secs(60);
