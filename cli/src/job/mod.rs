//! One attention call over all ranks of a group.

mod collect;
pub(crate) mod on_loss;
pub(crate) mod rank;
pub(crate) mod report;
