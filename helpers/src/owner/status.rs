//! What an owner knows of each helper, for people.

use super::Owner;
use crate::call::{Call, Shape};
use crate::forecast::Share;
use crate::link::Link;

/// What a helper does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum HelperState {
    /// It has not joined yet.
    Waiting,
    /// Its link or its speed is being measured.
    Measuring,
    /// It waits for work.
    Ready,
    /// It has a share of a call.
    Working,
    /// It is gone; it may join again.
    Lost,
    /// It returned a wrong result, and is not asked any more.
    Lied,
}

impl HelperState {
    /// In one word, small letters.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Measuring => "measuring",
            Self::Ready => "ready",
            Self::Working => "working",
            Self::Lost => "lost",
            Self::Lied => "lied",
        }
    }
}

/// What an owner knows of a helper.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct HelperStatus {
    /// Its name.
    pub name: String,
    /// What it does.
    pub state: HelperState,
    /// Its device, as it says.
    pub device: String,
    /// Its part of the last call that it had a share of, between 0 and 1.
    pub fraction: f64,
    /// Calls of which it has computed its share.
    pub calls: u64,
    /// Bytes to it.
    pub bytes_sent: u64,
    /// Bytes from it.
    pub bytes_received: u64,
    /// Why it is not used, or was not in time.
    pub why: String,
}

impl HelperStatus {
    /// A helper of this name that has not joined.
    pub(crate) fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            state: HelperState::Waiting,
            device: String::new(),
            fraction: 0.0,
            calls: 0,
            bytes_sent: 0,
            bytes_received: 0,
            why: String::new(),
        }
    }

    pub(super) fn joined(&mut self, link: &Link) {
        self.device.clone_from(&link.hello.device);
        "no call has been long enough yet".clone_into(&mut self.why);
    }

    pub(super) fn sent(&mut self, share: &Share) {
        self.fraction = share.fraction;
        self.bytes_sent += share.bytes[0];
    }

    pub(super) fn received(&mut self, share: &Share, whole: bool) {
        if whole {
            self.calls += 1;
            self.bytes_received += share.bytes[1];
            self.why.clear();
        }
    }

    pub(super) fn refused(&mut self, text: &str) {
        self.state = HelperState::Ready;
        text.clone_into(&mut self.why);
    }

    pub(super) fn late(&mut self) {
        "its share was late".clone_into(&mut self.why);
    }

    pub(super) fn lost(&mut self, why: String) {
        (self.state, self.why) = (HelperState::Lost, why);
    }

    pub(super) fn lied(&mut self, what: &str) {
        self.state = HelperState::Lied;
        what.clone_into(&mut self.why);
    }
}

impl Owner {
    /// The helpers, by name.
    pub fn helpers(&mut self) -> Vec<HelperStatus> {
        self.collect();
        let mut all: Vec<_> = self.told.values().cloned().collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }

    /// Why a call is shared as it is: a line for each device.
    ///
    /// # Errors
    /// As [`Self::decide`].
    pub fn explain(&mut self, call: &Call, shape: &Shape) -> kyklos::Result<String> {
        use std::fmt::Write;

        let forecast = self.decide(call, shape)?;
        let mut text = String::new();
        let ms = |seconds: f64| seconds * 1e3;
        let own: f64 = 1.0 - forecast.shares.iter().map(|share| share.fraction).sum::<f64>();
        if forecast.alone_s == 0.0 {
            let why = if self.links.is_empty() { "no helper is here" } else { "its speed is not known yet" };
            text.push_str(why);
            return Ok(text);
        }
        let _ = writeln!(
            text,
            "alone {:.1} ms, shared {:.1} ms ({:.2} x)",
            ms(forecast.alone_s),
            ms(forecast.total_s),
            forecast.gain()
        );
        let _ = writeln!(text, "this device: {:.0} %", own * 100.0);
        for link in &self.links {
            match forecast.shares.iter().find(|share| share.helper == link.number) {
                Some(share) => {
                    let [up, computing, down] = share.busy_s;
                    let _ = writeln!(
                        text,
                        "{}: {:.0} % in {} pieces, {:.1} ms: sending {:.1}, computing {:.1}, returning {:.1}",
                        link.name,
                        share.fraction * 100.0,
                        share.parts.len(),
                        ms(share.end_s),
                        ms(up),
                        ms(computing),
                        ms(down)
                    );
                }
                None => {
                    let _ = writeln!(text, "{}: not asked, the call would not end sooner", link.name);
                }
            }
        }
        Ok(text)
    }
}
