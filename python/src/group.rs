//! One rank of a group.

use std::sync::Mutex;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use kyklos::backend::{Backend, StateShape};
use kyklos::{Attention, Error, Output, Result, Session, Tensor};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::backward::{self, GradientArrays};
use crate::cache::{Cache, CacheSettings, in_calls, lock};
use crate::call::{Call, Options};
use crate::errors;
use crate::plans::dtype_of;
use crate::share::{Shared, Sharing};
use crate::tensors::inputs::{BiasUse, Inputs, import, import_backward};
use crate::tensors::outputs::{Array, Fetched};
use crate::tensors::place::Place;
use crate::torch_device::TorchBackend;
use crate::worker::{self, Worker};

/// One rank of a group, with its device.
#[pyclass(frozen, module = "kyklos._kyklos")]
pub(crate) struct Group {
    worker: Worker,
    place: Place,
    /// How messages go, in words.
    collective: String,
    /// Of the last call, as JSON.
    report: Mutex<String>,
}

/// An output, before Python gets it.
pub(crate) struct FetchedOutput {
    o: Fetched,
    lse: Fetched,
    report: String,
}

impl Group {
    /// The group of `session`. When it is closed, it waits at most `leave` for peers. `collective`:
    /// in words how its messages go.
    pub(crate) fn new(session: Session, leave: Duration, collective: String) -> PyResult<Self> {
        let place = Place::new(session.device().clone());
        let worker = Worker::start(session, leave).map_err(|error| {
            PyRuntimeError::new_err(format!("the thread of a group does not start: {error}"))
        })?;
        Ok(Self { worker, place, collective, report: Mutex::new("{}".to_owned()) })
    }

    /// Refuses the next call on all ranks because of `error` of this rank, and returns its
    /// exception.
    pub(crate) fn refuse(&self, py: Python<'_>, error: Error) -> PyErr {
        let reported = error.clone();
        let vote = move |session: &mut Session| pollster::block_on(session.refuse(&reported));
        match self.worker.run(py, vote) {
            Ok(Ok(())) => errors::of_call(py, &error),
            Ok(Err(of_group)) => errors::of_call(py, &of_group),
            Err(raised) => raised,
        }
    }

    /// Imports the arrays of a call, and calls `run` with them on the thread of the session.
    fn with_tensors(
        &self,
        py: Python<'_>,
        call: &Call,
        arrays: [&Bound<'_, PyAny>; 3],
        lse: Lse,
        run: impl FnOnce(&mut Session, &Attention, [&Tensor; 3]) -> Result<Output> + Send + 'static,
    ) -> PyResult<(Array, Array)> {
        let (inputs, returned) =
            import(call, &self.place, arrays, BiasUse::Borrowed).map_err(|error| self.refuse(py, error))?;
        let fetched = self.worker.run(py, move |session| {
            let Inputs { attention, states: [q, k, v] } = &inputs;
            fetch(&run(session, attention, [q, k, v])?, q, lse)
        })?;
        self.finish(py, call, fetched, returned)
    }

    /// The arrays of a call that has ended, whose inputs are free when `returned` ends.
    pub(crate) fn finish(
        &self,
        py: Python<'_>,
        call: &Call,
        fetched: Result<FetchedOutput>,
        returned: Receiver<()>,
    ) -> PyResult<(Array, Array)> {
        // After an error nothing of value is read any more; messages that were never sent keep their memory
        // until the group is closed.
        let FetchedOutput { o, lse, report } = fetched.map_err(|error| errors::of_call(py, &error))?;
        // Other ranks of this process may still read the arrays, and the caller may write to them from now
        // on.
        self.worker.wait_for_loan(py, returned)?;
        self.keep_report(report);
        Ok((o.array(call.heads_first), lse.array(call.heads_first)))
    }

    /// Keeps the figures of the last call.
    pub(crate) fn keep_report(&self, report: String) {
        if let Ok(mut last) = self.report.lock() {
            *last = report;
        }
    }

    pub(crate) fn worker(&self) -> &Worker {
        &self.worker
    }

    pub(crate) fn place(&self) -> &Place {
        &self.place
    }
}

/// The values of a dictionary. One of another type is a wrong request, as a wrong value is: all
/// ranks must learn of it.
fn extracted<'a, 'py, T: FromPyObject<'a, 'py, Error = PyErr>>(values: &'a Bound<'py, PyDict>) -> Result<T> {
    values.as_any().extract().map_err(|error: PyErr| {
        let py = values.py();
        let why = error.cause(py).map_or_else(String::new, |cause| format!(" ({})", cause.value(py)));
        Error::request(format!("{}{why}", error.value(py)), "give it the type that the documentation names")
    })
}

/// The log-sum-exps that Python gets.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Lse {
    /// `[batch, tokens, heads]`.
    Rounded,
    /// `[batch, tokens, heads, 2]`.
    Pair,
}

