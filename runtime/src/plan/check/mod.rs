//! The proof of a world's plans, without running them.
//!
//! 1. **Each plan by itself**, step by step: what is read has been written, what is written is written once, nothing
//!    is freed that a message still needs, copies and merges join like with like, and every state that becomes
//!    output has met every key that its rows can see exactly once.
//! 2. **All plans together**: every message that is sent is received, and is what the receiver declared.
//! 3. **No deadlock**, though a send completes only when its receive has been posted.
//! 4. Of plans that finish what others began ([`check_repair`]): **what they keep was there**, and was what they say,
//!    since the plans before are walked as far as they came.
//!
//! Since every buffer says which tokens and heads of what it holds and every step preserves that, a rank whose
//! output is written whole has the right output.

mod alone;
mod left;
mod met;
mod together;
mod world;

pub use left::{Left, check_repair, left};
pub use world::{RankCheck, check};
