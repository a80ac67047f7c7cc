//! How a process of `kyklos launch` has ended.

use std::fmt;
use std::process::ExitStatus;

/// A process that has ended.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) rank: u32,
    pub(super) status: ExitStatus,
    /// It has said so, with [`LAST_LINE`](crate::interrupt::LAST_LINE).
    pub(super) said_so: bool,
}

impl Ended {
    /// Whether another process has ended it. Unix says so. On Windows who does it chooses the exit
    /// code, and 0 is one of them; but then the process has not said that it ends. A process
    /// that panics ends by itself and does not say it.
    pub(super) fn is_killed(&self) -> bool {
        match self.status.code() {
            None => true,
            Some(code) => cfg!(not(unix)) && !self.said_so && code != EXIT_PANIC,
        }
    }

    /// Whether it has ended well, which is when the result is complete.
    pub(super) fn is_well(&self) -> bool {
        self.status.success() && !self.is_killed()
    }

    /// Whether it has ended by itself, with this exit code.
    pub(super) fn has_code(&self, code: u8) -> bool {
        !self.is_killed() && self.status.code() == Some(i32::from(code))
    }
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let killed = if cfg!(not(unix)) && self.is_killed() { "was killed and " } else { "" };
        write!(f, "rank {} {killed}ended with {}", self.rank, self.status)
    }
}

/// The exit code that Rust gives to a process whose main thread panics.
const EXIT_PANIC: i32 = 101;

#[cfg(test)]
mod tests {
    use super::*;

    /// A process that ended by itself, or was killed, with each of the exit codes that it can have
    /// then.
    fn ends() -> (Vec<Ended>, Vec<Ended>) {
        #[cfg(unix)]
        let (of_code, killed): (fn(u8) -> ExitStatus, _) = {
            use std::os::unix::process::ExitStatusExt;
            // A signal in the low bits, an exit code above them.
            (|code| ExitStatus::from_raw(i32::from(code) << 8), vec![ExitStatus::from_raw(9)])
        };
        #[cfg(windows)]
        let (of_code, killed): (fn(u8) -> ExitStatus, _) = {
            use std::os::windows::process::ExitStatusExt;
            let killed = [0, 1, 2, 3, 0xC000_0005, u32::MAX].map(ExitStatus::from_raw);
            (|code| ExitStatus::from_raw(u32::from(code)), killed.to_vec())
        };
        let by_itself = (0..4).map(|code| Ended { rank: 1, status: of_code(code), said_so: true });
        let panicked = Ended { rank: 1, status: of_code(101), said_so: false };
        let killed = killed.into_iter().map(|status| Ended { rank: 1, status, said_so: false });
        (by_itself.chain([panicked]).collect(), killed.collect())
    }

    #[test]
    fn a_killed_process_has_not_ended_well_whatever_its_exit_code() {
        let (by_itself, killed) = ends();
        assert!(!killed.is_empty());
        for ended in killed {
            assert!(ended.is_killed() && !ended.is_well(), "{ended}");
            assert!((0..=u8::MAX).all(|code| !ended.has_code(code)), "{ended}");
        }
        let told: Vec<_> = by_itself.iter().map(Ended::is_well).collect();
        assert_eq!(told, [true, false, false, false, false]);
        assert!(by_itself.iter().all(|ended| !ended.is_killed()));
    }
}
