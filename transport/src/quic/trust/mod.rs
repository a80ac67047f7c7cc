//! Identities of ranks: certificates, their authority, the files that hold them, and TLS.

#[cfg(any(windows, test))]
pub(crate) mod access_list;
pub(crate) mod authority;
pub(crate) mod identity;
pub(crate) mod job;
pub(crate) mod key_hash;
pub(crate) mod names;
pub(crate) mod presented;
pub(crate) mod private_file;
mod protection;
pub(crate) mod provider;
pub(crate) mod revoked;
pub(crate) mod tls;
pub(crate) mod validity;
pub(crate) mod verifier;
