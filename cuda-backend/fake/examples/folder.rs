//! Prints the folder of the fake libraries, for tests that are not written in Rust. Builds them if
//! they are not there.

fn main() {
    println!("{}", kyklos_fake_cuda::folder().display());
}
