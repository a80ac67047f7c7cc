//! The seam between plans and networks: moves a backend's buffers between ranks.
//!
//! # Contract
//!
//! - [`Collective::post_exchange`] starts everything it can at once and never blocks. What it could not start (a
//!   copy off the device has to finish first) goes on whenever the returned future is polled; the executor polls
//!   all outstanding exchanges whenever it waits for anything, so messages travel while the device computes.
//! - A part arrives as a fresh buffer. Where it goes from there is the plan's business.
//! - An exchange that ends early tells which of its messages had arrived whole: after a loss others may need them.

use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::{join_all, try_join, try_join_all};
use kyklos_transport::{Abort, Posted, Progress, Pulse, Rank, Tag, Taken, Transport, TransportError, Vote};

use crate::backend::Backend;
use crate::meter::{Meter, Timeline};
use crate::plan::BufferId;

/// Device memory of a plan's buffers, by buffer and tensor.
#[derive(Debug)]
pub struct Memory<Buffer> {
    buffers: Vec<Option<Vec<Buffer>>>,
}

/// Adjacent bytes of one tensor of a buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Which buffer.
    pub buffer: BufferId,
    /// Which of its tensors.
    pub tensor: usize,
    /// Which bytes of it.
    pub bytes: Range<usize>,
}

/// A message to a peer.
#[derive(Clone, Debug)]
pub struct Outgoing {
    /// To whom.
    pub to: Rank,
    /// What.
    pub pieces: Vec<Piece>,
}

/// A message from a peer.
#[derive(Clone, Debug)]
pub struct Incoming {
    /// From whom.
    pub from: Rank,
    /// Bytes of each piece.
    pub piece_bytes: Vec<usize>,
}

/// The pieces of each incoming message, in order.
pub type Arrivals<'a, Buffer> = Pin<Box<dyn Future<Output = Result<Vec<Vec<Buffer>>, Broken<Buffer>>> + 'a>>;

/// An exchange that ended early.
#[derive(Debug)]
pub struct Broken<Buffer> {
    /// Why.
    pub error: ExchangeError,
    /// The pieces of each incoming message that had arrived whole, in order.
    pub arrived: Vec<Option<Vec<Buffer>>>,
}

/// What can end an exchange early.
#[derive(Clone, Debug)]
pub enum ExchangeError {
    /// The network, or a peer.
    Transport(TransportError),
    /// This rank's own device.
    Own(crate::Error),
}

/// Moves buffers of `B` between the ranks of a group.
pub trait Collective<B: Backend> {
    /// Posts the messages of one exchange as a group.
    fn post_exchange<'a>(
        &'a self,
        backend: &'a B,
        meter: &'a Meter,
        tag: Tag,
        memory: &mut Memory<B::Buffer>,
        sends: &[Outgoing],
        recvs: &[Incoming],
    ) -> Arrivals<'a, B::Buffer>;

    /// Meets all ranks before an operation, see [`Transport::agree`].
    fn agree(&self, vote: Vote) -> Posted<()>;

    /// Ends the operation on all ranks, see [`Transport::abort`].
    fn abort(&self, abort: Abort);

    /// Says where this rank is, see [`Transport::report_progress`].
    fn report_progress(&self, progress: Progress);

    /// Of this rank's own work, see [`Transport::pulse`].
    fn pulse(&self) -> Arc<Pulse>;

    /// Rises when the group has been aborted.
    fn stop_flag(&self) -> Arc<AtomicBool>;
}

/// Any transport under any backend: copies to the host, sends, receives, copies to the device.
#[derive(Clone, Debug)]
pub struct HostStaged {
    transport: Arc<dyn Transport>,
    deadline: Duration,
}

