//! Messages between devices of PyTorch by `torch.distributed`, which moves tensors from device to
//! device by the library of their vendor: a [`Collective`] over a process group of its own.

mod form;
mod watch;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kyklos::backend::{Backend, Device, DeviceBuffer};
use kyklos::collective::{Arrivals, Collective, ExchangeError, Incoming, Memory, Outgoing, Piece};
use kyklos::plan::{ProvedPlans, check_in_order};
use kyklos::{Error, Meter, Result};
use kyklos_transport::{Group, Tag, Vote};
use pyo3::prelude::*;

pub(crate) use self::form::form;
use self::watch::{About, Failure, Outcome, Watch};
use super::{TorchBackend, TorchBuffer};

/// Moves buffers of PyTorch by `torch.distributed`. Votes, aborts and deadlines are those of the
/// group.
///
/// - **Order.** A process group may carry out one exchange after the other, so a plan must end that
///   way: [`check_in_order`]. The plans of all strategies do.
/// - **Failure.** A process group has no way to end a message. After an exchange that failed, or
///   when the group has been aborted, its messages may still be under way, and every exchange of
///   this rank ends with the error.
pub(crate) struct TorchCollective {
    group: Group,
    deadline: Duration,
    device: Device,
    watch: Watch,
    messages: Arc<Messages>,
    /// The hash of the last plans that were checked.
    checked: Mutex<Option<[u8; 32]>>,
}

/// A `kyklos._device._messages.Messages`, which is left when this is dropped.
struct Messages(Py<PyAny>);

impl Messages {
    /// Leaves the process group while its messages may be under way.
    fn abandon(&self) {
        // Without the interpreter the process ends.
        let _ = Python::try_attach(|py| self.0.call_method0(py, "abandon").map(drop));
    }
}

impl Drop for Messages {
    fn drop(&mut self) {
        let _ = Python::try_attach(|py| self.0.call_method0(py, "close").map(drop));
    }
}

/// What Python calls once: without an error, or with its words.
#[pyclass(frozen)]
struct Done(Mutex<Option<Report>>);

type Report = Box<dyn FnOnce(Option<String>) + Send>;

#[pymethods]
impl Done {
    fn __call__(&self, error: Option<String>) {
        let report = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(report) = report {
            report(error);
        }
    }
}

impl Done {
    fn new(report: impl FnOnce(Option<String>) + Send + 'static) -> Self {
        Self(Mutex::new(Some(Box::new(report))))
    }
}

/// An exchange under way.
struct Posted {
    /// The buffers of each message that arrives.
    arrived: Vec<Vec<DeviceBuffer>>,
    /// Of Python, and its end. `None`: all its messages are empty.
    exchange: Option<(Py<PyAny>, Outcome)>,
}

/// Bytes of a tensor: the peer, the number of the message for backends that tell messages by
/// numbers, the tensor, the first byte and the end.
type Transfer = (u32, i32, Py<PyAny>, usize, usize);

impl TorchCollective {
    fn post(
        &self,
        device: &Device,
        tag: Tag,
        memory: &mut Memory<DeviceBuffer>,
        sends: &[Outgoing],
        recvs: &[Incoming],
    ) -> std::result::Result<Posted, Failure> {
        let foreign = || {
            Failure::Own(Error::request(
                format!("a message of {} by torch.distributed for another device", device.info().name),
                "use the device for which the group was formed",
            ))
        };
        let backend = device.backend::<TorchBackend>().filter(|_| device.is_same(&self.device));
        let backend = backend.ok_or_else(foreign)?;
        let mut about = About::new(tag);
        // Shared, so what the plan writes next goes elsewhere. They also hold the callers' memory.
        let (mut sent, mut received) = (Vec::new(), Vec::new());
        for Outgoing { to, pieces } in sends {
            for (index, Piece { buffer, tensor, bytes, .. }) in pieces.iter().enumerate() {
                let from = memory.tensor(*buffer, *tensor).get_mut::<TorchBuffer>().ok_or_else(foreign)?;
                // Both sides leave empty pieces out.
                if !bytes.is_empty() {
                    sent.push((to.0, number(tag, index), from.share(), bytes.clone()));
                    about.send(*to, bytes.len());
                }
            }
        }
        let mut arrived = Vec::new();
        for Incoming { from, piece_bytes } in recvs {
            let mut pieces = Vec::with_capacity(piece_bytes.len());
            for (index, bytes) in piece_bytes.iter().enumerate() {
                let into = backend.alloc("received", *bytes).map_err(Failure::Own)?;
                if *bytes > 0 {
                    let tensor = backend.with(|py, _| Ok(into.tensor(py)?.clone().unbind()));
                    received.push((from.0, number(tag, index), tensor.map_err(Failure::Own)?, 0, *bytes));
                    about.receive(*from, *bytes);
                }
                pieces.push(DeviceBuffer::new(into));
            }
            arrived.push(pieces);
        }
        if sent.is_empty() && received.is_empty() {
            return Ok(Posted { arrived, exchange: None });
        }
        let (place, outcome) = self.watch.post(about)?;
        let posted = backend.with(|py, _| {
            let tensor_of = |(peer, number, buffer, bytes): &(_, _, TorchBuffer, std::ops::Range<usize>)| {
                PyResult::Ok((*peer, *number, buffer.tensor(py)?.clone().unbind(), bytes.start, bytes.end))
            };
            let sends = sent.iter().map(tensor_of).collect::<PyResult<Vec<Transfer>>>()?;
            let done = Done::new(move |error| {
                // The caller's memory is free before the call ends.
                drop(sent);
                place.end(error);
            });
            self.messages.0.call_method1(py, "post", (sends, received, done))
        });
        match posted {
            Ok(exchange) => Ok(Posted { arrived, exchange: Some((exchange, outcome)) }),
            // Some of its messages may be under way.
            Err(error) => Err(self.watch.fail(of_messages(error))),
        }
    }

