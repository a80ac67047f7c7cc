//! The helpers of an owner: they join, are measured, and go.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use kyklos::Result;
use kyklos_transport::Group;

use super::{HelperState, HelperStatus, Owner};
use crate::link::{Gone, Link};
use crate::speeds::Known;

/// A link whose thread has ended; none if the helper is lost, with the reason.
pub(super) type Returned = (u64, std::result::Result<Box<Link>, String>);

/// Lets helpers join from other threads.
#[derive(Clone, Debug)]
pub struct Joining(Sender<Returned>);

impl Joining {
    /// Greets the helper that is the other rank of `group`, and measures its link. Blocks. The
    /// owner uses it from its next call on. Returns what tells when the helper is gone.
    ///
    /// # Errors
    /// Of the link; [`kyklos::Error::Request`] if the owner is gone.
    pub fn add(&self, name: &str, group: impl Into<Group>) -> Result<Gone> {
        let mut link = Link::greet(name, group.into())?;
        link.measure_link()?;
        let gone = link.gone();
        let no_owner = |_| kyklos::Error::request("an owner that is gone", "make another one");
        self.0.send((NEW, Ok(Box::new(link)))).map_err(no_owner)?;
        Ok(gone)
    }
}

/// In place of a number: the owner gives one.
const NEW: u64 = u64::MAX;

impl Owner {
    /// The end through which helpers join while the owner computes.
    pub fn joining(&self) -> Joining {
        Joining(self.returns.clone())
    }

    /// Adds the helper that is the other rank of `group`: this process is rank 0 of two. Blocks
    /// until it has answered, and its link is measured: some tenths of a second.
    ///
    /// # Errors
    /// Of the link.
    pub fn add(&mut self, name: &str, group: impl Into<Group>) -> Result<()> {
        self.joining().add(name, group)?;
        self.collect();
        Ok(())
    }

    /// Takes the helpers that are there, and lets those go that are not.
    pub(super) fn collect(&mut self) {
        while let Ok((number, link)) = self.back.try_recv() {
            let name = self.away.remove(&number);
            match link {
                Ok(link) if number == NEW => self.welcome(*link),
                Ok(link) if self.dismissed.contains(&number) => let_go(*link),
                Ok(link) => {
                    self.status_of(&link.name.clone()).state = HelperState::Ready;
                    self.links.push(*link);
                }
                Err(why) => {
                    self.forget(number);
                    if let Some(name) = name {
                        self.status_of(&name).lost(why);
                    }
                }
            }
        }
        if self.links.iter().any(Link::is_lost) {
            let (lost, here): (Vec<_>, Vec<_>) =
                std::mem::take(&mut self.links).into_iter().partition(Link::is_lost);
            self.links = here;
            for link in lost {
                self.status_of(&link.name.clone()).lost("the connection has ended".to_owned());
                self.forget(link.number);
                let_go(link);
            }
        }
        // Always the same order: forecasts are kept by it.
        self.links.sort_by_key(|link| link.number);
    }

    /// A helper that has not been here before, or comes again.
    fn welcome(&mut self, mut link: Link) {
        if self.status_of(&link.name.clone()).state == HelperState::Lied {
            return let_go(link);
        }
        link.number = self.next_number;
        self.next_number += 1;
        // One that comes again under its name takes the place of the one before.
        let before = self.links.iter().position(|known| known.name == link.name);
        if let Some(index) = before {
            let_go(self.links.remove(index));
        }
        let status = self.status_of(&link.name.clone());
        status.joined(&link);
        status.state = HelperState::Ready;
        self.classes.values_mut().for_each(Known::forgive);
        self.links.push(link);
    }

    pub(super) fn status_of(&mut self, name: &str) -> &mut HelperStatus {
        self.told.entry(name.to_owned()).or_insert_with(|| HelperStatus::new(name))
    }

    /// A thread takes the link, runs `measure`, and brings it back.
    pub(super) fn send_away(
        &mut self,
        index: usize,
        measure: impl FnOnce(&mut Link) -> Result<()> + Send + 'static,
    ) {
        let mut link = self.links.remove(index);
        let status = self.status_of(&link.name.clone());
        status.state = HelperState::Measuring;
        "its speed is being measured".clone_into(&mut status.why);
        let (number, returns) = (link.number, self.returns.clone());
        self.away.insert(number, link.name.clone());
        std::thread::spawn(move || {
            let measured = catch_unwind(AssertUnwindSafe(|| measure(&mut link)));
            let outcome = match measured {
                Ok(Ok(())) => Ok(Box::new(link)),
                Ok(Err(error)) => Err(error.to_string()),
                Err(_) => Err("its measurement failed".to_owned()),
            };
            // An owner that is gone lets go of the link.
            drop(returns.send((number, outcome)));
        });
    }

    /// A helper of this name is expected: it is told as waiting until it joins.
    pub fn expect_helper(&mut self, name: &str) {
        self.status_of(name);
    }

    /// Waits until no helper is being measured: for tests and demonstrations. Blocks, at most
    /// `patience`; false if one is still measured then.
    pub fn settle(&mut self, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        self.collect();
        while !self.away.is_empty() {
            let left = until.saturating_duration_since(Instant::now());
            match self.back.recv_timeout(left) {
                Ok(returned) => drop(self.returns.send(returned)),
                Err(_) => return false,
            }
            self.collect();
        }
        true
    }

    /// Lets a helper answer what it still has to do, before it is used again.
    pub(super) fn drain(&mut self, number: u64) {
        if let Some(index) = self.links.iter().position(|link| link.number == number) {
            self.send_away(index, Link::measure_link);
        }
    }

    /// Lets a helper go that is no help, also if it is away.
    pub(super) fn dismiss(&mut self, number: u64) {
        if let Some(index) = self.links.iter().position(|link| link.number == number) {
            let_go(self.links.remove(index));
        }
        self.dismissed.insert(number);
        self.forget(number);
    }

    fn forget(&mut self, number: u64) {
        self.classes.values_mut().for_each(|known| known.forget_helper(number));
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.links.drain(..).for_each(let_go);
        self.back.try_iter().filter_map(|(_, link)| link.ok()).for_each(|link| let_go(*link));
    }
}

/// Takes leave of a helper on a thread of its own: one that is dead answers late, and no call waits
/// for that.
fn let_go(mut link: Link) {
    link.say_bye();
    std::thread::spawn(move || drop(link));
}
