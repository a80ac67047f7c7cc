//! The proof of a world's plans, without running them.
//!
//! 1. **Each plan by itself**, step by step: what is read has been written, what is written is written once, nothing
//!    is freed that a message still needs, copies and merges join like with like, and every state that becomes
//!    output has met every key that its rows can see exactly once.
//! 2. **All plans together**: every message that is sent is received, and is what the receiver declared.
//! 3. **No deadlock**, though a send completes only when its receive has been posted.
//! 4. Of the plans of a repair ([`check_repair`]): **every buffer that they keep was there**, with the content that they
//!    declare: the interrupted plans are walked up to the progress of each rank.
//!
//! Since every buffer says which tokens and heads of what it holds and every step preserves that, a rank whose
//! output is written whole has the right output.

mod met;
mod proof;
mod repair;
mod states;
mod together;
mod walk;
mod world;

pub use repair::{RemainingBuffers, check_repair, remaining_buffers};
pub use world::{RankCheck, check};