/// An output, where the queries `q` are.
pub(crate) fn fetch(output: &Output, q: &Tensor, lse: Lse) -> Result<FetchedOutput> {
    let in_place = q.device().is_some();
    Ok(FetchedOutput {
        o: Fetched::new(&output.o, in_place)?,
        lse: match lse {
            Lse::Rounded => Fetched::new(&output.lse, in_place)?.without_last_axis(),
            Lse::Pair => Fetched::new(&output.lse_pair, in_place)?,
        },
        report: serde_json::to_string(&output.report).unwrap_or_default(),
    })
}

#[pymethods]
impl Group {
    #[getter]
    fn rank(&self) -> u32 {
        self.worker.group().rank().0
    }

    #[getter]
    fn size(&self) -> u32 {
        self.worker.group().size()
    }

    #[getter]
    fn device(&self) -> &str {
        &self.place.device().info().name
    }

    /// The index of the NVIDIA GPU whose arrays are read in place; `None` on another device.
    #[getter]
    fn gpu(&self) -> Option<usize> {
        self.place.gpu()
    }

    /// PyTorch's name of the device, if it is one of PyTorch.
    #[getter]
    fn torch_device(&self) -> Option<&str> {
        self.place.device().backend::<TorchBackend>().map(TorchBackend::torch_name)
    }

    /// The kernels that attend on this rank's device, in words.
    fn kernel(&self, py: Python<'_>, dim: usize, dtype: &str) -> PyResult<String> {
        let dtype = dtype_of(dtype).map_err(|error| errors::of_call(py, &error))?;
        let shape = StateShape { batch: 1, rows: 4096, heads: 8, dim };
        Ok(py.detach(|| self.place.device().kernel(dtype, shape)))
    }

    /// How messages go, in words.
    #[getter]
    fn collective(&self) -> &str {
        &self.collective
    }

    /// The figures of the last call, as JSON.
    #[getter]
    fn report(&self) -> String {
        self.report.lock().map(|report| report.clone()).unwrap_or_default()
    }

    /// The network path in one line; `None` within one process.
    #[getter]
    fn network(&self) -> Option<String> {
        self.worker.group().network()
    }

