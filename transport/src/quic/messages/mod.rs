//! Messages between two ranks: requests for them, sending and receiving.

pub(crate) mod receiving;
pub(crate) mod requests;
pub(crate) mod sending;
