//! The owner's side: who helps, with what, and what comes back.

mod account;
mod attend;
mod flight;
mod status;

use std::collections::{HashMap, HashSet};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use kyklos::Result;
use kyklos_transport::Group;

use crate::call::{Call, Part, Shape};
use crate::check::Checker;
use crate::forecast::{DeviceSpeed, Forecast, HelperSpeed, OwnerSpeed};
use crate::link::{Asked, Gone, Link};
use crate::message::{OWNER, Request, piece_tags};
use crate::speeds::{Class, Forecasts, Known, area};

pub use attend::Gradients;
pub use flight::{Flight, Inputs, Landed, Results};
pub use status::{HelperState, HelperStatus};

/// Settings of an owner.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct OwnerOptions {
    /// Whether a row of each helper's results is computed again, and compared.
    pub check: bool,
    /// Whether helpers are used where the forecast says that they do not pay, and without
    /// measurements: for tests and demonstrations.
    pub always: bool,
}

impl Default for OwnerOptions {
    /// Results are checked; helpers are used where they pay.
    fn default() -> Self {
        Self { check: true, always: false }
    }
}

/// The owner of calls, with its helpers. It has no threads of its own, but for measurements of
/// helpers, which no call waits for.
///
/// [`Self::attend`] does all of it. A caller that computes its own part in another way makes the
/// steps itself: [`Self::decide`], [`Self::begin`], its own part, [`Self::finish`], and then what
/// helpers did not return.
#[derive(Debug)]
pub struct Owner {
    options: OwnerOptions,
    links: Vec<Link>,
    /// Helpers that a thread measures, by number, with their names.
    away: HashMap<u64, String>,
    back: Receiver<Returned>,
    returns: Sender<Returned>,
    next_number: u64,
    classes: HashMap<Class, Known>,
    forecasts: Forecasts,
    copies_bytes_per_s: f64,
    told: HashMap<String, HelperStatus>,
    checker: Checker,
    checking_s: f64,
    /// Numbers of the helpers of which a result has been checked.
    checked: HashSet<u64>,
}

