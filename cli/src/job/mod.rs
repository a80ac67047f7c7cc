//! One attention call over all ranks of a group.

mod agreement;
mod call;
pub(crate) mod collective;
pub(crate) mod here;
pub(crate) mod on_loss;
pub(crate) mod rank;
pub(crate) mod refusal;
pub(crate) mod results;
mod settings;
pub(crate) mod shares;
mod terms;

pub(crate) use self::call::Job;
pub(crate) use self::settings::{Outputs, Settings};
