//! How helpers find their owner: by the token of an invitation.
//!
//! The owner has a [`Door`] for each invitation: a thread that forms a group of two with whoever
//! has its token, again and again. The helper's side is [`Knock`].

use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kyklos::{Error, Result};
use kyklos_transport::quic::{
    EnrolConfig, Identity, Invitation, QuicConfig, QuicTransport, Token, enrol, look_up,
};
use kyklos_transport::{BootstrapKind, Group, Rank, TransportError};

use crate::local_network::Announcement;
use crate::owner::Joining;

/// The owner's door for one helper. It stays open until it is dropped.
#[derive(Debug)]
pub struct Door {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    name: String,
    token: Token,
    closed: AtomicBool,
    /// Why nobody could come in, if that is the door's own fault.
    fault: Mutex<Option<String>>,
}

impl Door {
    /// Opens the door for the helper `name`, which then becomes one of the owner of `joining`. It
    /// is announced on the local network, unless `KYKLOS_ANNOUNCE` is `off`.
    pub fn open(name: &str, invitation: Invitation, joining: Joining) -> Self {
        let shared = Arc::new(Shared {
            name: name.to_owned(),
            token: invitation.token().clone(),
            closed: AtomicBool::new(false),
            fault: Mutex::default(),
        });
        let door = Self { shared: Arc::clone(&shared) };
        let invitation = Arc::new(invitation);
        std::thread::spawn(move || {
            let announcement = shared.announce(&invitation);
            let mut failures = 0;
            while !shared.closed.load(Ordering::Relaxed) {
                failures = if shared.let_in(&invitation, &joining, failures) { 0 } else { failures + 1 };
            }
            drop(announcement);
        });
        door
    }

    /// The name of the helper.
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Whether it is for the token of this invitation.
    pub fn is_of(&self, invitation: &Invitation) -> bool {
        self.shared.token == *invitation.token()
    }

    /// Why no helper can come in through this door, such as a port that another program has.
    pub fn fault(&self) -> Option<String> {
        self.shared.fault.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::Relaxed);
    }
}

impl Shared {
    /// Tells the local network where the door is, unless it is for this machine alone, or the user
    /// does not want it.
    fn announce(&self, invitation: &Invitation) -> Option<Announcement> {
        let at = owner_address(invitation);
        let token = invitation.token();
        let is_quiet = std::env::var_os(ANNOUNCE).is_some_and(|value| value == "off");
        (!is_quiet && !at.ip().is_loopback())
            .then(|| Announcement::new(&self.name, token, at.port()))
            .flatten()
    }

    /// Waits for the helper for a while; if it comes, until it is gone. False if the door itself
    /// fails, as it has `failures` times before.
    fn let_in(&self, invitation: &Arc<Invitation>, joining: &Joining, failures: u32) -> bool {
        let began = Instant::now();
        let formed = QuicTransport::connect(owner_config(invitation));
        // What fails at once is the door's own fault; else nobody came.
        let fault = formed.as_ref().err().filter(|_| began.elapsed() < ROUND / 2).map(ToString::to_string);
        let has_failed = fault.is_some();
        // The group before may hold its port for some seconds.
        let told = fault.filter(|_| failures >= FORGIVEN);
        *self.fault.lock().unwrap_or_else(PoisonError::into_inner) = told;
        let Ok(group) = formed else {
            if has_failed {
                std::thread::sleep(PAUSE);
            }
            return !has_failed;
        };
        if self.closed.load(Ordering::Relaxed) {
            return true;
        }
        match joining.add(&self.name, group) {
            Ok(gone) => {
                while !gone.is_gone() && !self.closed.load(Ordering::Relaxed) {
                    std::thread::sleep(LOOK);
                }
                gone.close();
            }
            Err(error) => {
                tracing::info!("the helper {} could not join: {error}", self.name);
                std::thread::sleep(PAUSE);
            }
        }
        true
    }
}

/// The parts of a place in a token, such as `node1:29600` or `[fd00::1]:29600`.
fn host_and_port(place: &str) -> Option<(&str, u16)> {
    let (host, port) = place.rsplit_once(':')?;
    let bare = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
    Some((bare, port.parse().ok()?))
}

/// Where the owner listens: at all addresses, unless it is for this machine alone.
fn owner_address(invitation: &Invitation) -> SocketAddr {
    let place = invitation.token().place();
    let port = place.rsplit_once(':').and_then(|(_, port)| port.parse().ok()).unwrap_or(0);
    let resolved = place.to_socket_addrs().ok().and_then(|mut addresses| addresses.next());
    let is_loopback = resolved.is_some_and(|address| address.ip().is_loopback());
    let host = if is_loopback { resolved.map_or(ANY, |address| address.ip()) } else { ANY };
    SocketAddr::new(host, port)
}