impl HostStaged {
    /// Staging over `transport`; a message or an agreement that is not done after `deadline` is an error.
    pub fn new(transport: Arc<dyn Transport>, deadline: Duration) -> Self {
        Self { transport, deadline }
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
        // Receives first: a peer may be waiting for them already.
        let recvs: Vec<_> = recvs
            .iter()
            .map(|recv| {
                let posted = self.transport.post_recv(recv.from, tag, &recv.piece_bytes, self.deadline);
                (recv.from, meter.start(), posted)
            })
            .map(|(from, started, posted)| async move {
                let pieces = posted.await.map_err(ExchangeError::Transport)?;
                let bytes = || pieces.iter().map(Bytes::len).sum::<usize>();
                meter.travelled(started, Timeline::Receive, || {
                    format!("{} B from rank {from}, {tag}", bytes())
                });
                let copying = meter.start();
                let uploaded: crate::Result<Vec<_>> =
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
                // A host backend has the bytes at once, and then the message leaves at once.
                let ready = (&mut downloads).now_or_never();
                meter.end(copying, Timeline::Copy, || format!("download {tag}"));
                let to = send.to;
                let bytes: usize = send.pieces.iter().map(|piece| piece.bytes.len()).sum();
                let pulse = self.transport.pulse();
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
                    meter.travelled(started, Timeline::Send, || {
                        format!("{bytes} B to rank {to}, {tag}, asked for after {} us", unasked_ns / 1000)
                    });
                    Ok(())
                }
            })
            .collect();
        Box::pin(async move {
            let mut arrived = Vec::new();
            arrived.resize_with(recvs.len(), || None);
            let recvs = async {
                all_or_error(recvs, &mut arrived).await?;
                meter.arrived(tag.message);
                Ok(())
            };
            // Receives first: what has come with a failure counts.
            match try_join(recvs, try_join_all(sends)).await {
                Ok(_) => Ok(arrived.into_iter().flatten().collect()),
                Err(error) => Err(Broken { error, arrived }),
            }
        })
    }

    fn agree(&self, vote: Vote) -> Posted<()> {
        self.transport.agree(vote, self.deadline)
    }

    fn abort(&self, abort: Abort) {
        self.transport.abort(abort);
    }

    fn report_progress(&self, progress: Progress) {
        self.transport.report_progress(progress);
    }

    fn pulse(&self) -> Arc<Pulse> {
        self.transport.pulse()
    }

    fn stop_flag(&self) -> Arc<AtomicBool> {
        self.transport.stop_flag()
    }
}

/// Ends when all of `futures` have, or the first of them has failed, in which case all that were ready then have been
/// put down too.
async fn all_or_error<T, E>(
    futures: Vec<impl Future<Output = Result<T, E>>>,
    done: &mut [Option<T>],
) -> Result<(), E> {
    let mut futures: Vec<_> = futures.into_iter().map(Box::pin).collect();
    std::future::poll_fn(|context| {
        let (mut waits, mut failed) = (false, None);
        for (future, done) in futures.iter_mut().zip(&mut *done).filter(|(_, done)| done.is_none()) {
            match future.as_mut().poll(context) {
                Poll::Ready(Ok(value)) => *done = Some(value),
                Poll::Ready(Err(error)) => failed = failed.take().or(Some(error)),
                Poll::Pending => waits = true,
            }
        }
        match failed {
            Some(error) => Poll::Ready(Err(error)),
            None if waits => Poll::Pending,
            None => Poll::Ready(Ok(())),
        }
    })
    .await
}

impl HostStaged {
    fn send(
        &self,
        meter: &Meter,
        to: Rank,
        tag: Tag,
        pieces: Vec<crate::Result<Bytes>>,
    ) -> Result<Posted<Taken>, ExchangeError> {
        let pieces = pieces.into_iter().collect::<crate::Result<Vec<_>>>().map_err(ExchangeError::Own)?;
        meter.sent(pieces.iter().map(|piece| piece.len() as u64).sum());
        Ok(self.transport.post_send(to, tag, pieces, self.deadline))
    }
}

impl<Buffer> Default for Memory<Buffer> {
    fn default() -> Self {
        Self { buffers: Vec::new() }
    }
}

impl<Buffer> Memory<Buffer> {
    /// No memory for any of `count` buffers.
    pub(crate) fn new(count: usize) -> Self {
        Self { buffers: (0..count).map(|_| None).collect() }
    }

    /// One tensor of a buffer that is alive.
    ///
    /// # Panics
    /// When the buffer is not alive: plans are proved not to ask for that.
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
