//! Ranks of one process with a CUDA device each: messages between them are copies from device to
//! device.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::future::try_join;
use kyklos::backend::{Backend, Device, DeviceBuffer, Extent, Layout};
use kyklos::bytes::Bytes;
use kyklos::collective::{
    Arrivals, Collective, ExchangeError, HostStaged, Incoming, Memory, Outgoing, Piece, all_in_order,
};
use kyklos::{Error, Meter, Result};
use kyklos_transport::{EventKind, Group, Rank, Tag, TransportError, Vote};

use crate::backend::CudaBackend;
use crate::device::{CudaBuffer, DeviceStatus, MessageStream};
use crate::staged::{self, Arrival, Departure};

mod form;
mod waiting;

use waiting::{Found, Waiting};

/// A collective for ranks of one process that have a CUDA device each. Between them a message is a
/// copy from device memory to device memory, which the driver makes over NVLink or PCIe where it
/// can. The receiver makes it when the bytes are complete on the sender; one byte through the
/// group tells it, so deadlines and aborts are those of the group. Its recorder has that
/// message, and counts the bytes of the copy. Messages to other ranks are staged in host memory.
///
/// [`NcclCollective`](crate::NcclCollective) does more, over processes and hosts. This is for
/// groups that do not use NCCL.
///
/// - **Memory.** What a copy reads is kept until the copy is done, also memory of a caller; if that
///   will never be known, it is never freed. It does not count against the limit of its device
///   ([`CudaOptions::max_memory_bytes`](crate::CudaOptions)) once the sender needs it no more.
///   Where the device itself is full, an allocation waits up to 2 s for messages to be taken and
///   copied. If one thread runs several ranks, nobody takes messages meanwhile, and the allocation
///   fails after these 2 s. A message that no rank takes, because the group has failed, is freed
///   when the exchange of its receiver ends or the receiver's collective is dropped, or when the
///   exchange of its sender ends before the receiver was told.
/// - **Failure.** A device that hangs or is lost stops the ranks of other devices by the abort of
///   the group only: their threads wait for no lock, and their devices for no work, of that device.
///   Whether the driver itself keeps devices apart is the driver's. What has arrived before a
///   failure is kept for survivors, in whichever way it came.
///
/// **It has run on a fake driver only, never on a GPU.**
///
/// ```
/// use std::time::Duration;
/// use kyklos::backend::Device;
/// use kyklos_cuda::CudaPeers;
/// use kyklos_transport::in_process_group;
///
/// # fn main() -> kyklos::Result<()> {
/// let group = in_process_group(1).remove(0);
/// # let device = Device::new(kyklos_backend_suite::DoNothing::open()?);
/// if let Err(error) = CudaPeers::of(&[(group, device)], Duration::from_secs(60)) {
///     println!("{error}");
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct CudaPeers {
    group: Group,
    deadline: Duration,
    device: Device,
    /// For the copies to this device, if there are any.
    stream: Option<MessageStream>,
    staged: HostStaged,
    /// The ranks of this process with a CUDA device, this one among them: none, or at least two.
    /// Not their devices: the last handle of a device waits for its driver.
    here: Vec<(Rank, Arc<DeviceStatus>)>,
    waiting: Arc<Waiting>,
    /// The way of messages.
    words: String,
}

impl CudaPeers {
    /// The collectives of ranks of this process, each with its end of the group and its device; the
    /// group may have other ranks too. A message or an agreement that takes longer than
    /// `deadline` is an error.
    ///
    /// # Errors
    /// [`Error::Request`] for a device that is no CUDA device, [`Error::Device`] if the driver
    /// fails.
    pub fn of(ranks: &[(Group, Device)], deadline: Duration) -> Result<Vec<Self>> {
        let of_rank =
            |(group, device): &(Group, Device)| Ok((group.rank(), cuda(device)?.device.status().clone()));
        let here = ranks.iter().map(of_rank).collect::<Result<Vec<_>>>()?;
        let waiting = Arc::default();
        let one = |(group, device): &(Group, Device)| {
            let ranks = here.iter().map(|(rank, _)| *rank).collect();
            Ok(Self {
                group: group.clone(),
                deadline,
                device: device.clone(),
                stream: Some(MessageStream::new(&cuda(device)?.device)?),
                staged: HostStaged::new(group.clone(), deadline),
                here: here.clone(),
                waiting: Arc::clone(&waiting),
                words: form::words(&[ranks], group.size() as usize),
            })
        };
        ranks.iter().map(one).collect()
    }