fn owner_config(invitation: &Arc<Invitation>) -> QuicConfig {
    let address = owner_address(invitation);
    let identity = invitation.identity().clone();
    let mut config = QuicConfig::new(Rank(0), 2, invitation.job(), address, identity);
    config.invitation = Some(Arc::clone(invitation));
    config.bind = address.ip();
    config.connect_deadline = ROUND;
    config.warn = |text, _| tracing::debug!("{text}");
    config.note = |text| tracing::debug!("{text}");
    config
}

/// The helper's side of a [`Door`]: what it needs to find the owner again and again.
#[derive(Debug)]
pub struct Knock {
    token: Token,
    /// Of the last time, so that the owner need not give another one.
    identity: Option<Identity>,
}

impl Knock {
    /// With this token.
    ///
    /// # Errors
    /// [`Error::Transport`] for a text that is none.
    pub fn new(token: &str) -> Result<Self> {
        Ok(Self { token: token.trim().parse::<Token>()?, identity: None })
    }

    /// Tells this owner from others that announce themselves, as [`Token::owner`].
    pub fn owner(&self) -> String {
        self.token.owner()
    }

    /// Where the owner is, by the token.
    pub fn place(&self) -> &str {
        self.token.place()
    }

    /// Forms the group of two with the owner, as [`help`](crate::help) wants it. Blocks, at most
    /// twice `patience` and some seconds. The owner is at `also`, if that is known, or where the
    /// token says; a name there that has no address yet is waited for.
    ///
    /// # Errors
    /// [`Error::Transport`] if there is no owner, its name has no address, or it does not take the
    /// token.
    pub fn enter(&mut self, patience: Duration, also: &[SocketAddr]) -> Result<Group> {
        let place = self.token.place();
        let unknown = |why: String| {
            let text = format!(
                "the owner cannot be found at {place}: {why}: write an address of the owner that this machine can reach"
            );
            Error::from(TransportError::Bootstrap { text, kind: BootstrapKind::Other })
        };
        // The name may get its address later. Another address needs no name.
        let until = Instant::now() + if also.is_empty() { patience } else { Duration::ZERO };
        let (host, port) =
            host_and_port(place).ok_or_else(|| unknown("it is no host and port".to_owned()))?;
        let mut resolver_said = None;
        let addresses = match look_up(host, port, until, |why| resolver_said = Some(why.to_owned())) {
            Ok(resolved) => [also, &resolved].concat(),
            // Without the time that it took: helpers try again and again, and tell the same error once.
            Err(why) if also.is_empty() => {
                let said = resolver_said.map(|said| format!("the name has no address ({said})"));
                return Err(unknown(said.unwrap_or(why)));
            }
            Err(_) => also.to_vec(),
        };
        let Some(&first) = addresses.first() else { return Err(unknown("it has no address".to_owned())) };
        let identity = match self.identity.take() {
            Some(identity) => identity,
            None => {
                let mut config = EnrolConfig::new(self.token.clone(), first);
                config.coordinator_also = addresses[1..].to_vec();
                config.deadline = patience;
                config.bind_both_families();
                enrol(config)?.identity
            }
        };
        let job = identity.claims()?.job;
        let mut config = QuicConfig::new(Rank(1), 2, job, first, identity.clone());
        config.coordinator_also = addresses[1..].to_vec();
        config.connect_deadline = patience;
        config.warn = |text, _| tracing::debug!("{text}");
        config.note = |text| tracing::debug!("{text}");
        config.bind_both_families();
        let group = QuicTransport::connect(config)?;
        // Only one that the owner has taken is worth keeping.
        self.identity = Some(identity);
        Ok(group)
    }

    /// Whether the next try may end otherwise, after this error of [`Self::enter`].
    pub fn may_try_again(error: &Error) -> bool {
        match error {
            Error::Transport(error @ TransportError::Bootstrap { .. }) => {
                !matches!(error.bootstrap_kind(), BootstrapKind::Token)
            }
            Error::Request { .. } => false,
            _ => true,
        }
    }
}

/// Set to `off`, owners do not announce themselves.
const ANNOUNCE: &str = "KYKLOS_ANNOUNCE";
const ANY: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
/// For how long a door waits at a time.
const ROUND: Duration = Duration::from_secs(10);
/// Failures in a row before they are told.
const FORGIVEN: u32 = 8;
const PAUSE: Duration = Duration::from_secs(1);
const LOOK: Duration = Duration::from_millis(100);
