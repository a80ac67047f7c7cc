//! Links that work once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use aws_lc_rs::digest::{SHA256, digest};
use aws_lc_rs::rand::{SecureRandom, SystemRandom};
use data_encoding::HEXLOWER;
use futures_util::future::{Either, select};
use kyklos::{Error, Result};
use tokio::sync::oneshot;

use crate::backend::TabBackend;

/// The invitations that are open, and those that were used. By the hash of the token, so that the
/// time of a lookup tells nothing.
#[derive(Debug, Default)]
pub(super) struct Invitations(Mutex<HashMap<[u8; 32], State>>);

#[derive(Debug)]
enum State {
    Open(oneshot::Sender<TabBackend>),
    Used,
}

/// What a token is good for.
#[derive(Debug)]
pub(super) enum Admission {
    /// Give the tab to this.
    In(oneshot::Sender<TabBackend>),
    /// In words for the tab.
    Refused(&'static str),
}

impl Invitations {
    /// Uses a token up.
    pub(super) fn admit(&self, token: &str) -> Admission {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match all.get_mut(&hash(token)) {
            None => {
                Admission::Refused("the host knows no such link: it has ended, or the link is not complete")
            }
            Some(state) => match std::mem::replace(state, State::Used) {
                State::Open(waits) => Admission::In(waits),
                State::Used => {
                    Admission::Refused("this link was used: the host prints a new one for each tab")
                }
            },
        }
    }
}

/// A link for one tab. The link ends when this is dropped.
#[derive(Debug)]
pub struct Invitation {
    invitations: Arc<Invitations>,
    token: String,
    link: String,
    arrives: oneshot::Receiver<TabBackend>,
}

impl Invitation {
    pub(super) fn new(invitations: &Arc<Invitations>, link: &str) -> Result<Self> {
        let mut random = [0; 16];
        SystemRandom::new().fill(&mut random).map_err(|error| super::failed(&error))?;
        let token = HEXLOWER.encode(&random);
        let (waits, arrives) = oneshot::channel();
        let mut all = invitations.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.insert(hash(&token), State::Open(waits));
        drop(all);
        let link = format!("{link}&token={token}");
        Ok(Self { invitations: invitations.clone(), token, link, arrives })
    }

    /// To be opened in a browser. Whoever has it gets the tensors of the rank: give it to one
    /// person, over a channel that you trust.
    pub fn link(&self) -> &str {
        &self.link
    }

    /// Waits until a tab has come by this link. Blocks.
    ///
    /// # Errors
    /// [`Error::Device`] when none has come after `patience`.
    pub fn wait(mut self, patience: Duration) -> Result<TabBackend> {
        let none_came = || Error::Device {
            device: "tab".to_owned(),
            operation: "wait for a browser tab".to_owned(),
            native: format!("nobody has opened the link within {} s", patience.as_secs()),
        };
        let (ended, end) = futures_channel::oneshot::channel::<()>();
        let (came, comes) = std::sync::mpsc::channel::<()>();
        let timer = std::thread::Builder::new().name("tab patience".to_owned());
        let timer = timer.spawn(move || {
            // Ends at once when the other end is dropped.
            let _ = comes.recv_timeout(patience);
            drop(ended);
        });
        timer.map_err(|error| super::failed(&error))?;
        let arrived = futures_executor::block_on(select(&mut self.arrives, end));
        drop(came);
        match arrived {
            Either::Left((Ok(tab), _)) => Ok(tab),
            Either::Left((Err(_), _)) | Either::Right(_) => Err(none_came()),
        }
    }
}

impl Drop for Invitation {
    fn drop(&mut self) {
        let mut all = self.invitations.0.lock().unwrap_or_else(PoisonError::into_inner);
        // A used one stays, so that its second user learns why.
        if let Some(State::Open(_)) = all.get(&hash(&self.token)) {
            all.remove(&hash(&self.token));
        }
    }
}

fn hash(token: &str) -> [u8; 32] {
    let mut bytes = [0; 32];
    bytes.copy_from_slice(digest(&SHA256, token.as_bytes()).as_ref());
    bytes
}
