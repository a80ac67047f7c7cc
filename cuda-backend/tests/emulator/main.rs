//! The CUDA kernels on the emulator of their instructions: no GPU, no CUDA, a C++ compiler.

mod attention;
mod call;
mod faults;
mod instructions;
mod job;
mod parallel;
mod program;