    fn is_here(&self, rank: Rank) -> bool {
        self.device_of(rank).is_some()
    }

    /// The device of a rank of this process.
    fn device_of(&self, rank: Rank) -> Option<&DeviceStatus> {
        self.here.iter().find(|(of, _)| *of == rank).map(|(_, device)| &**device)
    }

    fn backend<'d>(&self, device: &'d Device) -> Result<&'d CudaBackend> {
        if device.is_same(&self.device) { cuda(device) } else { Err(foreign(device)) }
    }

    /// A piece as a buffer of its own: the memory itself if the piece is all of it, else a copy.
    fn piece(
        device: &Device,
        memory: &mut Memory<DeviceBuffer>,
        Piece { buffer, tensor, bytes, is_whole }: &Piece,
    ) -> Result<DeviceBuffer> {
        if *is_whole {
            return Ok(device.share(memory.tensor(*buffer, *tensor)));
        }
        let mut copy = device.alloc("sent", bytes.len())?;
        let layout = |offset| Layout { offset, batch_stride: 0, row_stride: 0, head_stride: 0 };
        let extent = Extent { batch: 1, rows: 1, heads: 1, row_bytes: bytes.len() };
        let from = (&*memory.tensor(*buffer, *tensor), layout(bytes.start));
        device.repack(from, (&mut copy, layout(0)), extent)?;
        Ok(copy)
    }

    /// The message `tag` of `from`, which is complete: copies of its pieces on the device of this
    /// rank.
    async fn copy_message(
        &self,
        found: Found,
        from: Rank,
        tag: Tag,
        piece_bytes: &[usize],
    ) -> std::result::Result<Vec<DeviceBuffer>, ExchangeError> {
        let withdrawn = match (found, self.device_of(from)) {
            (Found::Pieces(pieces), Some(theirs)) => {
                return self.copy_all(&pieces, theirs, piece_bytes).map_err(ExchangeError::Own);
            }
            (found, _) => matches!(found, Found::Withdrawn),
        };
        // A sender of this process puts a message there before it tells. It takes it back if its exchange
        // ends, and then the group is about to be aborted.
        if withdrawn || self.group.stop_flag().load(Ordering::Acquire) {
            // Any call of the group returns the failure of a group that has been aborted.
            let failure = self.group.agree(Vote::ready([0; 32]), self.deadline).await;
            failure.map_err(ExchangeError::Transport)?;
        }
        let text = format!("it announced the message {tag}, and no such message is in this process");
        Err(ExchangeError::Transport(TransportError::PeerMisbehaved { peer: from, text }))
    }

    /// Copies of pieces of the device `theirs` on the device of this rank.
    fn copy_all(
        &self,
        pieces: &[CudaBuffer],
        theirs: &DeviceStatus,
        piece_bytes: &[usize],
    ) -> Result<Vec<DeviceBuffer>> {
        let own = cuda(&self.device)?;
        let stream = self.stream.as_ref().ok_or_else(|| foreign(&self.device))?;
        let copy = |(piece, bytes): (&CudaBuffer, &usize)| {
            let buffer = own.device.buffer("received", *bytes)?;
            if *bytes > 0 {
                stream.copy_from(theirs, piece, &buffer, *bytes)?;
            }
            Ok(DeviceBuffer::new(buffer))
        };
        pieces.iter().zip(piece_bytes).map(copy).collect()
    }
}

fn cuda(device: &Device) -> Result<&CudaBackend> {
    device.backend::<CudaBackend>().ok_or_else(|| foreign(device))
}

fn foreign(device: &Device) -> Error {
    Error::request(
        format!("a copy between CUDA devices from or to {}", device.info().name),
        "use the CUDA devices for which the collectives were made",
    )
}

impl fmt::Display for CudaPeers {
    /// For people: the way of messages, such as `copies from device to device between ranks 0, 1;
    /// all other messages through host memory`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.words)
    }
}

/// Tells a receiver that the message waits for it.
const HERE: Bytes = Bytes::from_static(&[1]);

