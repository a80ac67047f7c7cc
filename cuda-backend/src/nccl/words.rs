//! Which messages go by NCCL, in words.

use super::collective::NcclCollective;

impl std::fmt::Display for NcclCollective {
    /// For people: the way of messages, such as `NCCL 2.28.9 between ranks 0, 2; through host
    /// memory from and to rank 1 (…)`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let islands = || self.islands().iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        match (self.islands(), self.outside()) {
            ([all], []) => write!(f, "NCCL {}", all.version),
            (_, []) => write!(f, "{}; between these through host memory", islands()),
            (_, outside) => {
                let outside = outside.iter().map(|one| format!("rank {} ({})", one.rank, one.why));
                let outside: Vec<_> = outside.collect();
                write!(f, "{}; through host memory from and to {}", islands(), outside.join(", "))
            }
        }
    }
}
