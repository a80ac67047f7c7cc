//! The CUDA kernels on the emulator of their instructions: no GPU, no CUDA, a C++ compiler.
//!
//! Linux only: the emulator asks for memory at addresses of its choice.

#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "a check that cannot go on fails")]

mod attention;
mod call;
mod convert;
mod hopper;
mod instructions;
mod job;
mod parallel;
mod planted_bugs;
mod program;
mod states;
