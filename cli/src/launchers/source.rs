//! What one launcher, file or set of flags says of the group.

use std::fmt;

use crate::devices::DeviceRequest;
use crate::failure::{Failure, Result};

/// A value, and the words in which it was said: `SLURM_PROCID=3`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Said<T> {
    pub(crate) value: T,
    pub(crate) words: String,
}

impl<T> Said<T> {
    pub(crate) fn new(value: T, words: impl Into<String>) -> Self {
        Self { value, words: words.into() }
    }
}

/// How near to the process a source is: the nearer one knows better.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Nearness {
    /// Given to this very run: flags, Kyklos' own variables, a cluster file.
    #[default]
    Given,
    /// A launcher that starts every rank itself: torchrun, MPI.
    Inner,
    /// A scheduler, under which an inner launcher may run: Slurm, Kubernetes.
    Outer,
}

/// All that one source says; what it does not know it leaves to others.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Source {
    pub(crate) nearness: Nearness,
    pub(crate) rank: Option<Said<u32>>,
    pub(crate) world: Option<Said<u32>>,
    /// Place of this rank among those of its host, and their number.
    pub(crate) local_rank: Option<u32>,
    pub(crate) local_world: Option<u32>,
    pub(crate) coordinator: Option<Said<HostPort>>,
    /// The host of rank 0 may get its address only after this process has started.
    pub(crate) host_appears_late: bool,
    /// By rank, the host it runs on.
    pub(crate) places: Vec<Option<String>>,
    /// The job that the identities must be of.
    pub(crate) job: Option<Said<String>>,
    /// What tells this run from an earlier one of the same job.
    pub(crate) run: Option<String>,
    /// By rank, where a file says so.
    pub(crate) devices: Vec<Option<DeviceRequest>>,
}

/// A host by name or address, and a UDP port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HostPort {
    pub(crate) host: String,
    pub(crate) port: u16,
}

impl HostPort {
    /// Reads `HOST:PORT`; an IPv6 address stands in brackets. `words` are where it was written.
    pub(crate) fn parse(text: &str, words: &str) -> Result<Self> {
        let wrong = |why: &str| {
            Failure::request(
                format!("{words} is not the address of rank 0: {why}"),
                "write host:port, such as node1:29600 or [fd00::1]:29600",
            )
        };
        let (host, port) = text.rsplit_once(':').ok_or_else(|| wrong("it has no port"))?;
        let host = match host.strip_prefix('[').map(|rest| rest.strip_suffix(']')) {
            Some(Some(inner)) => inner,
            Some(None) => return Err(wrong("a bracket is not closed")),
            None if host.contains(':') => return Err(wrong("an IPv6 address has no brackets")),
            None => host,
        };
        let port = port.parse().ok().filter(|port| *port != 0);
        let port = port.ok_or_else(|| wrong("the port is not a number from 1 to 65535"))?;
        Self::new(host, port).ok_or_else(|| wrong("the host is empty or holds what no host name holds"))
    }

    /// `None` if it is no host.
    pub(crate) fn new(host: &str, port: u16) -> Option<Self> {
        let fine = |c: char| c.is_ascii_alphanumeric() || ".-_:%".contains(c);
        let fits = (1..=253).contains(&host.len()) && host.chars().all(fine);
        fits.then(|| Self { host: host.to_owned(), port })
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') { write!(f, "[{host}]:{port}") } else { write!(f, "{host}:{port}") }
    }
}

/// The UDP port of rank 0 where nothing says another: next to torch's 29500, which its own store uses.
pub(crate) const DEFAULT_PORT: u16 = 29_600;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_or_refused_with_an_example() {
        let read = |text: &str| HostPort::parse(text, &format!("--coordinator {text}"));
        for (text, host, port) in [
            ("node1:29600", "node1", 29600),
            ("10.0.0.1:1", "10.0.0.1", 1),
            ("[fd00::1]:65535", "fd00::1", 65535),
            ("a.b-c_d:2", "a.b-c_d", 2),
        ] {
            let read = read(text).unwrap();
            assert_eq!((read.host.as_str(), read.port), (host, port));
            assert_eq!(read.to_string(), text);
        }
        let long = format!("{}:1", "a".repeat(300));
        for wrong in
            ["", "node1", ":1", "node1:", "node1:0", "node1:65536", "node1:x", "fd00::1:1", "[fd00::1:1"]
                .into_iter()
                .chain(["a b:1", "a/b:1", "a\n:1", "ä:1", &long])
        {
            let failure = read(wrong).unwrap_err();
            assert_eq!(failure.exit, 2, "{wrong}");
            assert!(failure.text.contains("node1:29600"), "{}", failure.text);
        }
    }
}