impl CudaPeers {
    /// Counts a copy of `bytes` bytes. The group has counted the message, and [`HERE`].
    fn count_copy(&self, kind: EventKind, peer: Rank, bytes: usize) {
        self.group.recorder().note_more_bytes(kind, peer, bytes.saturating_sub(HERE.len()) as u64);
    }

    fn post_recv<'a>(
        &'a self,
        device: &'a Device,
        meter: &'a Meter,
        tag: Tag,
        recv: &Incoming,
    ) -> Arrival<'a> {
        let Incoming { from, piece_bytes } = recv.clone();
        if !self.is_here(from) {
            return staged::receive(&self.staged, device, meter, tag, recv);
        }
        let expected = self.waiting.expect((from, self.group.rank(), tag));
        let posted = self.group.post_recv(from, tag, &[HERE.len()], self.deadline);
        Box::pin(async move {
            posted.await.map_err(ExchangeError::Transport)?;
            let found = expected.take();
            let copies = self.copy_message(found, from, tag, &piece_bytes).await?;
            self.count_copy(EventKind::Received, from, piece_bytes.iter().sum());
            Ok(copies)
        })
    }

    /// Posts a message to a rank of this process.
    fn post_send<'a>(
        &'a self,
        device: &Device,
        meter: &Meter,
        tag: Tag,
        memory: &mut Memory<DeviceBuffer>,
        Outgoing { to, pieces }: &Outgoing,
    ) -> Departure<'a> {
        let ready = self.backend(device).and_then(|backend| {
            let buffers = pieces.iter().map(|piece| Self::piece(device, memory, piece));
            let buffers = buffers.collect::<Result<Vec<_>>>()?;
            let written: Vec<_> = buffers.iter().filter_map(DeviceBuffer::get::<CudaBuffer>).collect();
            let ready = backend.device.written(&written)?;
            Ok((written.into_iter().map(CudaBuffer::for_message).collect(), ready))
        });
        let bytes = pieces.iter().map(|piece| piece.bytes.len()).sum();
        meter.sent(bytes as u64);
        let pulse = self.group.pulse();
        let key = (self.group.rank(), *to, tag);
        Box::pin(async move {
            let (buffers, ready) = ready.map_err(ExchangeError::Own)?;
            // The receiver's device must not wait for this one: it could not tell a device that hangs from
            // its own.
            let work = pulse.work();
            let complete = ready.await.unwrap_or(Err(Error::Cancelled));
            drop(work);
            complete.map_err(ExchangeError::Own)?;
            let offered = self.waiting.put(key, buffers);
            let (_, to, tag) = key;
            let posted = self.group.post_send(to, tag, vec![HERE], self.deadline);
            posted.await.map_err(ExchangeError::Transport)?;
            offered.told();
            self.count_copy(EventKind::Sent, to, bytes);
            Ok(())
        })
    }
}

impl Collective<Device> for CudaPeers {
    fn post_exchange<'a>(
        &'a self,
        device: &'a Device,
        meter: &'a Meter,
        tag: Tag,
        memory: &mut Memory<DeviceBuffer>,
        sends: &[Outgoing],
        recvs: &[Incoming],
    ) -> Arrivals<'a, DeviceBuffer> {
        // Receives first: a peer may already wait for them.
        let received: Vec<Arrival<'a>> =
            recvs.iter().map(|recv| self.post_recv(device, meter, tag, recv)).collect();
        let (here, there): (Vec<Outgoing>, Vec<Outgoing>) =
            sends.iter().cloned().partition(|send| self.is_here(send.to));
        let mut sent: Vec<Departure<'a>> =
            here.iter().map(|send| self.post_send(device, meter, tag, memory, send)).collect();
        sent.extend(staged::send(&self.staged, device, meter, tag, memory, &there));
        Box::pin(async move {
            let received = async {
                let arrived = all_in_order(received).await?;
                meter.arrived(tag.message);
                Ok(arrived)
            };
            Ok(try_join(received, all_in_order(sent)).await?.0)
        })
    }

    fn group(&self) -> &Group {
        &self.group
    }

    fn deadline(&self) -> Duration {
        self.deadline
    }
}

impl Drop for CudaPeers {
    fn drop(&mut self) {
        self.waiting.leave(self.group.rank());
    }
}
