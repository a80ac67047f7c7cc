//! What an owner has learned of its own speed and of its helpers, by class of calls.

use std::collections::HashMap;

use kyklos::{BiasTensor, Dtype, Mask, WireFormat};

use crate::call::{Call, Shape};
use crate::forecast::{Cuts, DeviceSpeed, Forecast, HelperSpeed, OwnerSpeed};

/// Calls of one class take times in proportion to their pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Class {
    dtype: Dtype,
    head_dim: u32,
    group: u32,
    gradients: bool,
    has_bias: bool,
    /// Power of two of the area: short calls are slower for each pair than long ones.
    size: u32,
}

impl Class {
    pub(crate) fn of(call: &Call, shape: &Shape) -> Self {
        Self {
            dtype: shape.dtype,
            head_dim: shape.head_dim,
            group: shape.group(),
            gradients: call.gradients,
            has_bias: call.bias.is_some(),
            size: area(shape).max(1).ilog2(),
        }
    }
}

/// (query, key) pairs of all heads, visible or not.
pub(crate) fn area(shape: &Shape) -> u64 {
    let heads = u64::from(shape.batch) * u64::from(shape.q_heads);
    u64::from(shape.q_len).saturating_mul(u64::from(shape.kv_len)).saturating_mul(heads)
}

/// What is known of one class.
#[derive(Debug, Default)]
pub(crate) struct Known {
    /// The owner's speed in calls without helpers.
    alone_pairs_per_s: f64,
    /// Such calls.
    alone: u32,
    /// The owner's speed in its part of shared calls.
    beside_pairs_per_s: Option<f64>,
    /// Shared calls since the last one without helpers.
    shared: u32,
    /// By number of the helper.
    helpers: HashMap<u64, OfHelper>,
    /// The time that helpers have cost, in calls without them; below 0: what they may still cost.
    debt: f64,
}

#[derive(Clone, Copy, Debug)]
struct OfHelper {
    /// When it joined.
    measured: DeviceSpeed,
    device: DeviceSpeed,
    slowness: f64,
}

impl Known {
    /// The owner has computed so many pairs without helpers.
    pub(crate) fn alone(&mut self, pairs: f64, seconds: f64) {
        if pairs <= 0.0 || seconds <= 0.0 {
            return;
        }
        let seen = pairs / seconds;
        self.shared = 0;
        self.alone += 1;
        self.alone_pairs_per_s = match self.alone {
            // The first call may have compiled kernels: the second one counts, or the faster of them.
            1 => seen,
            2 => self.alone_pairs_per_s.max(seen),
            _ => (self.alone_pairs_per_s * seen).sqrt(),
        };
    }

    /// The owner has computed so many pairs beside helpers.
    pub(crate) fn beside(&mut self, pairs: f64, seconds: f64) {
        if pairs > 0.0 && seconds > 0.0 {
            let seen = pairs / seconds;
            let alone = (self.alone > 0).then_some(self.alone_pairs_per_s);
            let before = self.beside_pairs_per_s.or(alone).unwrap_or(seen);
            self.beside_pairs_per_s = Some((before * seen).sqrt());
        }
    }

    /// The owner's speed, alone and beside helpers, once it is known well enough.
    pub(crate) fn own_speed(&self) -> Option<[f64; 2]> {
        let beside = self.beside_pairs_per_s.unwrap_or(self.alone_pairs_per_s);
        (self.alone >= 2).then_some([self.alone_pairs_per_s, beside])
    }

    pub(crate) fn of_helper(&self, helper: u64) -> Option<(DeviceSpeed, f64)> {
        self.helpers.get(&helper).map(|known| (known.device, known.slowness))
    }

    pub(crate) fn set_helper(&mut self, helper: u64, measured: DeviceSpeed) {
        self.helpers.entry(helper).or_insert(OfHelper { measured, device: measured, slowness: 1.0 });
    }

    /// A helper is gone.
    pub(crate) fn forget_helper(&mut self, helper: u64) {
        self.helpers.remove(&helper);
    }

    /// A helper has computed `pairs` in `computing_s`, its share was there after `seconds`, and
    /// `forecast_s` were forecast. `is_exact`: the owner waited for it; else it was there before.
    pub(crate) fn helped(
        &mut self,
        helper: u64,
        pairs: f64,
        computing_s: f64,
        seconds: f64,
        forecast_s: f64,
        is_exact: bool,
    ) {
        let Some(known) = self.helpers.get_mut(&helper) else { return };
        if pairs > 0.0 && computing_s > 0.0 {
            let seen = pairs / computing_s;
            known.device.pairs_per_s = (known.device.pairs_per_s * seen).sqrt();
        }
        // What the device explains is no slowness of the rest.
        let seen = known.slowness * seconds / forecast_s.max(computing_s).max(1e-9);
        if is_exact || seen < known.slowness {
            known.slowness = (known.slowness * seen).sqrt().clamp(0.2, 1e6);
        }
    }