    async fn ended(
        &self,
        Posted { arrived, exchange }: Posted,
    ) -> std::result::Result<Vec<Vec<DeviceBuffer>>, Failure> {
        if let Some((exchange, outcome)) = exchange {
            // The thread that watches it has ended: so has the group.
            outcome.await.unwrap_or(Err(Failure::Group))?;
            // What this thread gives to the device from now on comes after the messages.
            let backend = self.device.backend::<TorchBackend>().expect("post has had it");
            let ordered = backend.with(|py, _| exchange.call_method0(py, "order").map(drop));
            ordered.map_err(Failure::Own)?;
        }
        Ok(arrived)
    }

    async fn explain(&self, failure: Failure) -> ExchangeError {
        match failure {
            Failure::Own(error) => ExchangeError::Own(error),
            Failure::Late(error) => ExchangeError::Transport(error),
            // Any call of the group returns the failure of a group that has been aborted.
            Failure::Group => match self.group.agree(Vote::ready([0; 32]), self.deadline).await {
                Err(error) => ExchangeError::Transport(error),
                Ok(_) => ExchangeError::Own(Error::Cancelled),
            },
        }
    }
}

/// An error of PyTorch in an operation on messages.
fn of_messages(error: Error) -> Error {
    match error {
        Error::Device { device, native, .. } => {
            Error::Device { device, operation: OPERATION.to_owned(), native }
        }
        other => other,
    }
}

/// What has failed, in errors.
const OPERATION: &str = "exchange messages by torch.distributed";

/// The number of a piece of a message. Few messages are under way together, so these differ; where
/// two are equal, they arrive in the order in which they were sent.
fn number(Tag { op, message }: Tag, piece: usize) -> i32 {
    let low = |value: u64, bits: u32| i32::try_from(value % (1 << bits)).expect("fewer than 31 bits");
    (low(op, 10) << 21) | (low(u64::from(message), 12) << 9) | low(piece as u64, 9)
}

impl Collective<Device> for TorchCollective {
    fn post_exchange<'a>(
        &'a self,
        device: &'a Device,
        meter: &'a Meter,
        tag: Tag,
        memory: &mut Memory<DeviceBuffer>,
        sends: &[Outgoing],
        recvs: &[Incoming],
    ) -> Arrivals<'a, DeviceBuffer> {
        let posted = self.post(device, tag, memory, sends, recvs);
        for send in sends {
            meter.sent(send.pieces.iter().map(|piece| piece.bytes.len() as u64).sum());
        }
        Box::pin(async move {
            let ended = match posted {
                Ok(posted) => self.ended(posted).await,
                Err(failure) => Err(failure),
            };
            match ended {
                Ok(arrived) => {
                    meter.arrived(tag.message);
                    Ok(arrived)
                }
                Err(failure) => Err(self.explain(failure).await),
            }
        })
    }

    fn supports(&self, plans: &ProvedPlans) -> Result<()> {
        let mut checked = self.checked.lock().unwrap_or_else(PoisonError::into_inner);
        if *checked == Some(plans.hash()) {
            return Ok(());
        }
        check_in_order(plans.set()).map_err(|error| {
            Error::request(
                format!(
                    "plans for torch.distributed, which carries out one exchange after the other ({error})"
                ),
                "use collective=\"host\"",
            )
        })?;
        *checked = Some(plans.hash());
        Ok(())
    }

    fn group(&self) -> &Group {
        &self.group
    }

    fn deadline(&self) -> Duration {
        self.deadline
    }
}
