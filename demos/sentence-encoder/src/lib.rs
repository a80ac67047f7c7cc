//! The sentence encoder MiniLM in candle, whose tokens are split over the ranks of a Kyklos group.
//!
//! | module | contents |
//! |---|---|
//! | [`model`] | the network: all of it but attention, which the caller passes in |
//! | [`texts`] | texts as one packed row of tokens |
//! | [`ranks`] | the network on one rank of a group: attention and the mean over tokens through `kyklos::Session` |
//! | [`alone`] | the network in one process, with candle's own attention: the reference of the demonstration |
//! | [`nearest`] | which embeddings are close to each other |
//! | [`processes`] | starts the ranks on this host |
#![forbid(unsafe_code)]

pub mod alone;
pub mod devices;
pub mod error;
pub mod model;
pub mod nearest;
pub mod processes;
pub mod ranks;
pub mod texts;

pub use error::{Error, Result};
