//! The ranks of a group agree to use `torch.distributed`, and try it.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_channel::oneshot;
use kyklos::backend::Device;
use kyklos::{Error, Result, SessionOptions};
use kyklos_transport::{Group, MAX_NOTE_BYTES, Vote};
use pyo3::prelude::*;

use super::watch::{Setup, Watch};
use super::{Done, Messages, TorchCollective};
use crate::torch_device::TorchBackend;

/// Hashes for the votes: ranks that do something else at that time are told so.
const OFFER: [u8; 32] = *b"from_torch(collective=\"torch\"),1";
const OPENED: [u8; 32] = *b"from_torch(collective=\"torch\"),2";

/// The first byte of a note.
const NO: u8 = 0;
const YES: u8 = 1;
const UNDER_WAY: u8 = 2;
/// It has not met the other ranks, of which another one may know more.
const ALONE: u8 = 3;

/// Longest time to form.
const FORM: Duration = Duration::from_secs(60);
/// How much longer PyTorch waits than a group: an NCCL of PyTorch ends the process then.
const LONGER: Duration = Duration::from_secs(60);
/// A rank whose process group is being made votes after this time, and after longer ones up to the
/// second, so that all ranks soon learn that one has failed.
const FIRST_PATIENCE: Duration = Duration::from_millis(100);
const LONGEST_PATIENCE: Duration = Duration::from_secs(1);

/// What the ranks have agreed on: a collective and in words how messages go, or why there is none,
/// the same on all ranks.
pub(crate) type Decision = std::result::Result<(Arc<TorchCollective>, String), String>;

/// Agrees with all ranks of `group` to exchange messages by a process group like `process_group`,
/// which has the same ranks. All ranks call it, at the same place between two operations of the
/// group. Blocks until all have tried it.
///
/// # Errors
/// If the group fails. That a rank cannot is no error but the decision of all ranks.
pub(crate) fn form(
    process_group: &Py<PyAny>,
    group: &Group,
    device: &Device,
    options: &SessionOptions,
) -> Result<Decision> {
    let form_within = options.deadline.min(FORM);
    let offer = prepare(process_group, device);
    let note = match &offer {
        Ok((_, way)) => note(YES, way),
        Err(why) => note(NO, why),
    };
    let notes = agree(group, OFFER, note, form_within)?;
    if let Some(why) = refusal(&notes) {
        return Ok(Err(why));
    }
    let Ok((messages, way)) = offer else { unreachable!("this rank has offered it") };
    let messages = Arc::new(messages);
    let mut opening = Opening::start(&messages, options.deadline, form_within);
    let mut patience = FIRST_PATIENCE;
    loop {
        let status = opening.status(patience);
        patience = LONGEST_PATIENCE.min(patience * 2);
        let notes = agree(group, OPENED, status, form_within)?;
        if let Some(why) = failure(&notes) {
            messages.abandon();
            return Ok(Err(why));
        }
        if notes.iter().all(|note| note.first() == Some(&YES)) {
            break;
        }
    }
    let setup =
        Setup { stop: group.stop_flag(), deadline: options.deadline, device: device.info().name.clone() };
    let watch = Watch::start(setup, messages.clone()).map_err(|error| Error::Device {
        device: device.info().name.clone(),
        operation: "start a thread for torch.distributed".to_owned(),
        native: error.to_string(),
    })?;
    let (group, deadline, device) = (group.clone(), options.deadline, device.clone());
    let checked = Mutex::new(None);
    let words = format!("torch.distributed ({})", way.split(' ').next_back().unwrap_or_default());
    Ok(Ok((Arc::new(TorchCollective { group, deadline, device, watch, messages, checked }), words)))
}

