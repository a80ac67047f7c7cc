//! `kyklos certs`: the authority of a cluster, and identity files of ranks and hosts.

mod invite;
mod issue;

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use clap::{Args, Subcommand};
use kyklos_transport::TransportError;
use kyklos_transport::quic::{ClusterAuthority, Date, Identity, Validity};

use self::invite::InviteArgs;
use self::issue::{IssueArgs, until};
use crate::failure::{Failure, Result, print};

#[derive(Debug, Args)]
pub(crate) struct CertsArgs {
    #[command(subcommand)]
    command: CertsCommand,
}

#[derive(Debug, Subcommand)]
enum CertsCommand {
    /// Creates an authority: a folder with authority.pem and authority.key
    ///
    /// Only the owner can read authority.key. The key can create members of the cluster: keep it
    /// where identities are issued, and copy only identities to the hosts.
    Init(InitArgs),
    /// Issues identities of ranks (rank-N.pem) or hosts (host-NAME.pem); only the owner can read
    /// them
    ///
    /// The identity of a rank proves that rank on any host. The identity of a host proves every
    /// rank that runs there: the host that Slurm or a cluster file names for the rank must be
    /// one of the names in the identity. If neither names a host, the network address of the
    /// rank must be one of the addresses in the identity.
    ///
    /// To replace the authority without downtime, issue three times: from the old one with
    /// --also-trust NEW/authority.pem, then from the new one with --also-trust
    /// OLD/authority.pem, then from the new one alone.
    Issue(IssueArgs),
    /// Prints a token, one line of text, with which the other ranks of a group get their identities
    /// from rank 0
    ///
    /// Use it when no files can be copied to the hosts. The command also writes an invitation file
    /// for rank 0 alone (attend --invite): it holds an authority for this group and the
    /// identity of rank 0. A process with the token (attend --join or KYKLOS_JOIN) creates a
    /// key, and rank 0 signs it. Rank 0 signs once for each rank, until the group is complete.
    Invite(InviteArgs),
    /// Shows the subject, job, expiry date and key of identities and authorities
    ///
    /// The key is what a list for attend --revoked names. Exit code 1: a file has expired, or
    /// expires within --warn-days.
    Show(ShowArgs),
}

#[derive(Debug, Args)]
struct InitArgs {
    /// Folder to create
    #[arg(long, value_name = "FOLDER", default_value = "authority")]
    authority: PathBuf,
    /// Days of validity
    #[arg(long, value_name = "N", default_value_t = 3650, value_parser = clap::value_parser!(u32).range(1..=36500))]
    days: u32,
}

#[derive(Debug, Args)]
struct ShowArgs {
    /// Identities, or authority.pem
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Also report files that expire within this many days
    #[arg(long, value_name = "N", default_value_t = 0)]
    warn_days: u32,
}

/// Runs the command.
pub(crate) fn certs(args: &CertsArgs) -> Result<()> {
    match &args.command {
        CertsCommand::Init(args) => {
            let validity = ClusterAuthority::create(&args.authority, args.days).map_err(refused)?;
            let folder = args.authority.display();
            print(&format!("{folder}/authority.pem  authority, {}\n", until(&validity)))
        }
        CertsCommand::Issue(args) => issue::issue(args),
        CertsCommand::Invite(args) => invite::invite(args),
        CertsCommand::Show(args) => show(args),
    }
}

fn show(args: &ShowArgs) -> Result<()> {
    let mut over = Vec::new();
    for path in &args.files {
        let (line, validity) = describe(path)?;
        print(&format!("{}  {line}\n", path.display()))?;
        let now = SystemTime::now();
        if let Some(complaint) = validity.complaint(now) {
            over.push(format!("{} {complaint}", path.display()));
        } else if validity.days_left(now) < u64::from(args.warn_days) {
            over.push(format!("{} expires on {}", path.display(), Date(validity.until)));
        }
    }
    if over.is_empty() { Ok(()) } else { Err(Failure::run(over.join("\n"))) }
}

/// A file of the request cannot be used.
pub(super) fn refused(error: TransportError) -> Failure {
    Failure::from(error).into_refusal()
}

fn describe(path: &Path) -> Result<(String, Validity)> {
    // The file of an authority is a certificate alone; an identity also has a key.
    if let Ok((fingerprint, validity)) = ClusterAuthority::describe(path) {
        return Ok((format!("authority {fingerprint}, {}", until(&validity)), validity));
    }
    let identity = Identity::read_file(path).map_err(refused)?;
    let claims = identity.claims()?;
    let trusts = identity.authorities().join(" and ");
    let (until, key) = (until(&claims.validity), identity.key_hash()?);
    let line = format!("{claims} ({}), trusts {trusts}, {until}, key {key}", claims.job);
    Ok((line, claims.validity))
}
