//! Joining with a token: a rank without a file gets its identity from rank 0.
//!
//! Rank 0 has an *invitation*: an authority for this one group, and a secret. The *token* is what
//! the others need of it, in one line: where rank 0 is, the hash of the authority's key, and the
//! secret. A rank with the token dials rank 0 and refuses any peer whose certificate is not rank
//! 0's of that authority. Then it proves that it knows the secret, with an HMAC over keying
//! material that only the two ends of this TLS connection can compute (RFC 5705): the secret never
//! travels, and a proof is worth nothing on any other connection. Rank 0 signs the key that the
//! other made, and that never travels either. From there on the rank has an identity like any
//! other.
//!
//! The decisions are in `register.rs` and `applicant.rs`, without a network; `enrol_server.rs` and
//! `enrol.rs` do the I/O.

mod applicant;
mod binding;
pub(super) mod decoders;
mod enrol;
mod enrol_server;
mod given_keys;
mod invitation;
mod pinned;
mod register;
#[cfg(test)]
mod tests;
mod token;
mod wrong_tokens;

pub use self::applicant::Enrolled;
pub use self::enrol::{EnrolConfig, enrol};
pub(super) use self::enrol_server::EnrolServer;
pub use self::invitation::{Invitation, InvitationTerms};
pub(super) use self::register::kind_of_reject;
pub use self::token::Token;
