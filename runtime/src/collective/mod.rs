//! The interface between the executor and a network: it moves a backend's buffers between ranks.
//!
//! # Contract
//!
//! - [`Collective::post_exchange`] starts as much as possible at once, and never blocks. Some work
//!   has to wait, such as a send whose copy off the device is not done. It continues when the
//!   returned future is polled. The executor polls all exchanges under way whenever it waits, so
//!   messages travel while the device computes.
//! - Each part arrives in a new buffer. The plan says what happens to it.
//! - A collective may end an exchange before its messages have moved, if the device does nothing
//!   with their buffers before they have. [`Collective::settled`] then says when they have, and
//!   whether they have. The executor asks before it measures a step that uses them, and before it
//!   returns a result.
//! - **Panics.** Plans are proved before they run ([`check`](crate::plan::check())), so
//!   implementations and [`Memory`] may panic on a buffer that is not alive.

mod one_device;

use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::{join_all, try_join};
use futures_util::stream::{FuturesUnordered, TryStreamExt};
use kyklos_transport::{Abort, Group, Posted, Progress, Pulse, Rank, Tag, Taken, TransportError, Vote};

use crate::backend::Backend;
use crate::meter::{Meter, Timeline};
use kyklos_plan::plan::{BufferId, ProvedPlans};

pub use one_device::OneDevice;

/// Device memory of a plan's buffers: for each buffer that is alive, its tensors.
#[derive(Debug)]
pub struct Memory<Buffer> {
    buffers: Vec<Option<Vec<Buffer>>>,
}

/// Adjacent bytes of one tensor of a buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The buffer of the plan.
    pub buffer: BufferId,
    /// Index of the tensor in it.
    pub tensor: usize,
    /// Range of bytes in the tensor.
    pub bytes: Range<usize>,
    /// Whether these are all bytes of the tensor.
    pub is_whole: bool,
}

/// A message to a peer.
#[derive(Clone, Debug)]
pub struct Outgoing {
    /// The receiver.
    pub to: Rank,
    /// Its payload, in order.
    pub pieces: Vec<Piece>,
}

/// A message from a peer.
#[derive(Clone, Debug)]
pub struct Incoming {
    /// The sender.
    pub from: Rank,
    /// Bytes of each piece, in order.
    pub piece_bytes: Vec<usize>,
}

/// Ends with the pieces of each incoming message as new buffers, in the order of the posted
/// receives.
pub type Arrivals<'a, Buffer> = Pin<Box<dyn Future<Output = Result<Vec<Vec<Buffer>>, ExchangeError>> + 'a>>;

/// Ends when the messages of an exchange have moved.
pub type Settled<'a> = Pin<Box<dyn Future<Output = Result<(), ExchangeError>> + 'a>>;

/// Why an exchange ended early.
#[derive(Clone, Debug)]
pub enum ExchangeError {
    /// The network or a peer failed.
    Transport(TransportError),
    /// This rank's own device failed.
    Own(crate::error::Error),
}

/// Moves buffers of `B` between the ranks of a group.
pub trait Collective<B: Backend> {
    /// Posts the messages of one exchange together. `tag` is the same for all of them: at most one
    /// message goes from one rank to another in an exchange.
    fn post_exchange<'a>(
        &'a self,
        backend: &'a B,
        meter: &'a Meter,
        tag: Tag,
        memory: &mut Memory<B::Buffer>,
        sends: &[Outgoing],
        recvs: &[Incoming],
    ) -> Arrivals<'a, B::Buffer>;

    /// Whether the messages of the exchange `tag`, which has ended well, have moved; `None` if that
    /// is so for every exchange that has ended. Called once for each exchange.
    fn settled(&self, _tag: Tag) -> Option<Settled<'_>> {
        None
    }

    /// How many steps the executor may have submitted to the device whose ends it has not noticed
    /// yet. 0: it waits for each step. More only if the device keeps the order of messages and
    /// work by itself, and if [`Backend::wait`] ends with what was submitted before its first
    /// poll.
    fn steps_ahead(&self) -> usize {
        0
    }

    /// Refuses plans whose exchanges this collective cannot carry out; the same on all ranks.
    /// Called before data moves.
    ///
    /// # Errors
    /// [`Error::Request`](crate::Error::Request).
    fn supports(&self, _plans: &ProvedPlans) -> crate::error::Result<()> {
        Ok(())
    }

    /// This rank's endpoint in the group.
    fn group(&self) -> &Group;

    /// How long a message or an agreement may take before it is an error.
    fn deadline(&self) -> Duration;

    /// Casts this rank's vote before an operation; ends with the notes of all ranks, see
    /// [`Transport::agree`](kyklos_transport::Transport::agree).
    fn agree(&self, vote: Vote) -> Posted<Vec<Bytes>> {
        self.group().agree(vote, self.deadline())
    }

    /// Ends the operation on all ranks, see
    /// [`Transport::abort`](kyklos_transport::Transport::abort).
    fn abort(&self, abort: Abort) {
        self.group().abort(abort);
    }

    /// Reports which step this rank has reached, see
    /// [`Transport::report_progress`](kyklos_transport::Transport::report_progress).
    fn report_progress(&self, progress: Progress) {
        self.group().report_progress(progress);
    }

    /// Beats while this rank works, see [`Transport::pulse`](kyklos_transport::Transport::pulse).
    fn pulse(&self) -> Arc<Pulse> {
        self.group().pulse()
    }

    /// True once the group has been aborted.
    fn stop_flag(&self) -> Arc<AtomicBool> {
        self.group().stop_flag()
    }
}

