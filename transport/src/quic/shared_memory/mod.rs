//! Payload through memory that two ranks on one host share: the memory, how the two ranks meet, and
//! what they tell each other about its use (ADR 0033). It knows no call and no group. On 64-bit
//! Linux; other systems use QUIC for all messages.
//!
//! The peer has a certificate, and may still be hostile. It can change the shared bytes at any
//! time, so they are copied into private memory before anything is decided by them, and no
//! reference leads into them. Sizes are fixed by the number of ranks and sealed by the kernel; no
//! length comes from the peer.

#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
pub(crate) mod meeting;
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
pub(crate) mod notices;
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
pub(crate) mod segment;
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
pub(crate) mod sender;
#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
#[path = "sender_elsewhere.rs"]
pub(crate) mod sender;
#[cfg_attr(
    not(all(target_os = "linux", target_pointer_width = "64")),
    allow(dead_code, reason = "no other system shares memory")
)]
pub(crate) mod sharing;

/// Whether this system can share memory at all.
pub(crate) const MEMORY_CAN_BE_SHARED: bool = cfg!(all(target_os = "linux", target_pointer_width = "64"));

#[cfg(test)]
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
mod tests;
