//! The owner of calls: its helpers, and how a call is shared with them.

mod account;
mod attend;
mod flight;
mod joined;
mod status;

use std::collections::{HashMap, HashSet};
use std::sync::Weak;
use std::sync::mpsc::{Receiver, Sender, channel};

use kyklos::Result;

use crate::call::{Call, Part, Shape};
use crate::check::Checker;
use crate::forecast::{DeviceSpeed, Forecast, HelperSpeed, OwnerSpeed};
use crate::link::{Asked, Link};
use crate::message::{OWNER, Request, piece_tags};
use crate::speeds::{Class, Forecasts, Known, area};

pub use attend::Gradients;
pub use flight::{Flight, Inputs, Landed, Results};
pub use joined::Joining;
use joined::Returned;
pub use status::{HelperState, HelperStatus};

/// Settings of an owner.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct OwnerOptions {
    /// Whether a row of each helper's results is computed again, and compared.
    pub check: bool,
    /// Whether helpers are used where the forecast says that they do not pay, without measurements,
    /// and waited for: for tests and demonstrations.
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
    /// Numbers of the helpers that are not asked any more.
    dismissed: HashSet<u64>,
    /// Helpers that have a share of a call under way, by number; the call keeps what this looks at.
    working: HashMap<u64, Weak<()>>,
    /// Calls that a helper has refused, and for how many more of them it is not asked.
    refused: HashMap<(u64, Class), u32>,
}

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
            dismissed: HashSet::new(),
            working: HashMap::new(),
            refused: HashMap::new(),
        }
    }

    /// How a call is shared now. Without shares the caller computes all of it, and tells what it
    /// took ([`Self::learn_alone`]).
    ///
    /// # Errors
    /// [`kyklos::Error::Request`] for a call that no device can compute.
    pub fn decide(&mut self, call: &Call, shape: &Shape) -> Result<Forecast> {
        self.decide_among(call, shape, None)
    }

    /// As [`Self::decide`], with helpers of these names only.
    ///
    /// # Errors
    /// As [`Self::decide`].
    pub fn decide_among(&mut self, call: &Call, shape: &Shape, names: Option<&[String]>) -> Result<Forecast> {
        self.collect();
        let alone = |seconds| Forecast {
            own: vec![Part::whole(shape)],
            shares: Vec::new(),
            total_s: seconds,
            alone_s: seconds,
        };
        if self.links.is_empty() || area(shape) == 0 || (area(shape) < LEAST_AREA && !self.options.always) {
            return Ok(alone(0.0));
        }
        // A forecast may be kept from a call that differs in what it does not depend on.
        call.problem(shape)?;
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
        let mut helpers = self.speeds_of_helpers(class, shape);
        let is_meant = |number: &u64| {
            let link = self.links.iter().find(|link| link.number == *number);
            names.is_none_or(|names| link.is_some_and(|link| names.contains(&link.name)))
        };
        helpers.retain(|(number, _)| is_meant(number));
        let own = own.or_else(|| {
            // As fast as the first helper, so that both get something to do.
            let first = helpers.first().filter(|_| self.options.always)?;
            Some([first.1.device.pairs_per_s; 2])
        });
        if helpers.is_empty() {
            self.not_asked(None, "it cannot compute such calls, or has work");
            return Ok(alone(0.0));
        }
        let Some([alone_pairs_per_s, beside]) = own else {
            self.not_asked(None, "the first calls of a kind are made without helpers, to see what they take");
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
        if self.options.always {
            // A loaded machine makes no test's helper late.
            forecast.total_s = forecast.total_s.max(ALWAYS_S);
        }
        let known = self.classes.entry(class).or_default();
        for (number, _) in &helpers {
            if forecast.shares.iter().all(|share| share.helper != *number) {
                known.left_out(*number);
            }
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
                let status = self.status_of(&name);
                status.fraction = 0.0;
                why.clone_into(&mut status.why);
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
            // One call at a time: forecasts are of helpers that do nothing else.
            if self.working.get(&link.number).is_some_and(|call| call.strong_count() > 0) {
                continue;
            }
            if let Some(left) = self.refused.get_mut(&(link.number, class))
                && *left > 0
            {
                *left -= 1;
                continue;
            }
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
        if own >= LEAST_OWN
            && let Ok(pairs) = self.forecasts.pairs(call, shape)
        {
            self.classes.entry(Class::of(call, shape)).or_default().beside(pairs * own, seconds);
        }
    }

    /// A call of this forecast has taken `seconds`, from before its parts were made until all
    /// results were in their places.
    pub fn learn_shared(&mut self, call: &Call, shape: &Shape, forecast: &Forecast, seconds: f64) {
        if forecast.alone_s > 0.0 && !forecast.shares.is_empty() {
            self.classes.entry(Class::of(call, shape)).or_default().shared(seconds, forecast.alone_s);
        }
    }

    /// Whether a call with so many (query, key) pairs of all heads may be shared at all: there are
    /// helpers, and it is not too short. If not, a caller need not describe it to
    /// [`Self::decide`] and [`Self::learn_alone`].
    pub fn wants(&mut self, area: u64) -> bool {
        self.collect();
        !(self.links.is_empty() && self.away.is_empty()) && (area >= LEAST_AREA || self.options.always)
    }
}

/// A speed with which the helper gets a share of any call.
fn as_if_it_paid(speed: &mut HelperSpeed) {
    speed.slowness = 1.0;
    speed.device.step_s = 0.0;
    speed.link.hop_s = 0.0;
    speed.link.up_bytes_per_s = f64::INFINITY;
    speed.link.down_bytes_per_s = f64::INFINITY;
}

/// For so long a call waits for helpers that are always used, and half as long again.
const ALWAYS_S: f64 = 60.0;
/// Of host memory, until it is measured.
const COPIES_BYTES_PER_S: f64 = 4e9;
/// Shorter calls are not looked at: (query, key) pairs of all heads.
const LEAST_AREA: u64 = 1 << 22;
/// A smaller part says nothing of a speed.
const LEAST_OWN: f64 = 0.005;
/// Calls that take less time alone stay alone.
const LEAST_S: f64 = 2e-3;
