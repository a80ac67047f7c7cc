//! The owner, who may not be there yet, or not any more.

use std::net::{SocketAddr, ToSocketAddrs};
use std::time::{Duration, Instant};

use kyklos::Error;
use kyklos_helpers::{Knock, OwnerSearch};
use kyklos_launch::HostPort;
use kyklos_transport::{BootstrapKind, Group, harmless};

use crate::failure::{Failure, Result, note};

/// Where to knock.
#[derive(Debug)]
pub(super) struct Owner {
    knock: Knock,
    /// `--address`.
    address: Option<HostPort>,
    /// Where it has been found, if it was not where it should be.
    found_at: Option<SocketAddr>,
}

impl Owner {
    pub(super) fn new(knock: Knock, address: Option<String>) -> Result<Self> {
        let address = address.map(|text| HostPort::parse(&text, &format!("--address {text}"))).transpose()?;
        Ok(Self { knock, address, found_at: None })
    }

    /// Where the owner is, as the user knows it, or where it was found.
    pub(super) fn place(&self) -> String {
        self.found_at.map_or_else(|| self.given_place(), |found| found.to_string())
    }

    fn given_place(&self) -> String {
        self.address.as_ref().map_or_else(|| self.knock.place().to_owned(), ToString::to_string)
    }

    /// Forms the group with the owner. Waits for it as long as it takes, and says so once.
    ///
    /// # Errors
    /// For a token that the owner does not take.
    pub(super) fn enter(&mut self) -> Result<Group> {
        // A name without an address is looked up for long: the owner may be found before that.
        let mut search = if self.is_resolved() { None } else { self.begin_search() };
        let mut is_told = false;
        loop {
            let given = self.given();
            let found = search.as_mut().map(|search| self.found(search)).unwrap_or_default();
            let error = match self.knock.enter(PATIENCE, &[&given[..], &found[..]].concat()) {
                Ok(group) => {
                    self.found_at = found.first().copied();
                    return Ok(group);
                }
                Err(error) => error,
            };
            // Whoever announces an address there may be somebody else.
            if !Knock::may_try_again(&error) && found.is_empty() {
                return Err(wrong_token(&error));
            }
            if !is_told {
                note(&self.waiting(&error));
                is_told = true;
            }
            match &mut search {
                None => search = self.begin_search(),
                Some(_) => std::thread::sleep(PAUSE),
            }
        }
    }

    /// Searches the local network, at first until the owner is found there, or for [`LOOK`].
    fn begin_search(&self) -> Option<OwnerSearch> {
        let mut search = OwnerSearch::new()?;
        let until = Instant::now() + LOOK;
        while self.found(&mut search).is_empty() && Instant::now() < until {
            search.look(STEP);
        }
        Some(search)
    }

    /// Whether the place of the owner, as the user knows it, has an address.
    fn is_resolved(&self) -> bool {
        self.given_place().to_socket_addrs().is_ok_and(|mut addresses| addresses.next().is_some())
    }

    /// What this helper waits for, in words that know of no ranks.
    fn waiting(&self, error: &Error) -> String {
        let place = self.given_place();
        let why = match error {
            _ if !self.is_resolved() => {
                "its name has no address yet: if it gets none, write one with --address".to_owned()
            }
            Error::Transport(error) if error.bootstrap_kind() == BootstrapKind::Other => format!(
                "no answer yet. Does a program with kyklos.helpers() run there, is there still the invitation, and does UDP get \
                 through? ({})",
                harmless(&error.to_string())
            ),
            error => harmless(&error.to_string()),
        };
        format!("waiting for the owner at {place}: {why}")
    }

    fn given(&self) -> Vec<SocketAddr> {
        let resolved = self.address.as_ref().and_then(|at| at.to_string().to_socket_addrs().ok());
        resolved.into_iter().flatten().collect()
    }

    /// Where owners with this authority say that they are.
    fn found(&self, search: &mut OwnerSearch) -> Vec<SocketAddr> {
        let owner = self.knock.owner();
        let of_owner = search.found().iter().filter(|found| found.owner == owner);
        of_owner.flat_map(|found| found.addresses.clone()).collect()
    }
}

/// The failure of a token that is none, or that the owner does not take.
pub(super) fn wrong_token(error: &Error) -> Failure {
    Failure::request(
        harmless(&error.to_string()),
        "kyklos helpers invite prints the whole token on the owner's machine; it holds until the invitation is removed",
    )
}

const PATIENCE: Duration = Duration::from_secs(6);
const LOOK: Duration = Duration::from_secs(3);
const STEP: Duration = Duration::from_millis(200);
const PAUSE: Duration = Duration::from_secs(1);