/// A collective for any backend over any transport. It stages messages in host memory: it copies
/// from the device to the host, sends, receives, and copies to the device.
#[derive(Clone, Debug)]
pub struct HostStaged {
    group: Group,
    deadline: Duration,
}

impl HostStaged {
    /// Staging over the messages of `group`. A message or an agreement that takes longer than
    /// `deadline` is an error.
    pub fn new(group: impl Into<Group>, deadline: Duration) -> Self {
        Self { group: group.into(), deadline }
    }
}

impl<B: Backend> Collective<B> for HostStaged {
    fn post_exchange<'a>(
        &'a self,
        backend: &'a B,
        meter: &'a Meter,
        tag: Tag,
        memory: &mut Memory<B::Buffer>,
        sends: &[Outgoing],
        recvs: &[Incoming],
    ) -> Arrivals<'a, B::Buffer> {
        // Receives first: a peer may already wait for them.
        let recvs: Vec<_> = recvs
            .iter()
            .map(|recv| {
                let posted = self.group.post_recv(recv.from, tag, &recv.piece_bytes, self.deadline);
                (recv.from, meter.start(), posted)
            })
            .map(|(from, started, posted)| async move {
                let pieces = posted.await.map_err(ExchangeError::Transport)?;
                let bytes = || pieces.iter().map(Bytes::len).sum::<usize>();
                meter.message_done(started, (Timeline::Receive, from), || {
                    format!("{} B from rank {from}, {tag}", bytes())
                });
                let copying = meter.start();
                let uploaded: crate::error::Result<Vec<_>> =
                    pieces.into_iter().map(|piece| backend.upload("received", piece)).collect();
                meter.end(copying, Timeline::Copy, || format!("upload {tag}"));
                uploaded.map_err(ExchangeError::Own)
            })
            .collect();
        let sends: Vec<_> = sends
            .iter()
            .map(|send| {
                let copying = meter.start();
                let mut downloads = join_all(send.pieces.iter().map(|piece| {
                    backend.download(memory.tensor(piece.buffer, piece.tensor), piece.bytes.clone())
                }));
                // A host backend has the bytes at once; the message is then sent at once.
                let ready = (&mut downloads).now_or_never();
                meter.end(copying, Timeline::Copy, || format!("download {tag}"));
                let to = send.to;
                let bytes: usize = send.pieces.iter().map(|piece| piece.bytes.len()).sum();
                let pulse = self.group.pulse();
                let early = ready.map(|pieces| (meter.start(), self.send(meter, to, tag, pieces)));
                async move {
                    let (started, posted) = match early {
                        Some(posted) => posted,
                        None => {
                            let work = pulse.work();
                            let pieces = downloads.await;
                            drop(work);
                            (meter.start(), self.send(meter, to, tag, pieces))
                        }
                    };
                    let taken = posted?.await.map_err(ExchangeError::Transport)?;
                    let unasked_ns = meter.taken(tag.message, started, taken.under_way);
                    meter.message_done(started, (Timeline::Send, to), || {
                        format!("{bytes} B to rank {to}, {tag}, requested after {} us", unasked_ns / 1000)
                    });
                    Ok(())
                }
            })
            .collect();
        Box::pin(async move {
            let recvs = async {
                let arrived = all_in_order(recvs).await?;
                meter.arrived(tag.message);
                Ok(arrived)
            };
            Ok(try_join(recvs, all_in_order(sends)).await?.0)
        })
    }

    fn group(&self) -> &Group {
        &self.group
    }

    fn deadline(&self) -> Duration {
        self.deadline
    }
}

