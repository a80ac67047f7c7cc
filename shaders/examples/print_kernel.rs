//! Prints the final WGSL of a kernel: `print_kernel NAME [tint]`, or without a name all names. With
//! `tint` as browsers compile it.

#[path = "../tests/catalogue/mod.rs"]
#[expect(dead_code, reason = "the tests use the rest")]
mod catalogue;

use std::process::ExitCode;

use kyklos_shaders::{Dialect, Kernel};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (name, dialect) = match &arguments[..] {
        [] => {
            catalogue::every_kernel().iter().map(Kernel::name).for_each(|name| println!("{name}"));
            return ExitCode::SUCCESS;
        }
        [name] => (name, Dialect::Naga),
        [name, dialect] if dialect == "tint" => (name, Dialect::Tint),
        _ => {
            eprintln!("print_kernel: say `NAME`, `NAME tint`, or nothing for all names");
            return ExitCode::FAILURE;
        }
    };
    match catalogue::every_kernel().iter().find(|kernel| kernel.name() == *name) {
        Some(kernel) => {
            print!("{}", kernel.source(dialect));
            ExitCode::SUCCESS
        }
        None => {
            eprintln!("print_kernel: `{name}` is not in the catalogue; without a name I print all names");
            ExitCode::FAILURE
        }
    }
}