/// What this rank needs, with its kind of device and backend; or why it cannot.
fn prepare(process_group: &Py<PyAny>, device: &Device) -> std::result::Result<(Messages, String), String> {
    let Some(backend) = device.backend::<TorchBackend>() else {
        return Err(format!("its device is {}, not one of PyTorch", device.info().name));
    };
    let offer = |py: Python<'_>| -> PyResult<_> {
        let class = py.import("kyklos._device._messages")?.getattr("Messages")?;
        let messages = class.call1((process_group, &backend.device))?;
        let way: String = messages.getattr("way")?.extract()?;
        Ok((Messages(messages.unbind()), way))
    };
    Python::attach(|py| offer(py).map_err(|error| error.value(py).to_string()))
}

fn agree(group: &Group, plan_hash: [u8; 32], note: Bytes, within: Duration) -> Result<Vec<Bytes>> {
    // A rank votes at the latest when its own time is over.
    Ok(pollster::block_on(group.agree(Vote::Ready { plan_hash, note }, within.saturating_mul(2)))?)
}

/// As much of a text as fits into a note.
fn note(kind: u8, text: &str) -> Bytes {
    let end = (0..MAX_NOTE_BYTES.min(text.len() + 1)).rev().find(|end| text.is_char_boundary(*end));
    [&[kind][..], &text.as_bytes()[..end.unwrap_or(0)]].concat().into()
}

fn text(note: &[u8]) -> String {
    String::from_utf8_lossy(note.get(1..).unwrap_or_default()).into_owned()
}

/// Why the offers of all ranks do not fit: of the lowest rank that is not with rank 0.
fn refusal(notes: &[Bytes]) -> Option<String> {
    let of_first = text(notes.first()?);
    notes.iter().enumerate().find_map(|(rank, note)| match note.first() {
        Some(&YES) if text(note) == of_first => None,
        Some(&YES) => Some(format!("rank {rank}: it has {}, and rank 0 has {of_first}", text(note))),
        _ => Some(format!("rank {rank}: {}", text(note))),
    })
}

/// The lowest rank that has failed; one that has only waited in vain if there is no other.
fn failure(notes: &[Bytes]) -> Option<String> {
    let of = |kind| {
        let rank = notes.iter().position(|note| note.first() == Some(&kind))?;
        Some(format!("rank {rank}: {}", text(&notes[rank])))
    };
    of(NO).or_else(|| of(ALONE))
}

/// A process group while it is made and tried.
struct Opening {
    ended: oneshot::Receiver<Option<String>>,
    status: Option<Bytes>,
    since: Instant,
    within: Duration,
}

impl Opening {
    /// Begins it, on a thread of Python.
    fn start(messages: &Messages, deadline: Duration, within: Duration) -> Self {
        let (promise, ended) = oneshot::channel();
        let end = move |error| {
            // The ranks may have decided meanwhile.
            let _ = promise.send(error);
        };
        let [form_s, message_s] = [within, deadline + LONGER].map(|time| time.as_secs_f64());
        let begun = Python::attach(|py| {
            let begun = messages.0.call_method1(py, "open", (form_s, message_s, Done::new(end)));
            begun.map(drop).map_err(|error| error.value(py).to_string())
        });
        let status = begun.err().map(|why| note(NO, &why));
        Self { ended, status, since: Instant::now(), within }
    }

    /// For the other ranks, after at most `patience`.
    fn status(&mut self, patience: Duration) -> Bytes {
        let until = Instant::now() + patience;
        while self.status.is_none() {
            self.status = match self.ended.try_recv() {
                Ok(Some(None)) => Some(note(YES, "")),
                Ok(Some(Some(why))) => Some(note(NO, &why)),
                Err(_) => Some(note(NO, "its thread has ended")),
                Ok(None) if self.since.elapsed() >= self.within => {
                    let waited = self.within.as_secs();
                    Some(note(ALONE, &format!("its trial message had not arrived after {waited} s")))
                }
                Ok(None) if Instant::now() >= until => return note(UNDER_WAY, ""),
                Ok(None) => None,
            };
            if self.status.is_none() {
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        self.status.clone().unwrap_or_default()
    }
}
