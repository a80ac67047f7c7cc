//! The owner of calls, with the doors for its helpers.

use std::mem::ManuallyDrop;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use kyklos::backend::Device;
use kyklos::in_process_group;
use kyklos_helpers::{Door, HelperOptions, Invitations, Joining, OwnerOptions, help};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use super::call::{CallOptions, Flight, PartArrays, SharedCall, inputs, with_bias};
use crate::devices::Chosen;
use crate::errors;
use crate::tensors::outputs::{Array, Fetched};
use crate::tensors::place::Place;

/// The owner of calls. Every method may be called from any thread.
#[pyclass(frozen, module = "kyklos._kyklos")]
pub(crate) struct Owner {
    owner: ManuallyDrop<Mutex<kyklos_helpers::Owner>>,
    joining: Joining,
    doors: ManuallyDrop<Mutex<Vec<Door>>>,
    place: Place,
    /// A child of this process after `fork` has none of its threads.
    process: u32,
}

impl Drop for Owner {
    fn drop(&mut self) {
        if self.process == std::process::id() {
            // SAFETY: this is the only place that drops them, and it runs once.
            unsafe {
                // First: it takes leave of the helpers that the doors have let in.
                ManuallyDrop::drop(&mut self.owner);
                ManuallyDrop::drop(&mut self.doors);
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Key/value heads and rows of a part, and its results if the helper returned them.
type PartResults = ((u32, u32, u32, u32), Option<Vec<Array>>);

#[pymethods]
impl Owner {
    #[new]
    fn new(check: bool, always: bool) -> Self {
        let mut options = OwnerOptions::default();
        (options.check, options.always) = (check, always);
        let owner = kyklos_helpers::Owner::new(options);
        let joining = owner.joining();
        Self {
            owner: ManuallyDrop::new(Mutex::new(owner)),
            joining,
            doors: ManuallyDrop::default(),
            place: Place::new(Device::cpu()),
            process: std::process::id(),
        }
    }

    /// Opens the door of an invitation, unless it is open for its token.
    fn open(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        let invitation = Invitations::of_user().and_then(|invitations| invitations.read(name));
        let invitation = invitation.map_err(|error| errors::of_call(py, &error))?;
        if lock(&self.doors).iter().any(|door| door.name() == name && door.is_of(&invitation)) {
            return Ok(());
        }
        py.detach(|| lock(&self.owner).expect_helper(name));
        let mut doors = lock(&self.doors);
        doors.retain(|door| door.name() != name);
        doors.push(Door::open(name, invitation, self.joining.clone()));
        Ok(())
    }

    /// A helper in this process, on a thread of its own.
    fn add_local(&self, py: Python<'_>, name: &str, device: &str, memory_bytes: Option<u64>) -> PyResult<()> {
        let device = Chosen::of(device, 0).and_then(|chosen| py.detach(|| chosen.open()));
        let device = device.map_err(|error| errors::of_call(py, &error))?;
        let mut groups = in_process_group(2);
        let (theirs, ours) = (groups.remove(1), groups.remove(0));
        let options = HelperOptions { memory_bytes, ..HelperOptions::default() };
        std::thread::Builder::new()
            .name(format!("helper {name}"))
            .spawn(move || drop(help(theirs, &device, &options)))
            .map_err(|error| {
                PyRuntimeError::new_err(format!("the thread of a helper does not start: {error}"))
            })?;
        let added = py.detach(|| self.joining.add(name, ours));
        added.map(drop).map_err(|error| errors::of_call(py, &error))
    }

    /// The helpers, as a list of dictionaries in JSON.
    fn status(&self, py: Python<'_>) -> String {
        let helpers = py.detach(|| lock(&self.owner).helpers());
        let doors = lock(&self.doors);
        let fault = |name: &str| doors.iter().find(|door| door.name() == name).and_then(Door::fault);
        let all: Vec<_> = helpers
            .iter()
            .map(|helper| {
                serde_json::json!({
                    "name": helper.name,
                    "state": helper.state.name(),
                    "device": helper.device,
                    "share": helper.fraction,
                    "calls": helper.calls,
                    "bytes_sent": helper.bytes_sent,
                    "bytes_received": helper.bytes_received,
                    "why": fault(&helper.name).unwrap_or_else(|| helper.why.clone()),
                })
            })
            .collect();
        serde_json::Value::Array(all).to_string()
    }

    /// Whether a call with so many (query, key) pairs of all heads may be shared at all.
    fn wants(&self, area: u64) -> bool {
        match self.owner.try_lock() {
            Ok(mut owner) => owner.wants(area),
            // Another thread is about to send, or to check: it takes no longer than that.
            Err(TryLockError::WouldBlock) => true,
            Err(TryLockError::Poisoned(owner)) => owner.into_inner().wants(area),
        }
    }

    /// How a call is shared; `None`: the caller computes all of it.
    fn decide(&self, py: Python<'_>, options: CallOptions) -> PyResult<Option<SharedCall>> {
        let described = options.shape().and_then(|shape| Ok((options.call()?, shape)));
        let (call, shape) = described.map_err(|error| errors::of_call(py, &error))?;
        let forecast = py.detach(|| lock(&self.owner).decide_among(&call, &shape, options.names()));
        let forecast = forecast.map_err(|error| errors::of_call(py, &error))?;
        Ok((!forecast.shares.is_empty()).then_some(SharedCall { call, shape, forecast }))
    }

    /// A call has taken so long without helpers.
    fn learn_alone(&self, py: Python<'_>, options: CallOptions, seconds: f64) -> PyResult<()> {
        let described = options.shape().and_then(|shape| Ok((options.call()?, shape)));
        let (call, shape) = described.map_err(|error| errors::of_call(py, &error))?;
        py.detach(|| lock(&self.owner).learn_alone(&call, &shape, seconds));
        Ok(())
    }

    /// The owner has computed its own part of a shared call in so long.
    fn learn_own(&self, py: Python<'_>, shared: &SharedCall, seconds: f64) {
        let SharedCall { call, shape, forecast } = shared;
        py.detach(|| lock(&self.owner).learn_own(call, shape, forecast, seconds));
    }

    /// A shared call has taken so long, until all its results were in their places.
    fn learn_shared(&self, py: Python<'_>, shared: &SharedCall, seconds: f64) {
        let SharedCall { call, shape, forecast } = shared;
        py.detach(|| lock(&self.owner).learn_shared(call, shape, forecast, seconds));
    }

    /// Sends the shares of a call: the arrays of each part of each share. They are not changed
    /// before the flight has ended.
    fn begin(
        &self,
        py: Python<'_>,
        shared: &SharedCall,
        arrays: Vec<Vec<PartArrays<'_>>>,
        bias: Option<&Bound<'_, PyAny>>,
        copying_s: f64,
    ) -> PyResult<Flight> {
        let of_share =
            |share: &Vec<PartArrays<'_>>| share.iter().map(|part| inputs(&self.place, part)).collect();
        let imported: kyklos::Result<Vec<Vec<_>>> = arrays.iter().map(of_share).collect();
        let imported = imported.map_err(|error| errors::of_call(py, &error))?;
        let SharedCall { call, shape, forecast } = shared;
        let call = &with_bias(call, shape, bias).map_err(|error| errors::of_call(py, &error))?;
        let copying = Duration::try_from_secs_f64(copying_s).unwrap_or_default();
        let flight = py.detach(|| lock(&self.owner).begin(call, shape, forecast.clone(), imported, copying));
        let flight = flight.map_err(|error| errors::of_call(py, &error))?;
        Ok(Flight(Mutex::new(Some(flight))))
    }

    /// What the helpers returned: for each share, for each of its parts.
    fn finish(&self, py: Python<'_>, flight: &Flight) -> PyResult<Vec<Vec<PartResults>>> {
        let Some(flight) = lock(&flight.0).take() else {
            return Err(PyRuntimeError::new_err("a flight that has ended"));
        };
        let results = py.detach(|| {
            let landed = flight.land();
            lock(&self.owner).account(landed, None)
        });
        let results = results.map_err(|error| errors::of_call(py, &error))?;
        let array = |tensor: kyklos::Tensor| Ok(Fetched::new(&tensor, false)?.array(false));
        let mut shares = Vec::new();
        for share in results {
            let mut parts = Vec::new();
            for (part, tensors) in share {
                let ranges = (part.kv_heads.start, part.kv_heads.end, part.rows.start, part.rows.end);
                let arrays: Option<kyklos::Result<Vec<Array>>> =
                    tensors.map(|tensors| tensors.into_iter().map(array).collect());
                parts.push((ranges, arrays.transpose().map_err(|error| errors::of_call(py, &error))?));
            }
            shares.push(parts);
        }
        Ok(shares)
    }

    /// Waits until no helper is being measured.
    fn settle(&self, py: Python<'_>, patience_s: f64) {
        let until = Instant::now() + Duration::try_from_secs_f64(patience_s.min(1e6)).unwrap_or_default();
        // Others use the owner meanwhile.
        py.detach(|| while !lock(&self.owner).settle(SETTLE_ROUND) && Instant::now() < until {});
    }

    /// The token of the invitation for one helper, made where there is none.
    #[staticmethod]
    fn invite(py: Python<'_>, name: &str, host: Option<&str>, port: Option<i64>) -> PyResult<String> {
        // What is no port becomes 0, which is refused.
        let port = port.map(|port| u16::try_from(port).unwrap_or(0));
        let invitation = Invitations::of_user().and_then(|invitations| invitations.invite(name, host, port));
        invitation
            .map(|invitation| invitation.token().to_string())
            .map_err(|error| errors::of_call(py, &error))
    }

    /// The names of all invitations of this user.
    #[staticmethod]
    fn invited(py: Python<'_>) -> PyResult<Vec<String>> {
        let names = Invitations::of_user().and_then(|invitations| invitations.names());
        names.map_err(|error| errors::of_call(py, &error))
    }
}

/// For so long the owner is not free at a time.
const SETTLE_ROUND: Duration = Duration::from_millis(20);

const _: fn() = || {
    fn shared<T: Send + Sync>() {}
    shared::<Arc<Owner>>();
};
