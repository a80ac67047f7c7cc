//! `kyklos certs invite`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use kyklos::MAX_RANKS;
use kyklos_launch::HostPort;
use kyklos_transport::quic::{Date, Invitation, InvitationTerms};

use super::refused;
use crate::failure::{Result, note, print};

#[derive(Debug, Args)]
pub(super) struct InviteArgs {
    /// Address at which the other ranks reach rank 0
    #[arg(long, value_name = "HOST:PORT")]
    coordinator: String,
    /// Number of ranks, including rank 0
    #[arg(long = "world", alias = "size", value_name = "N", value_parser = clap::value_parser!(u32).range(2..=i64::from(MAX_RANKS)))]
    size: u32,
    /// Name of the job
    #[arg(long, value_name = "NAME", default_value = "cluster")]
    job: String,
    /// Hours for which the token is valid
    #[arg(long, value_name = "N", default_value_t = 24, value_parser = clap::value_parser!(u32).range(1..=8760))]
    hours: u32,
    /// File to write, for rank 0 alone
    #[arg(long, value_name = "FILE", default_value = "invitation.pem")]
    output: PathBuf,
}

pub(super) fn invite(args: &InviteArgs) -> Result<()> {
    let place =
        HostPort::parse(&args.coordinator, &format!("--coordinator {}", args.coordinator))?.to_string();
    let valid = Duration::from_secs(3600) * args.hours;
    let terms = InvitationTerms { place: &place, size: args.size, job: &args.job, valid };
    let invitation = Invitation::new(&terms).map_err(refused)?;
    invitation.write_file(&args.output).map_err(refused)?;
    // Only the token goes to standard output, for scripts.
    print(&format!("{}\n", invitation.token()))?;
    note(&format!(
        "rank 0: kyklos attend --invite {} …; the other {}: kyklos attend --join TOKEN …, until {}",
        args.output.display(),
        args.size - 1,
        Date(invitation.until())
    ));
    Ok(())
}
