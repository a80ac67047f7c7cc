//! Core dumps without what is in memory: a rank has its private key there as long as it runs, and
//! systems keep cores and send them.

/// From now on a core of this process, and of those that it starts, has no memory but that of
/// files. A user may undo it for a process in the file that this writes.
pub(crate) fn leave_memory_out() {
    // Where it cannot be written there is no such file: cores are as the system makes them.
    #[cfg(target_os = "linux")]
    let _ = std::fs::write("/proc/self/coredump_filter", HEADERS_ONLY);
}

/// Only the headers of programs and libraries, by which a core is found to be of a release (man 5
/// core).
#[cfg(target_os = "linux")]
const HEADERS_ONLY: &str = "0x10";
