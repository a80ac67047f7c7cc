//! Calls on several caches after one vote: the layers of a step.

use std::sync::Arc;

use kyklos::{Error, KvCache, Result};
use pyo3::prelude::*;

use crate::cache::{Cache, Shared, in_calls, lock};
use crate::call::Call;
use crate::errors;
use crate::group::{Group, Lse, fetch};
use crate::tensors::inputs::{BiasUse, Inputs, import};
use crate::tensors::outputs::Array;
use crate::worker::Answer;

/// One call on each of several caches, on which the ranks have agreed.
#[pyclass(frozen, module = "kyklos._kyklos")]
pub(crate) struct CachedCalls {
    group: Py<Group>,
    call: Call,
    number: u64,
}

/// Caches that are taken out of their places, and go back however the calls end.
struct Taken {
    places: Vec<Shared>,
    caches: Vec<KvCache>,
}

impl Taken {
    fn new(places: Vec<Shared>) -> Result<Self> {
        let mut taken = Self { places, caches: Vec::new() };
        for place in &taken.places {
            let cache = lock(place).take().ok_or_else(in_calls)?;
            taken.caches.push(cache);
        }
        Ok(taken)
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        for (place, cache) in self.places.iter().zip(self.caches.drain(..)) {
            *lock(place) = Some(cache);
        }
    }
}

#[pymethods]
impl CachedCalls {
    /// Agrees on a call on each of `caches`, with arrays like these, whose elements are not read.
    #[new]
    fn new(
        group: &Bound<'_, Group>,
        call: &Call,
        caches: Vec<Bound<'_, Cache>>,
        q: &Bound<'_, PyAny>,
        k: &Bound<'_, PyAny>,
        v: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let (py, rank) = (group.py(), group.get());
        let places: Vec<Shared> = caches.iter().map(|cache| cache.get().shared()).collect();
        let twice = |index: usize| places[..index].iter().any(|place| Arc::ptr_eq(place, &places[index]));
        let prepared = match (0..places.len()).find(|index| twice(*index)) {
            Some(index) => Err(Error::request(
                format!("cache {index} of a step is there twice"),
                "give a cache for each layer",
            )),
            None => import(call, rank.place(), [q, k, v], BiasUse::Kept),
        };
        let (inputs, _) = prepared.map_err(|error| rank.refuse(py, error))?;
        let opened = rank.worker().begin_step(py, move |session, done, calls| {
            let mut taken = match Taken::new(places) {
                Ok(taken) => taken,
                // No announced calls are open, so all caches are in their places.
                Err(error) => return drop(done.send(Err(error))),
            };
            let Inputs { attention, states: [q, k, v] } = &inputs;
            let answer = match session.cached_calls(attention, &mut taken.caches, q, k, v) {
                Ok(mut step) => {
                    let _ = done.send(Ok(()));
                    calls.serve(&mut step)
                }
                Err(error) => Some(Box::new(move || drop(done.send(Err(error)))) as Answer),
            };
            drop(taken);
            if let Some(answer) = answer {
                answer();
            }
        })?;
        let number = opened.map_err(|error| errors::of_call(py, &error))?;
        Ok(Self { group: group.clone().unbind(), call: call.clone(), number })
    }

    /// The call on the next cache.
    fn attend(
        &self,
        py: Python<'_>,
        q: &Bound<'_, PyAny>,
        k: &Bound<'_, PyAny>,
        v: &Bound<'_, PyAny>,
    ) -> PyResult<(Array, Array)> {
        let group = self.group.get();
        // There is no vote by which the others would learn of an error here: the call can be made again.
        let (inputs, returned) = import(&self.call, group.place(), [q, k, v], BiasUse::Without)
            .map_err(|error| errors::of_call(py, &error))?;
        let made = group.worker().in_step(py, self.number, move |calls| {
            let [q, k, v] = &inputs.states;
            let fetched = calls.attend(q, k, v).and_then(|output| fetch(&output, q, Lse::Rounded));
            (fetched, calls.remaining())
        })?;
        let Some((fetched, remaining)) = made else {
            let error = Error::request("a call after all that were announced", "make one call on each cache");
            return Err(errors::of_call(py, &error));
        };
        if remaining == 0 {
            self.close(py);
        }
        group.finish(py, &self.call, fetched, returned)
    }

    /// Ends the calls. If some are missing, that ends the group.
    fn close(&self, py: Python<'_>) {
        self.group.get().worker().end_step(py, self.number);
    }
}
