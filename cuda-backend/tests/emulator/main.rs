//! The CUDA kernels on the emulator of their instructions: no GPU, no CUDA, a C++ compiler.

#![expect(clippy::unwrap_used, reason = "a check that cannot go on fails")]

mod attention;
mod call;
mod faults;
mod instructions;
mod job;
mod parallel;
mod program;