    /// A helper has no share of a call: what was slow once need not be slow for ever, and only a
    /// share can tell.
    pub(crate) fn left_out(&mut self, helper: u64) {
        let Some(known) = self.helpers.get_mut(&helper) else { return };
        known.slowness = known.slowness.powf(FORGETS);
        let ratio = known.device.pairs_per_s / known.measured.pairs_per_s;
        known.device.pairs_per_s = known.measured.pairs_per_s * ratio.powf(FORGETS);
    }

    /// Whether helpers may be asked for this call. They may not while calls with them have cost
    /// more time than they may cost; and now and then they are not, to see how long a call
    /// takes without them.
    pub(crate) fn may_help(&mut self) -> bool {
        if self.shared >= SHARED_CALLS {
            self.shared = 0;
            return false;
        }
        if self.debt > 0.0 {
            self.debt -= MAY_COST;
            return false;
        }
        true
    }

    /// Another helper is here: what was slow before need not be slow now.
    pub(crate) fn forgive(&mut self) {
        self.debt = self.debt.min(0.0);
        self.beside_pairs_per_s = None;
    }

    /// A call with helpers has taken `seconds`; alone it would have taken `alone_s`. In the long
    /// run calls with helpers and without them take at most 3 % longer than without any.
    pub(crate) fn shared(&mut self, seconds: f64, alone_s: f64) {
        self.shared += 1;
        let cost = (seconds / alone_s - 1.0).clamp(-1.0, MOST_COST);
        self.debt = (self.debt + cost - MAY_COST).max(-CREDIT);
    }
}

/// A call whose forecast is kept.
#[derive(Debug)]
struct Kept {
    shape: Shape,
    mask: Mask,
    q_offset: u32,
    gradients: bool,
    bias: Option<BiasTensor>,
    wire: WireFormat,
    /// For so many helpers.
    helpers: usize,
    cuts: Cuts,
    made: Option<(OwnerSpeed, Vec<HelperSpeed>, Forecast)>,
}

/// The forecasts of the last calls.
#[derive(Debug, Default)]
pub(crate) struct Forecasts(Vec<Kept>);

impl Forecasts {
    /// The forecast of a call; the one that was made last, as long as speeds are about the same.
    pub(crate) fn of(
        &mut self,
        call: &Call,
        shape: &Shape,
        owner: &OwnerSpeed,
        helpers: &[HelperSpeed],
    ) -> kyklos::Result<Forecast> {
        let index = self.find(call, shape, helpers.len())?;
        let kept = &mut self.0[index];
        if let Some((of_owner, of_helpers, forecast)) = &kept.made
            && is_about(of_owner, owner)
            && of_helpers.len() == helpers.len()
            && of_helpers.iter().zip(helpers).all(|(before, now)| is_about_helper(before, now))
        {
            return Ok(forecast.clone());
        }
        let forecast = kept.cuts.forecast(owner, helpers);
        kept.made = Some((*owner, helpers.to_vec(), forecast.clone()));
        Ok(forecast)
    }

    /// Pairs of a call.
    pub(crate) fn pairs(&mut self, call: &Call, shape: &Shape) -> kyklos::Result<f64> {
        let index = self.find(call, shape, 0)?;
        Ok(self.0[index].cuts.pairs())
    }

    fn find(&mut self, call: &Call, shape: &Shape, helpers: usize) -> kyklos::Result<usize> {
        let bias = call.bias.as_ref().map(|(tensor, _)| *tensor);
        let same = |kept: &Kept| {
            kept.shape == *shape
                && kept.mask == call.mask
                && (kept.q_offset, kept.gradients, kept.wire) == (call.q_offset, call.gradients, call.wire)
                && kept.bias == bias
        };
        // More helpers need smaller cuts.
        let known = self.0.iter().position(same);
        if let Some(index) = known.filter(|index| self.0[*index].helpers >= helpers) {
            return Ok(index);
        }
        let cuts = Cuts::new(call, shape, helpers.max(1))?;
        if let Some(index) = known {
            self.0.remove(index);
        }
        if self.0.len() == MOST_FORECASTS {
            self.0.remove(0);
        }
        self.0.push(Kept {
            shape: *shape,
            mask: call.mask.clone(),
            q_offset: call.q_offset,
            gradients: call.gradients,
            bias,
            wire: call.wire,
            helpers: helpers.max(1),
            cuts,
            made: None,
        });
        Ok(self.0.len() - 1)
    }
}

fn is_about(a: &OwnerSpeed, b: &OwnerSpeed) -> bool {
    close(a.device.pairs_per_s, b.device.pairs_per_s)
        && close(a.alone_pairs_per_s, b.alone_pairs_per_s)
        && close(a.copies_bytes_per_s, b.copies_bytes_per_s)
}

