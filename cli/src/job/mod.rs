//! One attention call over all ranks of a group.

mod call;
mod collect;
pub(crate) mod here;
pub(crate) mod on_loss;
pub(crate) mod rank;
pub(crate) mod refusal;
pub(crate) mod report;

pub(crate) use self::call::{Job, Outputs, Settings};
