//! The program `kyklos`. All of it is in the library, where tests reach what reads foreign bytes.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    kyklos_cli::main()
}
