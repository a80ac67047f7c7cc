//! The CUDA kernels on the emulator of their instructions: no GPU, no CUDA, a C++ compiler.

mod attention;
mod call;
mod instructions;
mod job;
mod program;