/// Ends with the values of all futures, in their order, or with the first failure, whichever future
/// it is of. (The `try_join_all` of `futures` notices a failure behind the 30th only when those
/// before it have ended.)
///
/// ```
/// use std::future::{pending, ready};
///
/// use futures_util::future::Either;
/// use kyklos::collective::all_in_order;
///
/// let never = (0..40).map(|_| Either::Left(pending::<Result<u32, &str>>()));
/// let ended = pollster::block_on(all_in_order(never.chain([Either::Right(ready(Err("lost")))]).collect()));
/// assert_eq!(ended, Err("lost"));
/// ```
///
/// # Errors
/// The first failure.
pub async fn all_in_order<T, E>(futures: Vec<impl Future<Output = Result<T, E>>>) -> Result<Vec<T>, E> {
    let mut values: Vec<Option<T>> = Vec::new();
    values.resize_with(futures.len(), || None);
    let placed =
        futures.into_iter().enumerate().map(|(place, future)| async move { Ok((place, future.await?)) });
    let mut under_way: FuturesUnordered<_> = placed.collect();
    while let Some((place, value)) = under_way.try_next().await? {
        values[place] = Some(value);
    }
    Ok(values.into_iter().flatten().collect())
}

impl HostStaged {
    fn send(
        &self,
        meter: &Meter,
        to: Rank,
        tag: Tag,
        pieces: Vec<crate::error::Result<Bytes>>,
    ) -> Result<Posted<Taken>, ExchangeError> {
        let pieces =
            pieces.into_iter().collect::<crate::error::Result<Vec<_>>>().map_err(ExchangeError::Own)?;
        meter.sent(pieces.iter().map(|piece| piece.len() as u64).sum());
        Ok(self.group.post_send(to, tag, pieces, self.deadline))
    }
}

impl<Buffer> Default for Memory<Buffer> {
    fn default() -> Self {
        Self { buffers: Vec::new() }
    }
}

impl<Buffer> From<Vec<Vec<Buffer>>> for Memory<Buffer> {
    /// The tensors of the buffers 0, 1, …, all of them alive: for tests of a collective of your
    /// own.
    fn from(buffers: Vec<Vec<Buffer>>) -> Self {
        Self { buffers: buffers.into_iter().map(Some).collect() }
    }
}

impl<Buffer> Memory<Buffer> {
    /// `count` buffers, none of them alive.
    pub(crate) fn new(count: usize) -> Self {
        Self { buffers: (0..count).map(|_| None).collect() }
    }

    /// One tensor of a buffer that is alive.
    ///
    /// # Panics
    /// When the buffer is not alive. A plan that was proved ([`check`](crate::plan::check())) never
    /// asks for one.
    pub fn tensor(&mut self, buffer: BufferId, tensor: usize) -> &mut Buffer {
        &mut self.tensors(buffer)[tensor]
    }

    pub(crate) fn tensors(&mut self, buffer: BufferId) -> &mut Vec<Buffer> {
        self.buffers[buffer.0].as_mut().expect("a checked plan uses buffers only while they are alive")
    }

    pub(crate) fn view(&self, buffer: BufferId, tensor: usize) -> &Buffer {
        let tensors = self.buffers[buffer.0].as_ref();
        &tensors.expect("a checked plan uses buffers only while they are alive")[tensor]
    }

    pub(crate) fn is_alive(&self, buffer: BufferId) -> bool {
        self.buffers[buffer.0].is_some()
    }

    pub(crate) fn put(&mut self, buffer: BufferId, tensors: Vec<Buffer>) {
        self.buffers[buffer.0] = Some(tensors);
    }

    pub(crate) fn take(&mut self, buffer: BufferId) -> Option<Vec<Buffer>> {
        self.buffers.get_mut(buffer.0)?.take()
    }
}
