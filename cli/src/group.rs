//! The options of one process of several, and its end with the launcher that started it.

use std::io::{BufRead, Read};
use std::net::IpAddr;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use kyklos_launch::{Options, SecretText};
use kyklos_transport::quic::{Identity, LinkSettings};

use crate::activity;
use crate::devices::DeviceRequest;
use crate::failure::{Failure, Result, note};
use crate::hints::{hinted, of_bootstrap};
use crate::interrupt;
use crate::observe::record;
use crate::options::{OnLoss, headings};

/// How this process joins a group of processes. Without any of it the environment of a launcher
/// says.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = headings::GROUP)]
pub(crate) struct GroupArgs {
    /// This process is rank R of several
    #[arg(long, value_name = "R")]
    pub(crate) rank: Option<u32>,
    /// Number of processes [or KYKLOS_WORLD]
    #[arg(long = "world", alias = "size", value_name = "N")]
    pub(crate) size: Option<NonZeroU32>,
    /// Where rank 0 listens, UDP [or KYKLOS_COORDINATOR]
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) coordinator: Option<String>,
    /// TOML file that says where every rank runs
    #[arg(long, value_name = "F", conflicts_with = "size")]
    pub(crate) cluster: Option<PathBuf>,
    /// File that proves this rank or its host to the others, by {rank} or {host} in its name a file
    /// each [or KYKLOS_IDENTITY]
    #[arg(long, value_name = "F")]
    pub(crate) identity: Option<PathBuf>,
    /// This process is rank 0, and lets the others in by the token of this invitation (kyklos certs
    /// invite)
    #[arg(long, value_name = "F")]
    pub(crate) invite: Option<PathBuf>,
    /// Get this rank's identity from rank 0 with a token [or KYKLOS_JOIN, which other users do not
    /// see]; --identity F keeps it, --rank R asks for a rank
    #[arg(long, value_name = "TOKEN")]
    pub(crate) join: Option<String>,
    /// List of keys whose identities this process takes no more; read again when a group forms
    /// again (--on-loss)
    #[arg(long, value_name = "F")]
    pub(crate) revoked: Option<PathBuf>,
    /// Warn if the identity expires within so many days
    #[arg(long, value_name = "DAYS", default_value_t = 3)]
    pub(crate) warn_days: u32,
    /// Seconds within which all processes must have come
    #[arg(help_heading = headings::RECOVERY, long, value_name = "SECONDS", default_value = "60")]
    pub(crate) join_deadline: NonZeroU32,
    /// Seconds without progress after which a rank that computes while others wait for it ends the
    /// run by name; more than a kernel takes to compile. Rank 0's counts, which warns after a
    /// quarter [default: 180]
    #[arg(help_heading = headings::RECOVERY, long, value_name = "SECONDS")]
    pub(crate) stuck_after: Option<NonZeroU32>,
    /// Milliseconds between two signs of life; a rank counts as dead when twelve in a row are
    /// missing, with --link wan after 15 seconds at the least. The same on all ranks [default:
    /// 200, or 500 with --link wan]
    #[arg(help_heading = headings::RECOVERY, long, value_name = "MS")]
    pub(crate) heartbeat: Option<NonZeroU32>,
    /// This process takes the place of one that died: it joins while the group forms, or when the
    /// others form it again (--on-loss rejoin)
    #[arg(help_heading = headings::RECOVERY, long)]
    pub(crate) rejoin: bool,
    /// Local address of this process [default: all, or loopback if rank 0 is there]
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) bind: Option<IpAddr>,
    /// First port of the ranks other than 0 on this host; each rank takes the next one, or as many
    /// as --lanes [default: the system's choice]
    #[arg(long, value_name = "N")]
    pub(crate) port: Option<u16>,
    /// Addresses at which the other processes reach this one, separated by commas, for hosts with
    /// several addresses and behind address translation [or KYKLOS_ADVERTISE; default: where
    /// rank 0 sees it]
    #[arg(long, value_name = "ADDRESS[:PORT],…")]
    pub(crate) advertise: Option<String>,
}

