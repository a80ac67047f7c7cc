//! Work for each rank, on the cores of this machine.

/// Fewer ranks than this on a thread are not worth starting it: their plans take about as long as
/// that.
const RANKS_OF_THREAD: usize = 64;

/// `work` of each of `ranks` ranks, in their order. On several threads if there are many ranks, and
/// where threads can be started: a browser has one.
pub(crate) fn for_each_rank<T: Send>(ranks: u32, work: impl Fn(u32) -> T + Sync) -> Vec<T> {
    let worth = ranks as usize / RANKS_OF_THREAD;
    if worth < 2 {
        return (0..ranks).map(work).collect();
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let each = ranks.div_ceil(u32::try_from(cores.min(worth)).unwrap_or(u32::MAX));
    let share = |first: u32| (first..ranks.min(first + each)).map(&work).collect::<Vec<T>>();
    let firsts: Vec<u32> = (0..ranks).step_by(each as usize).collect();
    let share = &share;
    std::thread::scope(|scope| {
        // The calling thread takes the first share, and each one for which no thread could be started.
        let others: Vec<_> = firsts
            .iter()
            .skip(1)
            .map(|first| (*first, std::thread::Builder::new().spawn_scoped(scope, move || share(*first))))
            .collect();
        let mut results = share(0);
        for (first, thread) in others {
            match thread.map(std::thread::ScopedJoinHandle::join) {
                Ok(Ok(part)) => results.extend(part),
                Ok(Err(panic)) => std::panic::resume_unwind(panic),
                Err(_not_started) => results.extend(share(first)),
            }
        }
        results
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_is_there_once_and_in_order() {
        for ranks in [0, 1, 63, 64, 127, 128, 129, 1000, 1024] {
            assert_eq!(for_each_rank(ranks, |rank| rank), (0..ranks).collect::<Vec<_>>());
        }
    }

    #[test]
    #[should_panic(expected = "rank 1000")]
    fn a_panic_of_any_thread_is_the_callers() {
        for_each_rank(1024, |rank| assert_ne!(rank, 1000, "rank 1000"));
    }
}
