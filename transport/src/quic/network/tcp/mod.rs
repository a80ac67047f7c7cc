//! QUIC inside TCP: tunnels, dialling, and what a rank makes of a refusal.

pub(crate) mod delay_window;
pub(crate) mod refusal;
pub(crate) mod routes;
pub(crate) mod staggered;
pub(crate) mod tunnel;
