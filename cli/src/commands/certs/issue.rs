//! `kyklos certs issue`.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::SystemTime;

use clap::{ArgGroup, Args};
use kyklos::{Error, MAX_RANKS};
use kyklos_transport::Rank;
use kyklos_transport::quic::{ClusterAuthority, Date, HostNames, Subject, Validity};

use super::refused;
use crate::failure::{Failure, Result, print};

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("whom").required(true).multiple(true).args(["ranks", "count", "host"]))]
pub(super) struct IssueArgs {
    /// For these ranks, such as 0-7 or 0-3,9
    #[arg(long, value_name = "A-B,…", conflicts_with = "count")]
    ranks: Option<RankList>,
    /// For ranks 0 to N-1
    #[arg(short = 'n', value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_RANKS)))]
    count: Option<u32>,
    /// For a host: its names and addresses, joined by commas; repeatable
    #[arg(long, value_name = "NAME,ADDRESS,…")]
    host: Vec<String>,
    /// Name of the job or cluster. Ranks of different jobs refuse each other
    #[arg(long, value_name = "NAME", default_value = "cluster")]
    job: String,
    /// Folder of the authority
    #[arg(long, value_name = "FOLDER", default_value = "authority")]
    authority: PathBuf,
    /// Days of validity
    #[arg(long, value_name = "N", default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=3650))]
    days: u32,
    /// authority.pem of another authority to trust as well; repeatable
    #[arg(long, value_name = "FILE")]
    also_trust: Vec<PathBuf>,
    /// Folder to write to
    #[arg(long, value_name = "FOLDER", default_value = ".")]
    output: PathBuf,
}

pub(super) fn issue(args: &IssueArgs) -> Result<()> {
    let mut authority = ClusterAuthority::read(&args.authority, &args.job).map_err(refused)?;
    for path in &args.also_trust {
        authority.also_trust(path).map_err(refused)?;
    }
    let ranks = match (&args.ranks, args.count) {
        (Some(ranks), _) => ranks.0.clone(),
        (None, Some(count)) => (0..count).collect(),
        (None, None) => Vec::new(),
    };
    let mut files: Vec<(PathBuf, Subject)> = ranks
        .into_iter()
        .map(|rank| (args.output.join(format!("rank-{rank}.pem")), Subject::Rank(Rank(rank))))
        .collect();
    for host in &args.host {
        let names = HostNames::new(host.split(','))
            .map_err(|error| Failure::refused(format!("--host {host}: {error}")))?;
        // Other systems do not allow colons in file names.
        let name = host.split(',').next().unwrap_or_default().replace(':', "-");
        files.push((args.output.join(format!("host-{name}.pem")), Subject::Host(names)));
    }
    refuse_what_is_there(&files)?;
    std::fs::create_dir_all(&args.output)
        .map_err(|error| Failure::file("make", &args.output, &error).into_refusal())?;
    for (path, subject) in &files {
        let identity = authority.issue_to(subject, Validity::days(args.days)).map_err(refused)?;
        let claims = identity.claims()?;
        // Before the identity is written: an identity that is not in the list could not be revoked.
        let date = Date(claims.validity.until);
        record(&args.authority.join(ISSUED), &format!("{}  {claims}, until {date}\n", identity.key_hash()?))?;
        identity.write_file(path)?;
        print(&format!("{}  {claims}, {}\n", path.display(), until(&claims.validity)))?;
    }
    Ok(())
}

/// Adds a line to the authority's list of issued identities.
fn record(path: &Path, line: &str) -> Result<()> {
    let cannot = |error| Failure::file("write the list of issued identities", path, &error);
    let file = OpenOptions::new().append(true).create(true).open(path);
    // Closed to this user: before the first identity. Where the disk is full, some may be there.
    let mut file = file.map_err(|error| cannot(error).into_refusal())?;
    file.write_all(line.as_bytes()).map_err(cannot)
}

/// File in the authority's folder: one line for each identity, which starts with its key in the
/// form for `--revoked`.
const ISSUED: &str = "issued";

/// Refuses existing files before the first file is written, so that a refusal leaves nothing
/// behind.
fn refuse_what_is_there(files: &[(PathBuf, Subject)]) -> Result<()> {
    for (index, (path, _)) in files.iter().enumerate() {
        let twice = files[..index].iter().any(|(other, _): &(PathBuf, _)| other == path);
        if twice || Path::exists(path) {
            let why = if twice { "would be written twice" } else { "exists" };
            return Err(Failure::request(
                format!("{} {why}", path.display()),
                "name another folder with --output, and move the files when all are there",
            ));
        }
    }
    Ok(())
}

/// `0-3,9`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct RankList(Vec<u32>);

impl FromStr for RankList {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let wrong = || {
            Error::request(
                format!("`{text}` is no list of ranks"),
                format!("use numbers below {MAX_RANKS} and ranges of them, such as 0-7 or 0-3,9"),
            )
        };
        let number = |text: &str| text.parse::<u32>().ok().filter(|rank| *rank < MAX_RANKS).ok_or_else(wrong);
        let mut ranks = Vec::new();
        for range in text.split(',') {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let (first, last) = (number(first)?, number(last)?);
            if first > last || ranks.iter().any(|rank| (first..=last).contains(rank)) {
                return Err(wrong());
            }
            ranks.extend(first..=last);
        }
        Ok(Self(ranks))
    }
}

/// The last day of a certificate, and the days that are left.
pub(super) fn until(validity: &Validity) -> String {
    format!("until {} ({} days)", Date(validity.until), validity.days_left(SystemTime::now()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_ranks_are_read_or_refused() {
        assert_eq!("0-3,9".parse::<RankList>().unwrap().0, [0, 1, 2, 3, 9]);
        assert_eq!("7".parse::<RankList>().unwrap().0, [7]);
        for wrong in ["", ",", "3-1", "1-", "-1", "x", "0-3,2", "0-99999999", "1,1", "0--1", "4294967296"] {
            assert!(wrong.parse::<RankList>().is_err(), "{wrong}");
        }
    }
}
