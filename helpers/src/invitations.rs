//! The invitations of an owner, a file each, by the name of the helper.

use std::net::{Ipv6Addr, UdpSocket};
use std::path::{Path, PathBuf};
use std::time::Duration;

use kyklos::{Error, Result};
use kyklos_transport::quic::{Invitation, InvitationTerms};

use crate::local_network::local_address;

/// A folder of invitations. Each lets one helper in, and holds private keys: only its user can read
/// it.
///
/// ```
/// use kyklos_helpers::Invitations;
///
/// let folder = std::env::temp_dir().join(format!("kyklos-invitations-{}", std::process::id()));
/// let invitations = Invitations::in_folder(&folder);
/// let kitchen = invitations.invite("kitchen", Some("10.0.0.7"), Some(29_701))?;
/// assert!(kitchen.token().to_string().ends_with("@10.0.0.7:29701"));
/// assert_eq!(invitations.names()?, ["kitchen"]);
/// invitations.remove("kitchen")?;
/// # std::fs::remove_dir_all(&folder).ok();
/// # Ok::<(), kyklos::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Invitations(PathBuf);

impl Invitations {
    /// Those in this folder, which need not exist.
    pub fn in_folder(folder: &Path) -> Self {
        Self(folder.to_owned())
    }

    /// Those of this user: in the folder `helpers` of [`kyklos::machine::settings_folder`].
    ///
    /// # Errors
    /// [`Error::Request`] where no variable says where that is.
    pub fn of_user() -> Result<Self> {
        let folder = kyklos::machine::settings_folder().ok_or_else(|| {
            Error::request("no folder for this user's settings", "set HOME, or APPDATA on Windows")
        })?;
        Ok(Self(folder.join("helpers")))
    }

    /// The invitation for one helper: a new one, which holds for a year, or that of this name, at
    /// another place if one is given. The helper finds the owner at `host`, a name or an address,
    /// by default this machine's on the local network; and at the UDP port `port`, by default
    /// the first from 29700 that is free and in no other invitation.
    ///
    /// # Errors
    /// [`Error::Request`] for a name, host or port that cannot be it, or a folder that cannot be
    /// made; [`Error::Transport`] for a file that cannot be written.
    pub fn invite(&self, name: &str, host: Option<&str>, port: Option<u16>) -> Result<Invitation> {
        let path = self.path(name)?;
        let before = if path.exists() { Some(self.read(name)?) } else { None };
        let place = self.place(name, before.as_ref(), host, port)?;
        let cannot = |error: std::io::Error| {
            Error::request(
                format!("cannot write in the folder {}: {error}", self.0.display()),
                "choose another folder",
            )
        };
        match before {
            Some(before) if before.token().place() == place => return Ok(before),
            Some(before) => {
                let moved = self.moved(name);
                // Left behind by a process that was killed here.
                std::fs::remove_file(&moved).or_else(missing_is_fine).map_err(cannot)?;
                before.at(&place)?.write_file(&moved)?;
                std::fs::rename(&moved, &path).map_err(cannot)?;
            }
            None => {
                std::fs::create_dir_all(&self.0).map_err(cannot)?;
                let job = format!("helper-{name}");
                Invitation::new(&InvitationTerms { place: &place, size: 2, job: &job, valid: VALID })?
                    .write_file(&path)?;
            }
        }
        self.read(name)
    }

    /// `host:port`, of what is given, what was there before, and this machine.
    fn place(
        &self,
        name: &str,
        before: Option<&Invitation>,
        host: Option<&str>,
        port: Option<u16>,
    ) -> Result<String> {
        let before = before.and_then(|invitation| invitation.token().place().rsplit_once(':'));
        let host = match (host, before) {
            (Some(host), _) => written_host(host)?,
            (None, Some((host, _))) => host.to_owned(),
            (None, None) => local_address().map(|address| address.to_string()).ok_or_else(|| {
                Error::request(
                    "this machine has no address on a network",
                    "connect it, or give the address that the helper will reach",
                )
            })?,
        };
        let others = self.names()?.into_iter().filter(|other| other != name);
        let taken: Vec<(u16, String)> =
            others.filter_map(|other| Some((port_of(&self.read(&other).ok()?)?, other))).collect();
        let port = match (port, before.and_then(|(_, port)| port.parse().ok())) {
            (Some(0), _) => return Err(Error::request("port 0", "use a port from 1 to 65535")),
            (Some(port), _) => {
                if let Some((_, other)) = taken.iter().find(|(taken, _)| *taken == port) {
                    return Err(Error::request(
                        format!("port {port} is that of the invitation for {other:?}"),
                        "choose another port: each helper has its own",
                    ));
                }
                port
            }
            (None, Some(port)) => port,
            (None, None) => {
                let is_free = |port: &u16| {
                    taken.iter().all(|(taken, _)| taken != port)
                        && UdpSocket::bind(("0.0.0.0", *port)).is_ok()
                };
                PORTS.clone().find(is_free).ok_or_else(|| {
                    Error::request(
                        format!("no free UDP port from {} to {}", PORTS.start(), PORTS.end()),
                        "choose a port",
                    )
                })?
            }
        };
        Ok(format!("{host}:{port}"))
    }

