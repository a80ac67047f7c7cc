//! The results of helpers: they are checked, and their times correct the speeds that are known.

use std::time::Instant;

use kyklos::Result;

use super::flight::{Fault, Flight, Inputs, Landed, LandedShare, Outcome, Results};
use super::{Class, HelperState, Owner};
use crate::call::{Call, Shape};
use crate::forecast::Share;

impl Owner {
    /// Takes what the helpers have computed, and does not wait much longer than was forecast.
    /// `own_s`: for how long the caller has computed its own part, if it knows. Blocks.
    ///
    /// # Errors
    /// Of the processor, where results are checked. That helpers fail is none.
    pub fn finish(&mut self, flight: Flight, own_s: Option<f64>) -> Result<Results> {
        self.account(flight.land(), own_s)
    }

    /// Checks the results of helpers, and corrects the speeds that are known by their times.
    ///
    /// # Errors
    /// As [`Self::finish`].
    pub fn account(&mut self, landed: Landed, own_s: Option<f64>) -> Result<Results> {
        let Landed { call, shape, forecast, shares, token } = landed;
        let class = Class::of(&call, &shape);
        let pairs = self.forecasts.pairs(&call, &shape)?;
        if let Some(own_s) = own_s {
            self.learn_own(&call, &shape, &forecast, own_s);
        }
        let mut all = Vec::new();
        for LandedShare { number, name, share, inputs, outcome, seconds } in shares {
            let Some(mut outcome) = outcome else {
                all.push(share.parts.into_iter().map(|part| (part, None)).collect());
                continue;
            };
            self.check((&call, &shape), number, &share, &inputs, &mut outcome, forecast.alone_s)?;
            if outcome.fault.is_none() {
                let known = self.classes.entry(class).or_default();
                let pairs = pairs * share.fraction;
                known.helped(number, pairs, outcome.computing_s, seconds, share.end_s, outcome.waited);
            }
            self.note(number, &name, &share, &outcome, class, seconds);
            all.push(share.parts.into_iter().zip(outcome.results).collect());
        }
        drop(token);
        Ok(all)
    }

    /// Computes a row of the results again; a helper whose row is wrong gives none.
    fn check(
        &mut self,
        (call, shape): (&Call, &Shape),
        number: u64,
        share: &Share,
        inputs: &[Inputs],
        outcome: &mut Outcome,
        alone_s: f64,
    ) -> Result<()> {
        // At most a hundredth of the call goes into checks; the first results of a helper are checked.
        let seldom = (self.checking_s / (alone_s * 0.01).max(1e-6)).ceil().clamp(1.0, 1e6);
        let is_first = !self.checked.contains(&number);
        if !self.options.check || (!is_first && self.checker.random(seldom as u32) != 0) {
            return Ok(());
        }
        let there: Vec<usize> = (0..inputs.len()).filter(|index| outcome.results[*index].is_some()).collect();
        let Some(index) = there.get(self.checker.random(u32::try_from(there.len()).unwrap_or(1)) as usize)
        else {
            return Ok(());
        };
        let Some(keys) = inputs[..=*index].iter().rev().find_map(|inputs| inputs.keys.as_ref()) else {
            return Ok(());
        };
        let Some(results) = &outcome.results[*index] else { return Ok(()) };
        let began = Instant::now();
        let part = &share.parts[*index];
        let of_part = (&part.call(call, shape), &part.shape(shape));
        let wrong = self.checker.wrong(of_part, &inputs[*index], keys, results, call.wire)?;
        self.checking_s = began.elapsed().as_secs_f64();
        self.checked.insert(number);
        if let Some(what) = wrong {
            outcome.results.iter_mut().for_each(|results| *results = None);
            outcome.fault = Some(Fault::Lost(format!("{LIED}{what}")));
        }
        Ok(())
    }

    /// Notes what became of a helper.
    fn note(
        &mut self,
        number: u64,
        name: &str,
        share: &Share,
        outcome: &Outcome,
        class: Class,
        seconds: f64,
    ) {
        let status = self.status_of(name);
        status.received(share, outcome.fault.is_none());
        match &outcome.fault {
            // Another thread may have sent it away meanwhile.
            None if status.state == HelperState::Working => status.state = HelperState::Ready,
            None => {}
            Some(Fault::Refused(text)) => {
                status.refused(text);
                // It stays for other calls, and what it lacks now it may have later.
                self.refused.insert((number, class), CALLS_AFTER_REFUSAL);
            }
            Some(Fault::Late) => {
                let known = self.classes.entry(class).or_default();
                known.helped(number, 0.0, 0.0, 2.0 * seconds, share.end_s, true);
                self.status_of(name).late();
                self.drain(number);
            }
            Some(Fault::Lost(text)) if text.starts_with(LIED) => {
                self.status_of(name).lied(&text[LIED.len()..]);
                self.dismiss(number);
            }
            Some(Fault::Lost(text)) => {
                status.lost(text.clone());
                self.dismiss(number);
            }
        }
    }
}

/// Calls of a class for which a helper is not asked after it has refused one.
const CALLS_AFTER_REFUSAL: u32 = 64;
/// Before the words about a result that is wrong.
const LIED: &str = "lied: ";
