//! What the tasks of a rank share, and how ranks agree, watch each other and abort.

pub(crate) mod agreement;
pub(crate) mod control_connection;
pub(crate) mod coordinator;
pub(crate) mod core;
pub(crate) mod link;
pub(crate) mod notes;
pub(crate) mod stalls;
pub(crate) mod state;
