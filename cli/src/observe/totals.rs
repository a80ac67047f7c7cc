//! Time that ranks have spent over all their operations.

use std::sync::{Mutex, MutexGuard, PoisonError};

use kyklos::RankReport;
use kyklos_transport::Rank;

use crate::observe::record::format::Spent;

/// By rank. Written after every step; read by records and metrics.
#[derive(Debug)]
pub(crate) struct Totals(Vec<Mutex<Total>>);

/// The time of one rank.
#[derive(Clone, Debug, Default)]
pub(crate) struct Total {
    pub(crate) operations: u64,
    /// In earlier operations: compute, wait, the parts of wait for late ranks and for the network,
    /// copy.
    before_ns: [u64; 5],
    op: u64,
    so_far_ns: [u64; 5],
}

impl Totals {
    pub(crate) fn new(size: u32) -> Self {
        Self((0..size).map(|_| Mutex::default()).collect())
    }

    /// `rank` has spent this much in operation `op` so far.
    pub(crate) fn counted(&self, rank: Rank, op: u64, so_far: &RankReport) {
        let mut total = self.lock(rank);
        if total.op != op {
            let Total { before_ns, so_far_ns, .. } = &mut *total;
            before_ns.iter_mut().zip(so_far_ns).for_each(|(before, so_far)| *before += *so_far);
            total.op = op;
        }
        let RankReport { compute_ns, wait_ns, credit_blocked_ns, send_blocked_ns, copy_ns, .. } = *so_far;
        total.so_far_ns = [compute_ns, wait_ns, credit_blocked_ns, send_blocked_ns, copy_ns];
    }

    pub(crate) fn done(&self, rank: Rank) {
        self.lock(rank).operations += 1;
    }

    pub(crate) fn of(&self, rank: Rank) -> Total {
        self.lock(rank).clone()
    }

    fn lock(&self, rank: Rank) -> MutexGuard<'_, Total> {
        self.0[rank.0 as usize].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Total {
    /// All time, by kind.
    pub(crate) fn spent(&self) -> Spent {
        let [compute_ns, wait_ns, credit_blocked_ns, send_blocked_ns, device_copy_ns] =
            std::array::from_fn(|index| self.before_ns[index] + self.so_far_ns[index]);
        let receive_wait_ns = wait_ns.saturating_sub(credit_blocked_ns + send_blocked_ns);
        Spent { compute_ns, receive_wait_ns, credit_blocked_ns, send_blocked_ns, device_copy_ns }
    }

    /// The same with names.
    pub(crate) fn split_ns(&self) -> [(&'static str, u64); 5] {
        let Spent { compute_ns, receive_wait_ns, credit_blocked_ns, send_blocked_ns, device_copy_ns } =
            self.spent();
        [
            ("compute", compute_ns),
            ("receive-wait", receive_wait_ns),
            ("credit-blocked", credit_blocked_ns),
            ("send-blocked", send_blocked_ns),
            ("device-copy", device_copy_ns),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_add_up_and_steps_of_one_do_not() {
        let totals = Totals::new(1);
        let spent = |op, wait_ns| {
            let (credit_blocked_ns, send_blocked_ns, copy_ns) = (3, 1, 2);
            let report =
                RankReport { wait_ns, credit_blocked_ns, send_blocked_ns, copy_ns, ..RankReport::default() };
            totals.counted(Rank(0), op, &report);
        };
        spent(0, 10);
        spent(0, 20);
        spent(1, 5);
        let split = totals.of(Rank(0)).split_ns();
        assert_eq!(split.map(|(_, ns)| ns), [0, 17, 6, 2, 4]);
        let names = ["compute", "receive-wait", "credit-blocked", "send-blocked", "device-copy"];
        assert_eq!(split.map(|(name, _)| name), names);
    }
}
