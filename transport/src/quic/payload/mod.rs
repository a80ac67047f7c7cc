//! The bytes of one message: cut into chunks for several streams, and put together again. It knows
//! no call and no group.

pub(crate) mod assembly;
pub(crate) mod chunks;
