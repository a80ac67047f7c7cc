//! The README, as a user reads it: its example compiles and runs with the dependencies of this crate.
#![doc = include_str!("../../../README.md")]
