//! The CUDA kernels on an emulator of their instructions. Needs a C++ compiler, no GPU and no CUDA.
//!
//! Linux only: the emulator maps memory at fixed addresses.

#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "a check that cannot go on fails")]

#[path = "../../../tests/amount.rs"]
mod amount;
mod attention;
mod backward;
mod backward_call;
mod call;
mod convert;
mod equal_logits;
mod hopper;
mod instructions;
mod job;
mod parallel;
mod planted_bugs;
mod program;
mod states;