    /// Checks options. If they are wrong, the other ranks get the error too.
    fn call<'py>(&self, py: Python<'py>, options: &Bound<'py, PyDict>) -> PyResult<Call> {
        let options: Result<Options<'py>> = extracted(options);
        let call = options.and_then(|options| Call::of(&options, self.size()));
        call.map_err(|error| self.refuse(py, error))
    }

    fn attend(
        &self,
        py: Python<'_>,
        call: &Call,
        q: &Bound<'_, PyAny>,
        k: &Bound<'_, PyAny>,
        v: &Bound<'_, PyAny>,
        lse_pair: bool,
    ) -> PyResult<(Array, Array)> {
        let lse = if lse_pair { Lse::Pair } else { Lse::Rounded };
        self.with_tensors(py, call, [q, k, v], lse, |session, attention, [q, k, v]| {
            session.attend(attention, q, k, v)
        })
    }

    /// Gradients of q, k and v: `arrays` are q, k, v, o, lse and d_o.
    fn backward(
        &self,
        py: Python<'_>,
        call: &Call,
        arrays: [Bound<'_, PyAny>; 6],
        d_lse: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<GradientArrays> {
        let (inputs, returned) = import_backward(call, &self.place, arrays.each_ref(), d_lse)
            .map_err(|error| self.refuse(py, error))?;
        let fetched = self.worker.run(py, move |session| backward::run(session, &inputs))?;
        let fetched = fetched.map_err(|error| errors::of_call(py, &error))?;
        self.worker.wait_for_loan(py, returned)?;
        self.keep_report(fetched.report.clone());
        Ok(fetched.arrays(call))
    }

    /// The tokens of all ranks. With shares by speed the ranks agree on them.
    fn share<'py>(&self, py: Python<'py>, sharing: &Bound<'py, PyDict>) -> PyResult<Shared> {
        let sharing: Result<Sharing> = extracted(sharing);
        let request = match sharing.and_then(|sharing| sharing.checked(self.size())) {
            Ok(request) => request,
            Err(error) => return Err(self.refuse(py, error)),
        };
        let shared = self.worker.run(py, move |session| request.share(session))?;
        shared.map_err(|error| errors::of_call(py, &error))
    }

    /// How fast each rank attends in such calls.
    fn speeds<'py>(&self, py: Python<'py>, sharing: &Bound<'py, PyDict>) -> PyResult<Vec<u64>> {
        let sharing: Result<Sharing> = extracted(sharing);
        let request = match sharing.and_then(|sharing| sharing.checked(self.size())) {
            Ok(request) => request,
            Err(error) => return Err(self.refuse(py, error)),
        };
        let speeds = self.worker.run(py, move |session| request.speeds(session))?;
        speeds.map_err(|error| errors::of_call(py, &error))
    }

    /// The machine of the group as its ranks measure it, in TOML.
    fn cluster<'py>(&self, py: Python<'py>, sharing: &Bound<'py, PyDict>) -> PyResult<String> {
        let sharing: Result<Sharing> = extracted(sharing);
        let request = match sharing.and_then(|sharing| sharing.checked(self.size())) {
            Ok(request) => request,
            Err(error) => return Err(self.refuse(py, error)),
        };
        let machine = self.worker.run(py, move |session| request.cluster(session))?;
        machine.map_err(|error| errors::of_call(py, &error))
    }

    fn cache<'py>(&self, py: Python<'py>, settings: &Bound<'py, PyDict>) -> PyResult<Cache> {
        let settings: Result<CacheSettings> = extracted(settings);
        let options = match settings.and_then(|settings| settings.options()) {
            Ok(options) => options,
            Err(error) => return Err(self.refuse(py, error)),
        };
        let made = self.worker.run(py, move |session| session.kv_cache(options))?;
        made.map(Cache::new).map_err(|error| errors::of_call(py, &error))
    }

    fn attend_cached(
        &self,
        py: Python<'_>,
        call: &Call,
        cache: &Cache,
        q: &Bound<'_, PyAny>,
        k: &Bound<'_, PyAny>,
        v: &Bound<'_, PyAny>,
    ) -> PyResult<(Array, Array)> {
        let cache = cache.shared();
        self.with_tensors(py, call, [q, k, v], Lse::Rounded, move |session, attention, [q, k, v]| {
            // Held by nobody else: a cache is used by the calls of its group, which follow each other.
            let mut cache = lock(&cache);
            let cache = cache.as_mut().ok_or_else(in_calls)?;
            session.attend_cached(attention, cache, q, k, v)
        })
    }

    /// How many calls of this thread have reached a session.
    #[staticmethod]
    fn calls() -> u64 {
        worker::calls_of_this_thread()
    }

    /// Counts a call that failed before it reached the session.
    fn leave_out_call(&self) {
        self.worker.leave_out_call();
    }

    /// The reverse: a vote against the call follows, which has its place.
    fn take_back_call(&self) {
        self.worker.take_back_call();
    }

    /// Votes against the next call, because of `text`: all ranks get the error, and the group stays
    /// usable.
    #[pyo3(name = "refuse")]
    fn refuse_next(&self, py: Python<'_>, text: &str, remedy: &str) -> PyErr {
        self.refuse(py, Error::request(text, remedy))
    }

    /// Ends the group on all ranks; the others name this rank and `text`.
    fn abort(&self, text: &str) {
        self.worker.abort(text);
    }

    /// Leaves the group in order.
    fn close(&self, py: Python<'_>) {
        self.worker.close(py);
    }
}
