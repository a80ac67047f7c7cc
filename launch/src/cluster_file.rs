//! The cluster file, which an operator writes: the host of every rank, in TOML. Another source
//! gives the rank of this process.

use std::io::ErrorKind;
use std::path::Path;

use kyklos_transport::MAX_RANKS;
use kyklos_transport::regular_file::read_regular_text;
use serde::Deserialize;

use crate::address::{DEFAULT_PORT, HostPort};
use crate::error::{Error, Result};
use crate::options::Options;
use crate::source::{Precedence, Setting, Source};

/// The whole file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ClusterFile {
    /// Name of the job that the identities must be of.
    job: Option<String>,
    /// `HOST:PORT` of rank 0; default: the host of its entry and [`DEFAULT_PORT`].
    coordinator: Option<String>,
    ranks: Vec<RankEntry>,
}

/// One rank; its number is its index in the list.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RankEntry {
    host: String,
    device: Option<String>,
}

/// Reads the file; `rank` is this process's rank, if it is known.
pub(crate) fn source(path: &Path, options: &Options, rank: Option<u32>) -> Result<Source> {
    let text = read_regular_text(path, MAX_BYTES).map_err(|source| match source.kind() {
        ErrorKind::FileTooLarge => Error::request(
            format!("{} has more than {MAX_BYTES} bytes", path.display()),
            "list the ranks and nothing else",
        ),
        _ => Error::ClusterFile { path: path.to_owned(), source },
    })?;
    parse(&text, &format!("cluster file {}", path.display()), rank, options.check_device)
}

/// `origin` is where the text was written, for errors.
pub(crate) fn parse(
    text: &str,
    origin: &str,
    rank: Option<u32>,
    check_device: fn(&str) -> Result<(), String>,
) -> Result<Source> {
    let file: ClusterFile = toml::from_str(text).map_err(|error| {
        let line = error.span().map(|span| 1 + text[..span.start.min(text.len())].matches('\n').count());
        let line = line.map_or(String::new(), |line| format!(", line {line}"));
        Error::request(
            format!("{origin}{line}: {}", error.message()),
            "it holds job, coordinator, and [[ranks]] with host and device",
        )
    })?;
    let size = u32::try_from(file.ranks.len()).ok().filter(|size| (1..=MAX_RANKS).contains(size));
    let size = size.ok_or_else(|| {
        Error::request(
            format!("{origin} has {} ranks", file.ranks.len()),
            format!("list 1 to {MAX_RANKS} under [[ranks]]"),
        )
    })?;
    let first = &file.ranks[0].host;
    let coordinator = match &file.coordinator {
        Some(text) => HostPort::parse(text, &format!("{origin}: coordinator {text:?}"))?,
        None => HostPort::new(first, DEFAULT_PORT).ok_or_else(|| not_a_host(origin, 0, first))?,
    };
    let mut devices = Vec::new();
    for (index, entry) in file.ranks.iter().enumerate() {
        HostPort::new(&entry.host, DEFAULT_PORT).ok_or_else(|| not_a_host(origin, index, &entry.host))?;
        entry.device.as_deref().map_or(Ok(()), check_device).map_err(|text| Error::Device {
            origin: origin.to_owned(),
            rank: index,
            text,
        })?;
        devices.push(entry.device.clone());
    }
    let host = rank.and_then(|rank| file.ranks.get(rank as usize)).map(|entry| &entry.host);
    let on_host = |entries: &[RankEntry]| {
        let count = entries.iter().filter(|entry| Some(&entry.host) == host).count();
        host.and_then(|_| u32::try_from(count).ok())
    };
    Ok(Source {
        precedence: Precedence::Explicit,
        size: Some(Setting::new(size, format!("{origin} has {size} ranks"))),
        local_rank: on_host(&file.ranks[..rank.map_or(0, |rank| rank as usize).min(file.ranks.len())]),
        local_size: on_host(&file.ranks),
        coordinator: Some(Setting::new(coordinator, origin)),
        job: file.job.map(|job| Setting::new(job, origin)),
        hosts: file.ranks.into_iter().map(|entry| Some(entry.host)).collect(),
        devices,
        ..Source::default()
    })
}

fn not_a_host(origin: &str, rank: usize, host: &str) -> Error {
    Error::request(
        format!("{origin}: rank {rank} has the host {host:?}"),
        "write a host's name or address, without a port",
    )
}

/// Longest file that is read.
const MAX_BYTES: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    const THREE: &str = r#"
        job = "train"
        coordinator = "a:1234"
        ranks = [{ host = "a" }, { host = "b", device = "wgpu:1" }, { host = "a", device = "cpu" }]
    "#;

    fn parse_any(text: &str, rank: Option<u32>) -> Result<Source> {
        parse(text, "F", rank, |_| Ok(()))
    }

    fn no_abacus(device: &str) -> Result<(), String> {
        if device == "abacus" { Err("device `abacus` is not known".to_owned()) } else { Ok(()) }
    }

    #[test]
    fn a_cluster_file_gives_the_host_of_every_rank() {
        let source = parse_any(THREE, Some(2)).unwrap();
        assert_eq!(source.size.unwrap().value, 3);
        assert_eq!(source.coordinator.unwrap().value.to_string(), "a:1234");
        assert_eq!(source.job.unwrap().value, "train");
        assert_eq!(source.hosts, ["a", "b", "a"].map(|host| Some(host.to_owned())));
        assert_eq!((source.local_rank, source.local_size), (Some(1), Some(2)));
        assert_eq!(source.devices, [None, Some("wgpu:1".to_owned()), Some("cpu".to_owned())]);
        let short = parse_any("[[ranks]]\nhost = 'fd00::1'\n[[ranks]]\nhost = 'b'", None).unwrap();
        assert_eq!(short.coordinator.unwrap().value.to_string(), "[fd00::1]:29600");
        assert_eq!((short.local_rank, short.local_size), (None, None));
        // A rank that the file does not list is refused later.
        assert_eq!(parse_any(THREE, Some(7)).unwrap().local_rank, None);
    }

    #[test]
    fn a_wrong_cluster_file_is_refused_with_its_name_and_line() {
        let many = format!("ranks = [{}]", "{ host = 'a' },".repeat(5000));
        let deep = format!("ranks = {}{}", "[".repeat(5000), "]".repeat(5000));
        for (wrong, word) in [
            ("", "ranks"),
            ("ranks = []", "has 0 ranks"),
            ("ranks = 3", "line 1"),
            ("\n\nranks = [", "line 3"),
            ("ranks = [{ host = 'a' }]\nworld = 3", "world"),
            ("ranks = [{ host = 'a', port = 3 }]", "port"),
            ("ranks = [{ device = 'cpu' }]", "host"),
            ("ranks = [{ host = 'a b' }]", "\"a b\""),
            ("ranks = [{ host = '' }]", "\"\""),
            ("ranks = [{ host = 'a' }, { host = 'b', device = 'abacus' }]", "rank 1"),
            ("ranks = [{ host = 'a' }]\ncoordinator = 'a'", "no port"),
            (&many, "5000 ranks"),
            (&deep, "ranks"),
        ] {
            let error = parse(wrong, "file F", None, no_abacus).expect_err(&wrong[..wrong.len().min(60)]);
            let text = error.to_string();
            assert!(error.is_request() && text.contains(word) && text.contains("file F"), "{text}");
        }
    }
}