impl GroupArgs {
    /// These options for the library, whose notes and warnings go to standard error.
    pub(crate) fn options(&self, link: LinkSettings, on_loss: OnLoss) -> Options {
        let seconds = |seconds: NonZeroU32| Duration::from_secs(u64::from(seconds.get()));
        Options {
            rank: self.rank,
            size: self.size,
            coordinator: self.coordinator.clone(),
            cluster_file: self.cluster.clone(),
            identity: self.identity.clone(),
            invitation: self.invite.clone(),
            token: self.join.clone().map(SecretText),
            revoked: self.revoked.clone(),
            job: None,
            expiry_warning_days: self.warn_days,
            join_deadline: seconds(self.join_deadline),
            stuck_after: self.stuck_after.map(seconds),
            heartbeat: self.heartbeat.map(|ms| Duration::from_millis(u64::from(ms.get()))),
            rejoin: self.rejoin,
            on_loss: on_loss.next_group(seconds(self.join_deadline)),
            bind: self.bind,
            port: self.port,
            advertise: self.advertise.clone(),
            link,
            check_device: |device| {
                device.parse::<DeviceRequest>().map(|_| ()).map_err(|error| error.to_string())
            },
            note,
            warn: |text, kind| note(&hinted(format!("warning: {text}"), of_bootstrap(kind))),
            waits: activity::waits_for,
        }
    }

    /// The first option that makes a group, as it was written.
    pub(crate) fn first(&self) -> Option<String> {
        let path =
            |flag, path: &Option<PathBuf>| path.as_ref().map(|path| format!("{flag} {}", path.display()));
        (self.rank.map(|rank| format!("--rank {rank}")))
            .or_else(|| self.size.map(|size| format!("--world {size}")))
            .or_else(|| self.coordinator.as_ref().map(|at| format!("--coordinator {at}")))
            .or_else(|| path("--cluster", &self.cluster))
            .or_else(|| path("--identity", &self.identity))
            .or_else(|| path("--invite", &self.invite))
            .or_else(|| path("--revoked", &self.revoked))
            // Without its value, which is a secret.
            .or_else(|| self.join.as_ref().map(|_| "--join".to_owned()))
            .or_else(|| self.bind.map(|address| format!("--bind {address}")))
            .or_else(|| self.port.map(|port| format!("--port {port}")))
            .or_else(|| self.advertise.as_ref().map(|at| format!("--advertise {at}")))
    }
}

/// What `kyklos launch` writes to the standard input of a rank first: its identity, after the
/// number of its bytes. So the key is never on a disk.
pub(crate) fn identity_on_stdin(identity: &Identity) -> Vec<u8> {
    let pem = identity.to_pem();
    format!("{}\n{pem}", pem.len()).into_bytes()
}

/// Reads it.
pub(crate) fn read_identity(mut stdin: impl BufRead) -> Result<Identity> {
    let failed = |why: &dyn std::fmt::Display| {
        Failure::refused(format!(
            "no identity of kyklos launch on standard input: {why}; only kyklos launch sets {}",
            kyklos_launch::variables::LAUNCH
        ))
    };
    let mut length = String::new();
    stdin.by_ref().take(LENGTH_DIGITS).read_line(&mut length).map_err(|error| failed(&error))?;
    let length = length.trim_end().parse().ok().filter(|length| (1..=MOST_IDENTITY_BYTES).contains(length));
    let mut pem = vec![0; length.ok_or_else(|| failed(&"its length is missing"))?];
    stdin.read_exact(&mut pem).map_err(|error| failed(&error))?;
    Ok(Identity::of_pem(&pem, "the identity on standard input")?)
}

const LENGTH_DIGITS: u64 = 8;
const MOST_IDENTITY_BYTES: usize = 1 << 20;

/// A process of `kyklos launch` ends when its launcher does, whatever happened to it: the launcher
/// holds the other end of standard input.
pub(crate) fn end_with_launcher() {
    std::thread::spawn(|| {
        let mut bytes = [0; 64];
        // A byte asks for this rank's record.
        while std::io::stdin().read(&mut bytes).is_ok_and(|read| read > 0) {
            record::write_all();
        }
        interrupt::end(1, None);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_identity_on_standard_input_is_refused() {
        for input in [&b""[..], b"r", b"12\nshort", b"99999999999\n", b"-1\n", b"4\nabcd"] {
            let failure = read_identity(input).unwrap_err();
            assert!(failure.text.contains("standard input"), "{failure:?}");
        }
    }
}