fn is_about_helper(a: &HelperSpeed, b: &HelperSpeed) -> bool {
    close(a.device.pairs_per_s, b.device.pairs_per_s)
        && close(a.slowness, b.slowness)
        && a.link == b.link
        && a.memory_bytes == b.memory_bytes
}

/// Within 5 %.
fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 0.05 * a.abs().max(b.abs())
}

/// In a row; then one without helpers.
const SHARED_CALLS: u32 = 100;
/// Part of each call that helpers may cost in the long run.
const MAY_COST: f64 = 0.03;
/// Calls that they may cost at once, after good ones.
const CREDIT: f64 = 1.0;
/// What one call is counted as at most.
const MOST_COST: f64 = 100.0;
/// With each call that a helper is left out: half is forgotten in about 70 calls.
const FORGETS: f64 = 0.99;
const MOST_FORECASTS: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_is_known_after_two_calls_of_which_the_first_may_be_slow() {
        let mut known = Known::default();
        known.alone(100.0, 100.0);
        assert!(known.own_speed().is_none());
        known.alone(100.0, 1.0);
        assert_eq!(known.own_speed(), Some([100.0, 100.0]));
        // One slow call of many moves it by half, in factors; what is slow beside helpers says nothing of
        // calls without.
        known.alone(100.0, 4.0);
        known.beside(100.0, 8.0);
        assert_eq!(known.own_speed(), Some([50.0, 25.0]));
    }

    /// Calls that are made alone before helpers are asked again.
    fn alone_calls(known: &mut Known) -> usize {
        (0..100_000).take_while(|_| !known.may_help()).count()
    }

    #[test]
    fn in_the_long_run_helpers_cost_at_most_three_hundredths() {
        // Of each pattern of good and bad calls: seconds of calls that take 1 s alone.
        for pattern in [&[1.1][..], &[2.0], &[0.96, 1.49], &[0.5, 9.0], &[1.02], &[1.0, 1.0, 30.0]] {
            let (mut known, mut seconds, mut calls) = (Known::default(), 0.0, 0.0);
            for number in 0..200_000 {
                if known.may_help() {
                    let shared = pattern[number % pattern.len()];
                    known.shared(shared, 1.0);
                    seconds += shared;
                } else {
                    seconds += 1.0;
                }
                calls += 1.0;
            }
            assert!(seconds <= 1.0301 * calls + 101.0, "{pattern:?}: {} s a call", seconds / calls);
        }
    }

    #[test]
    fn a_bad_call_is_paid_for_and_a_good_one_earns_no_more_than_one_bad_one() {
        let mut known = Known::default();
        known.shared(2.0, 1.0);
        assert_eq!(alone_calls(&mut known), 33);
        for _ in 0..20 {
            known.shared(0.1, 1.0);
        }
        known.shared(2.0, 1.0);
        assert_eq!(alone_calls(&mut known), 0);
        known.shared(2.0, 1.0);
        assert!(alone_calls(&mut known) > 20);
        known.shared(50.0, 1.0);
        known.forgive();
        assert_eq!(alone_calls(&mut known), 0, "another helper is here");
    }

    #[test]
    fn a_helper_that_was_slow_once_is_asked_again_some_day() {
        let mut known = Known::default();
        known.set_helper(7, DeviceSpeed { pairs_per_s: 100.0, step_s: 0.0 });
        known.helped(7, 100.0, 30.0, 60.0, 1.0, true);
        let (device, slowness) = known.of_helper(7).unwrap();
        assert!(device.pairs_per_s < 20.0 && slowness > 1.3);
        (0..700).for_each(|_| known.left_out(7));
        let (device, slowness) = known.of_helper(7).unwrap();
        assert!(device.pairs_per_s > 99.0 && slowness < 1.01, "{device:?} {slowness}");
    }

    #[test]
    fn of_many_shared_calls_one_is_made_alone() {
        let mut known = Known::default();
        let mut shared = 0;
        while shared < 1000 && known.may_help() {
            known.shared(0.5, 1.0);
            shared += 1;
        }
        assert_eq!(shared, 100);
        assert!(known.may_help(), "then again, also if nobody tells how long it took");
    }

    #[test]
    fn a_late_helper_is_slower_and_an_early_one_no_slower_than_seen() {
        let mut known = Known::default();
        known.set_helper(7, DeviceSpeed { pairs_per_s: 100.0, step_s: 0.0 });
        known.helped(7, 100.0, 1.0, 4.0, 1.0, true);
        assert_eq!(known.of_helper(7).unwrap().1, 2.0);
        // It was there when the owner looked, later than forecast: nothing is known.
        known.helped(7, 100.0, 1.0, 9.0, 1.0, false);
        assert_eq!(known.of_helper(7).unwrap().1, 2.0);
        known.helped(7, 100.0, 1.0, 0.25, 1.0, false);
        assert_eq!(known.of_helper(7).unwrap().1, 1.0);
    }
}
