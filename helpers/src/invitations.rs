//! The invitations of an owner, a file each, by the name of the helper.

use std::path::{Path, PathBuf};
use std::time::Duration;

use kyklos::{Error, Result};
use kyklos_transport::quic::{Invitation, InvitationTerms};

/// A folder of invitations. Each lets one helper in, and holds private keys: only its user can read
/// it.
///
/// ```
/// use kyklos_helpers::Invitations;
///
/// let folder = std::env::temp_dir().join(format!("kyklos-invitations-{}", std::process::id()));
/// let invitations = Invitations::in_folder(&folder);
/// let kitchen = invitations.create("kitchen", "10.0.0.7:29700")?;
/// assert!(kitchen.token().to_string().ends_with("@10.0.0.7:29700"));
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

    /// Makes an invitation for one helper, which finds the owner at `place`, `HOST:PORT`. It holds
    /// for a year.
    ///
    /// # Errors
    /// [`Error::Request`] for a name that is taken or none, [`Error::Transport`] for a place that
    /// is none, or a folder that cannot be written.
    pub fn create(&self, name: &str, place: &str) -> Result<Invitation> {
        let path = self.path(name)?;
        if path.exists() {
            return Err(Error::request(
                format!("there is an invitation for {name:?} already"),
                "use its token, choose another name, or remove it",
            ));
        }
        let cannot = |error: std::io::Error| {
            Error::request(
                format!("cannot make the folder {}: {error}", self.0.display()),
                "choose another folder",
            )
        };
        std::fs::create_dir_all(&self.0).map_err(cannot)?;
        let terms = InvitationTerms { place, size: 2, job: &format!("helper-{name}"), valid: VALID };
        Invitation::new(&terms)?.write_file(&path)?;
        self.read(name)
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

fn is_name(name: &str) -> bool {
    (1..=40).contains(&name.len()) && name.chars().all(|c| c.is_ascii_alphanumeric() || "-_".contains(c))
}

const ENDING: &str = ".invitation";
const VALID: Duration = Duration::from_secs(365 * 24 * 3600);
