//! `kyklos certs`: the authority of a cluster, and the files with which ranks and hosts prove themselves.

mod invite;
mod issue;

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use clap::{Args, Subcommand};
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
    /// Makes an authority: a folder with authority.pem, and authority.key that only its owner can read
    ///
    /// Whoever has the key can make members of the cluster: keep it where identities are issued, and copy only identities
    /// to the hosts.
    Init(InitArgs),
    /// Makes the identities of ranks (rank-N.pem) or of hosts (host-NAME.pem), each readable by its owner only
    ///
    /// A rank's identity proves one rank, wherever it runs. A host's proves any rank that has its place on that host: what
    /// Slurm or a cluster file says of the rank must be one of the host's names; where nothing says, the address at which
    /// others see the rank must be one of its addresses. To change the authority without a pause: issue from the old one
    /// with --also-trust NEW/authority.pem, then from the new one with --also-trust OLD/authority.pem, then from the new one.
    Issue(IssueArgs),
    /// Prints a token, one line of text, by which the other ranks of one group get their identities from rank 0
    ///
    /// For hosts to which no files are copied. The invitation that is written is rank 0's alone (attend --invite): it holds an
    /// authority made for this group, and rank 0's identity. Whoever has the token (attend --join, or KYKLOS_JOIN) makes a key, and
    /// rank 0 signs it, for as long as its group is not complete: every rank once.
    Invite(InviteArgs),
    /// Says whom a file is for, of which job, until when, and the key by which it is revoked (attend --revoked); exit code 1 if that is over or soon will be
    Show(ShowArgs),
}

#[derive(Debug, Args)]
struct InitArgs {
    /// Folder to make
    #[arg(long, value_name = "FOLDER", default_value = "authority")]
    authority: PathBuf,
    /// Days for which it holds
    #[arg(long, value_name = "N", default_value_t = 3650, value_parser = clap::value_parser!(u32).range(1..=36500))]
    days: u32,
}

#[derive(Debug, Args)]
struct ShowArgs {
    /// Identities, or authority.pem
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// What ends within so many days counts as over
    #[arg(long, value_name = "N", default_value_t = 0)]
    warn_days: u32,
}

/// Runs the command.
pub(crate) fn certs(args: &CertsArgs) -> Result<()> {
    match &args.command {
        CertsCommand::Init(args) => {
            let validity = ClusterAuthority::create(&args.authority, args.days)?;
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

fn describe(path: &Path) -> Result<(String, Validity)> {
    // The certificate of an authority is no secret and stands alone; an identity has a key.
    if let Ok((fingerprint, validity)) = ClusterAuthority::describe(path) {
        return Ok((format!("authority {fingerprint}, {}", until(&validity)), validity));
    }
    let identity = Identity::read_file(path)?;
    let claims = identity.claims()?;
    let trusts = identity.authorities().join(" and ");
    let (until, key) = (until(&claims.validity), identity.key_hash()?);
    let line = format!("{claims} ({}), trusts {trusts}, {until}, key {key}", claims.job);
    Ok((line, claims.validity))
}
