//! A cluster that an operator has written down (`--cluster F`): where every rank runs, in TOML. Which rank a process is
//! comes from elsewhere.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde::Deserialize;

use super::source::{DEFAULT_PORT, HostPort, Nearness, Said, Source};
use crate::devices::DeviceRequest;
use crate::failure::{Failure, Result};

/// The whole file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ClusterFile {
    /// Job of the identities.
    job: Option<String>,
    /// `HOST:PORT` of rank 0; by default its host, and the usual port.
    coordinator: Option<String>,
    ranks: Vec<RankEntry>,
}

/// One rank; its number is its place in the list.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RankEntry {
    host: String,
    device: Option<String>,
}

/// Reads the file; `rank` is this process, where that is known.
pub(crate) fn source(path: &Path, rank: Option<u32>) -> Result<Source> {
    let cannot = |error| Failure::file("read the cluster file", path, &error);
    let mut text = String::new();
    let file = File::open(path).map_err(cannot)?;
    file.take(LONGEST_BYTES + 1).read_to_string(&mut text).map_err(cannot)?;
    if text.len() as u64 > LONGEST_BYTES {
        return Err(Failure::request(
            format!("{} has more than {LONGEST_BYTES} bytes", path.display()),
            "list the ranks and nothing else",
        ));
    }
    parse(&text, &format!("--cluster {}", path.display()), rank)
}

pub(crate) fn parse(text: &str, words: &str, rank: Option<u32>) -> Result<Source> {
    let file: ClusterFile = toml::from_str(text).map_err(|error| {
        let line = error.span().map(|span| 1 + text[..span.start.min(text.len())].matches('\n').count());
        let line = line.map_or(String::new(), |line| format!(", line {line}"));
        Failure::request(
            format!("{words}{line}: {}", error.message()),
            "it holds job, coordinator, and [[ranks]] with host and device",
        )
    })?;
    let world = u32::try_from(file.ranks.len()).ok().filter(|world| (1..=kyklos::MAX_WORLD).contains(world));
    let world = world.ok_or_else(|| {
        Failure::request(
            format!("{words} has {} ranks", file.ranks.len()),
            format!("list 1 to {} under [[ranks]]", kyklos::MAX_WORLD),
        )
    })?;
    let first = &file.ranks[0].host;
    let coordinator = match &file.coordinator {
        Some(text) => HostPort::parse(text, &format!("{words}: coordinator {text:?}"))?,
        None => HostPort::new(first, DEFAULT_PORT).ok_or_else(|| not_a_host(words, 0, first))?,
    };
    let mut devices = Vec::new();
    for (index, entry) in file.ranks.iter().enumerate() {
        HostPort::new(&entry.host, DEFAULT_PORT).ok_or_else(|| not_a_host(words, index, &entry.host))?;
        let device = entry.device.as_ref().map(|device| device.parse::<DeviceRequest>()).transpose();
        devices.push(device.map_err(|error| Failure::request(format!("{words}, rank {index}"), error))?);
    }
    let host = rank.and_then(|rank| file.ranks.get(rank as usize)).map(|entry| &entry.host);
    let on_host = |entries: &[RankEntry]| {
        let count = entries.iter().filter(|entry| Some(&entry.host) == host).count();
        host.and_then(|_| u32::try_from(count).ok())
    };
    Ok(Source {
        nearness: Nearness::Given,
        world: Some(Said::new(world, format!("{words} has {world} ranks"))),
        local_rank: on_host(&file.ranks[..rank.map_or(0, |rank| rank as usize).min(file.ranks.len())]),
        local_world: on_host(&file.ranks),
        coordinator: Some(Said::new(coordinator, words)),
        job: file.job.map(|job| Said::new(job, words)),
        places: file.ranks.into_iter().map(|entry| Some(entry.host)).collect(),
        devices,
        ..Source::default()
    })
}

fn not_a_host(words: &str, rank: usize, host: &str) -> Failure {
    Failure::request(
        format!("{words}: rank {rank} has the host {host:?}"),
        "write a host's name or address, without a port",
    )
}

/// Longest file that is read.
const LONGEST_BYTES: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    const THREE: &str = r#"
        job = "train"
        coordinator = "a:1234"
        ranks = [{ host = "a" }, { host = "b", device = "wgpu:1" }, { host = "a", device = "cpu" }]
    "#;

    #[test]
    fn a_cluster_says_where_every_rank_is() {
        let source = parse(THREE, "F", Some(2)).unwrap();
        assert_eq!(source.world.unwrap().value, 3);
        assert_eq!(source.coordinator.unwrap().value.to_string(), "a:1234");
        assert_eq!(source.job.unwrap().value, "train");
        assert_eq!(source.places, ["a", "b", "a"].map(|host| Some(host.to_owned())));
        assert_eq!((source.local_rank, source.local_world), (Some(1), Some(2)));
        assert_eq!(source.devices, [None, "wgpu:1".parse().ok(), "cpu".parse().ok()]);
        let short = parse("[[ranks]]\nhost = 'fd00::1'\n[[ranks]]\nhost = 'b'", "F", None).unwrap();
        assert_eq!(short.coordinator.unwrap().value.to_string(), "[fd00::1]:29600");
        assert_eq!((short.local_rank, short.local_world), (None, None));
        // A rank that is not there is somebody else's to refuse.
        assert_eq!(parse(THREE, "F", Some(7)).unwrap().local_rank, None);
    }

    #[test]
    fn what_is_no_cluster_is_refused_in_one_line_that_says_where() {
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
            let failure = parse(wrong, "--cluster F", None).expect_err(&wrong[..wrong.len().min(60)]);
            assert_eq!(failure.exit, 2);
            assert!(failure.text.contains(word) && failure.text.contains("--cluster F"), "{}", failure.text);
        }
    }
}
