//! Errors as Python exceptions, which `kyklos/_errors.py` defines.

use kyklos::{Error, Remedy};
use kyklos_transport::{Abort, TransportError};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

/// The parts of an exception.
#[derive(Default)]
struct Parts {
    text: String,
    rank: Option<u32>,
    peer: Option<u32>,
    /// Among which the rank at fault is, where it is not known.
    peers: Vec<u32>,
    operation: Option<u64>,
    step: Option<u64>,
}

/// The exception for an error of a call.
pub(crate) fn of_call(py: Python<'_>, error: &Error) -> PyErr {
    let text = error.to_string();
    match error {
        Error::Request { mismatch, remedy } => {
            request(py, Parts { text: format!("{mismatch}: {}", in_python(remedy)), ..Parts::default() })
        }
        Error::Transport(source) => of_transport(py, source, Parts { text, ..Parts::default() }),
        Error::Group { rank, step, source, .. } => {
            let parts =
                Parts { text, rank: Some(*rank), step: u64::try_from(*step).ok(), ..Parts::default() };
            of_transport(py, source, parts)
        }
        Error::Device { .. } | Error::OutOfMemory { .. } => {
            raise(py, "DeviceError", Parts { text, ..Parts::default() })
        }
        _ => raise(py, "GroupError", Parts { text, ..Parts::default() }),
    }
}

/// The exception for a group that cannot be joined.
pub(crate) fn of_launch(py: Python<'_>, error: &kyklos_launch::Error) -> PyErr {
    let parts = Parts { text: error.to_string(), ..Parts::default() };
    if error.is_request() { request(py, parts) } else { raise(py, "GroupError", parts) }
}

/// The exception for a group that does not form.
pub(crate) fn of_forming(py: Python<'_>, error: &TransportError) -> PyErr {
    of_transport(py, error, Parts { text: error.to_string(), ..Parts::default() })
}

/// The exception for a call on a group that cannot take one.
pub(crate) fn unusable(py: Python<'_>, text: &str) -> PyErr {
    raise(py, "GroupError", Parts { text: text.to_owned(), ..Parts::default() })
}

fn of_transport(py: Python<'_>, error: &TransportError, parts: Parts) -> PyErr {
    match error {
        TransportError::Refused { rank, .. } => request(py, Parts { rank: Some(rank.0), ..parts }),
        TransportError::Aborted { abort: Abort { culprit, progress, .. }, .. } => {
            // The step is that of the failed rank, not the one at which this rank waited.
            let parts = Parts {
                peer: Some(culprit.0),
                operation: Some(progress.op),
                step: Some(u64::from(progress.step)),
                ..parts
            };
            raise(py, "GroupError", parts)
        }
        TransportError::Deadline { pending, .. } => {
            let parts = Parts { peer: Some(pending.peer.0), operation: Some(pending.tag.op), ..parts };
            raise(py, "GroupError", parts)
        }
        // Among several peers the late one is not known.
        TransportError::LateExchange { tag, peers, .. } => {
            let peer = if let [only] = peers[..] { Some(only.0) } else { None };
            let peers = peers.iter().map(|peer| peer.0).collect();
            raise(py, "GroupError", Parts { peer, peers, operation: Some(tag.op), ..parts })
        }
        TransportError::PeerMisbehaved { peer, .. } => {
            raise(py, "GroupError", Parts { peer: Some(peer.0), ..parts })
        }
        _ => raise(py, "GroupError", parts),
    }
}

fn request(py: Python<'_>, parts: Parts) -> PyErr {
    raise(py, "RequestError", parts)
}

fn raise(py: Python<'_>, class: &str, parts: Parts) -> PyErr {
    let Parts { text, rank, peer, peers, operation, step } = parts;
    let exception = || -> PyResult<PyErr> {
        let facts = PyDict::new(py);
        facts.set_item("rank", rank)?;
        facts.set_item("peer", peer)?;
        facts.set_item("peers", PyTuple::new(py, &peers)?)?;
        facts.set_item("operation", operation)?;
        facts.set_item("step", step)?;
        let class = py.import("kyklos._errors")?.getattr(class)?;
        Ok(PyErr::from_value(class.call((&text,), Some(&facts))?))
    };
    exception().unwrap_or_else(|_| PyRuntimeError::new_err(text.clone()))
}

/// A remedy with the names of the Python package.
fn in_python(remedy: &Remedy) -> String {
    match remedy {
        Remedy::UseMesh { ulysses, ring } => format!("use mesh=\"{ulysses}x{ring}\", or a ring"),
        other => other.to_string(),
    }
}
