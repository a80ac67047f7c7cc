//! Helpers without weights: the owner and its helpers, for the Python code in `kyklos/_helpers/`.

mod call;
mod helping;
mod owner;

pub(crate) use call::{Flight, SharedCall};
pub(crate) use helping::help_out;
pub(crate) use owner::Owner;