    /// The invitation of this name.
    ///
    /// # Errors
    /// [`Error::Transport`] if there is none, or it is no invitation.
    pub fn read(&self, name: &str) -> Result<Invitation> {
        Ok(Invitation::read_file(&self.path(name)?)?)
    }

    /// Deletes an invitation: its token lets nobody in any more.
    ///
    /// # Errors
    /// [`Error::Request`] if there is none.
    pub fn remove(&self, name: &str) -> Result<()> {
        let path = self.path(name)?;
        // It holds keys too.
        std::fs::remove_file(self.moved(name)).ok();
        std::fs::remove_file(&path).map_err(|error| {
            if error.kind() == std::io::ErrorKind::NotFound {
                return Error::request(
                    format!("there is no invitation for {name:?}"),
                    "look which there are",
                );
            }
            Error::request(
                format!("cannot remove the invitation {}: {error}", path.display()),
                "look which there are",
            )
        })
    }

    /// The names of all invitations, in order. A folder that does not exist has none.
    ///
    /// # Errors
    /// [`Error::Request`] for a folder that cannot be read.
    pub fn names(&self) -> Result<Vec<String>> {
        let entries = match std::fs::read_dir(&self.0) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => {
                return Err(Error::request(
                    format!("cannot read {}: {error}", self.0.display()),
                    "let its user read it",
                ));
            }
        };
        let files = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let mut names: Vec<String> = files
            .filter_map(|file| file.strip_suffix(ENDING).map(str::to_owned))
            .filter(|name| is_name(name))
            .collect();
        names.sort();
        Ok(names)
    }

    /// Where an invitation is written that is then moved over that of the same name.
    fn moved(&self, name: &str) -> PathBuf {
        self.0.join(format!("{name}.moved"))
    }

    fn path(&self, name: &str) -> Result<PathBuf> {
        if !is_name(name) {
            return Err(Error::request(
                format!("{name:?} is no name of a helper"),
                "use 1 to 40 letters, digits, - and _",
            ));
        }
        Ok(self.0.join(format!("{name}{ENDING}")))
    }
}

/// As a token has it: an IPv6 address in brackets.
fn written_host(host: &str) -> Result<String> {
    let inner = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
    if inner.parse::<Ipv6Addr>().is_ok() {
        return Ok(format!("[{inner}]"));
    }
    // With a colon it has a port too much.
    let fine = |c: char| c.is_ascii_alphanumeric() || ".-_".contains(c);
    if !(1..=253).contains(&host.len()) || !host.chars().all(fine) {
        return Err(Error::request(
            format!("{host:?} is no name or address of a machine"),
            "write it without a port, such as 192.168.1.7",
        ));
    }
    Ok(host.to_owned())
}

fn port_of(invitation: &Invitation) -> Option<u16> {
    invitation.token().place().rsplit_once(':')?.1.parse().ok()
}

fn missing_is_fine(error: std::io::Error) -> std::io::Result<()> {
    if error.kind() == std::io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
}

fn is_name(name: &str) -> bool {
    (1..=40).contains(&name.len()) && name.chars().all(|c| c.is_ascii_alphanumeric() || "-_".contains(c))
}

const ENDING: &str = ".invitation";
/// Of owners that choose none.
const PORTS: std::ops::RangeInclusive<u16> = 29_700..=29_999;
const VALID: Duration = Duration::from_secs(365 * 24 * 3600);
