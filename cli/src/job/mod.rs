//! One attention call over all ranks of a group.

mod agreement;
mod bias_gradient;
mod call;
mod collect;
pub(crate) mod collective;
mod gradients;
pub(crate) mod here;
pub(crate) mod on_loss;
mod page;
mod publish;
pub(crate) mod rank;
pub(crate) mod refusal;
pub(crate) mod report;
mod settings;
pub(crate) mod shares;
mod terms;

pub(crate) use self::call::Job;
pub(crate) use self::settings::{Outputs, Settings};
