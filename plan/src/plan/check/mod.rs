//! The proof of a plan set, without running it.
//!
//! 1. **Each plan by itself**, step by step: a step reads only written data; each part is written
//!    once; no buffer is freed while a message still needs it; copies and merges join data of the
//!    same kind; and every state that becomes output has met every key that its rows can see
//!    exactly once.
//! 2. **All plans together**: every message that is sent is received, and has the content that the
//!    receiver declared.
//! 3. **No deadlock**, though a send completes only when its receive has been posted.
//!
//! Every buffer declares the tokens and heads of its content, and every step preserves this
//! declaration. So a rank whose output is written whole has the right output.

mod gradients;
mod met;
mod proof;
mod set;
mod states;
mod together;
mod walk;

pub use set::{RankCheck, check};
pub use together::check_in_order;