/// A link whose thread has ended; none if the helper is lost, with the reason.
type Returned = (u64, std::result::Result<Box<Link>, String>);

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
    /// An owner without helpers.
    pub fn new(options: OwnerOptions) -> Self {
        let (returns, back) = channel();
        Self {
            options,
            links: Vec::new(),
            away: HashMap::new(),
            back,
            returns,
            next_number: 0,
            classes: HashMap::new(),
            forecasts: Forecasts::default(),
            copies_bytes_per_s: COPIES_BYTES_PER_S,
            told: HashMap::new(),
            checker: Checker::new(),
            checking_s: 0.0,
            checked: HashSet::new(),
        }
    }

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
                Ok(mut link) => {
                    if number == NEW {
                        if self.status_of(&link.name.clone()).state == HelperState::Lied {
                            continue;
                        }
                        link.number = self.next_number;
                        self.next_number += 1;
                        // A helper that comes again under its name takes the place of the one before.
                        self.links.retain(|known| known.name != link.name);
                        self.status_of(&link.name.clone()).joined(&link);
                        self.classes.values_mut().for_each(Known::forgive);
                    }
                    self.status_of(&link.name.clone()).state = HelperState::Ready;
                    self.links.push(*link);
                }
                Err(why) => {
                    if let Some(name) = name {
                        self.status_of(&name).lost(why);
                    }
                }
            }
        }
        let (lost, here): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.links).into_iter().partition(Link::is_lost);
        self.links = here;
        for link in lost {
            self.status_of(&link.name.clone()).lost("its group has ended".to_owned());
            let_go(link);
        }
        // Always the same order: forecasts are kept by it.
        self.links.sort_by_key(|link| link.number);
    }

    pub(super) fn status_of(&mut self, name: &str) -> &mut HelperStatus {
        self.told.entry(name.to_owned()).or_insert_with(|| HelperStatus::new(name))
    }

    /// A thread takes the link, runs `measure`, and brings it back.
    fn send_away(&mut self, index: usize, measure: impl FnOnce(&mut Link) -> Result<()> + Send + 'static) {
        let mut link = self.links.remove(index);
        self.status_of(&link.name.clone()).state = HelperState::Measuring;
        let (number, returns) = (link.number, self.returns.clone());
        self.away.insert(number, link.name.clone());
        std::thread::spawn(move || {
            let outcome = match measure(&mut link) {
                Ok(()) => Ok(Box::new(link)),
                Err(error) => Err(error.to_string()),
            };
            // An owner that is gone lets go of the link.
            drop(returns.send((number, outcome)));
        });
    }

    /// How a call is shared now. Without shares the caller computes all of it, and tells what it
    /// took ([`Self::learn_alone`]).
    ///
    /// # Errors
    /// [`kyklos::Error::Request`] for a call that no device can compute.
    pub fn decide(&mut self, call: &Call, shape: &Shape) -> Result<Forecast> {
        self.collect();
        let alone = |seconds| Forecast {
            own: vec![Part::whole(shape)],
            shares: Vec::new(),
            total_s: seconds,
            alone_s: seconds,
        };
        if self.links.is_empty() || (area(shape) < LEAST_AREA && !self.options.always) {
            return Ok(alone(0.0));
        }
        let pairs = self.forecasts.pairs(call, shape)?;
        let class = Class::of(call, shape);
        let known = self.classes.entry(class).or_default();
        let own = known.own_speed();
        if !known.may_help() && !self.options.always {
            self.not_asked(None, "the last calls like this one took longer with helpers than without");
            return Ok(alone(own.map_or(0.0, |[alone, _]| pairs / alone)));
        }
        // As fast as without gradients, whose work is counted in the same pairs.
        let forward = Class::of(&Call { gradients: false, ..call.clone() }, shape);
        let own = own.or_else(|| self.classes.get(&forward)?.own_speed());
        let helpers = self.speeds_of_helpers(class, shape);
        let own = own.or_else(|| {
            // As fast as the first helper, so that both get something to do.
            let first = helpers.first().filter(|_| self.options.always)?;
            Some([first.1.device.pairs_per_s; 2])
        });
        let (Some([alone_pairs_per_s, beside]), false) = (own, helpers.is_empty()) else {
            return Ok(alone(0.0));
        };
        let alone_s = pairs / alone_pairs_per_s;
        if alone_s < LEAST_S && !self.options.always {
            self.not_asked(None, "the last call was too short");
            return Ok(alone(alone_s));
        }
        let device = DeviceSpeed { pairs_per_s: beside, step_s: 0.0 };
        let mut owner = OwnerSpeed { device, alone_pairs_per_s, copies_bytes_per_s: self.copies_bytes_per_s };
        let mut speeds: Vec<HelperSpeed> = helpers.iter().map(|(_, speed)| *speed).collect();
        if self.options.always {
            speeds.iter_mut().for_each(as_if_it_paid);
            owner.copies_bytes_per_s = f64::INFINITY;
        }
        let mut forecast = self.forecasts.of(call, shape, &owner, &speeds)?;
        for share in &mut forecast.shares {
            // From now on the number of the helper, which no other thread's call changes.
            let index = usize::try_from(share.helper).unwrap_or(usize::MAX);
            share.helper = helpers.get(index).map_or(u64::MAX, |(number, _)| *number);
        }
        self.not_asked(Some(&forecast), "the last call would not have ended sooner with it");
        Ok(forecast)
    }

    /// Notes why helpers without a share have none.
    fn not_asked(&mut self, forecast: Option<&Forecast>, why: &str) {
        for index in 0..self.links.len() {
            let Link { name, number, .. } = &self.links[index];
            let has_share =
                forecast.is_some_and(|forecast| forecast.shares.iter().any(|share| share.helper == *number));
            if !has_share {
                let name = name.clone();
                why.clone_into(&mut self.status_of(&name).why);
            }
        }
    }

    /// The helpers whose speed in such calls is known, by number. The others are asked.
    fn speeds_of_helpers(&mut self, class: Class, shape: &Shape) -> Vec<(u64, HelperSpeed)> {
        let asked = Asked {
            dtype: shape.dtype.name(),
            head_dim: shape.head_dim,
            q_heads: shape.group(),
            kv_heads: 1,
        };
        let mut index = 0;
        while index < self.links.len() {
            if self.links[index].speeds.contains_key(&asked) {
                index += 1;
            } else {
                let asked = asked.clone();
                self.send_away(index, move |link| link.measure(&asked));
            }
        }
        let known = self.classes.entry(class).or_default();
        let mut speeds = Vec::new();
        for link in &self.links {
            let (Some(Some(device)), Some(link_speed)) = (link.speeds.get(&asked), link.speed) else {
                continue;
            };
            known.set_helper(link.number, *device);
            let Some((device, slowness)) = known.of_helper(link.number) else { continue };
            let memory_bytes = link.hello.memory_bytes;
            speeds.push((link.number, HelperSpeed { device, link: link_speed, memory_bytes, slowness }));
        }
        speeds
    }

    /// A call without helpers has taken `seconds`.
    pub fn learn_alone(&mut self, call: &Call, shape: &Shape, seconds: f64) {
        if area(shape) >= LEAST_AREA
            && let Ok(pairs) = self.forecasts.pairs(call, shape)
        {
            self.classes.entry(Class::of(call, shape)).or_default().alone(pairs, seconds);
        }
    }

    /// The caller has computed its own part of a shared call in `seconds`.
    pub fn learn_own(&mut self, call: &Call, shape: &Shape, forecast: &Forecast, seconds: f64) {
        let own: f64 = 1.0 - forecast.shares.iter().map(|share| share.fraction).sum::<f64>();
        if let Ok(pairs) = self.forecasts.pairs(call, shape) {
            self.classes.entry(Class::of(call, shape)).or_default().beside(pairs * own, seconds);
        }
    }

    /// Whether a call with so many (query, key) pairs of all heads may be shared at all: there are
    /// helpers, and it is not too short. If not, a caller need not describe it to
    /// [`Self::decide`] and [`Self::learn_alone`].
    pub fn wants(&mut self, area: u64) -> bool {
        self.collect();
        !(self.links.is_empty() && self.away.is_empty()) && (area >= LEAST_AREA || self.options.always)
    }

    /// A helper of this name is expected: it is told as waiting until it joins.
    pub fn expect_helper(&mut self, name: &str) {
        self.status_of(name);
    }

    /// Waits until no helper is being measured: for tests and demonstrations. Blocks, at most
    /// `patience`.
    pub fn settle(&mut self, patience: Duration) {
        let until = std::time::Instant::now() + patience;
        while !self.away.is_empty() {
            let left = until.saturating_duration_since(std::time::Instant::now());
            match self.back.recv_timeout(left) {
                Ok(returned) => drop(self.returns.send(returned)),
                Err(_) => return,
            }
            self.collect();
        }
    }

    /// Lets a helper answer what it still has to do, before it is used again.
    pub(super) fn drain(&mut self, number: u64) {
        if let Some(index) = self.links.iter().position(|link| link.number == number) {
            self.send_away(index, Link::measure_link);
        }
    }

    /// Lets a helper go that is no help.
    pub(super) fn dismiss(&mut self, number: u64) {
        if let Some(index) = self.links.iter().position(|link| link.number == number) {
            let_go(self.links.remove(index));
        }
        for known in self.classes.values_mut() {
            known.forget_helper(number);
        }
    }
}

/// Takes leave of a helper on a thread of its own: one that is dead answers late, and no call waits
/// for that.
fn let_go(link: Link) {
    std::thread::spawn(move || drop(link));
}

/// A speed with which the helper gets a share of any call.
fn as_if_it_paid(speed: &mut HelperSpeed) {
    speed.slowness = 1.0;
    speed.device.step_s = 0.0;
    speed.link.hop_s = 0.0;
    speed.link.up_bytes_per_s = f64::INFINITY;
    speed.link.down_bytes_per_s = f64::INFINITY;
}

/// Of host memory, until it is measured.
const COPIES_BYTES_PER_S: f64 = 4e9;
/// Shorter calls are not looked at: (query, key) pairs of all heads.
const LEAST_AREA: u64 = 1 << 22;
/// Calls that take less time alone stay alone.
const LEAST_S: f64 = 2e-3;
