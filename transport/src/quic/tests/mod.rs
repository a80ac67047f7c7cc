//! Groups in one process: which ranks are admitted, which identities are refused, how lanes share
//! messages, how packets leave, and peers that misuse shared memory.

mod admission;
mod batches;
#[path = "../../../../tests/free_address.rs"]
pub(crate) mod free_address;
mod lanes;
mod renewal;
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
mod shared_memory;
mod trust;
