//! Helpers without weights: the owner's side, for the Python code in `kyklos/_helpers/`.

mod call;
mod owner;

pub(crate) use call::{Flight, SharedCall};
pub(crate) use owner::Owner;
