//! Ranks of one process with a CUDA device each: messages between them are copies from device to device.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::{try_join, try_join_all};
use kyklos::backend::{Backend, Device, DeviceBuffer, Extent, Layout};
use kyklos::bytes::Bytes;
use kyklos::collective::{
    Arrivals, Broken, Collective, ExchangeError, HostStaged, Incoming, Memory, Outgoing, Piece,
};
use kyklos::{Error, Meter, Result};
use kyklos_transport::{Rank, Tag, Transport, TransportError};

use crate::backend::CudaBackend;
use crate::device::{CudaBuffer, MessageStream};

mod form;

/// A collective for ranks of one process that have a CUDA device each. Between them a message is a copy from device memory to device
/// memory, which the driver makes over NVLink or PCIe where it can. The receiver makes it when the bytes are complete on the sender;
/// one byte through the transport tells it, so deadlines and aborts are those of the transport. Messages to other ranks are staged in
/// host memory.
///
/// [`NcclCollective`](crate::NcclCollective) does more, over processes and hosts. This is for groups that do not use NCCL. Pieces of a
/// message that no rank takes, because the group has failed, are kept until the collectives of all ranks of the process are dropped.
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
/// let transport = in_process_group(1).remove(0);
/// # let device = Device::new(kyklos_backend_suite::DoNothing::open()?);
/// if let Err(error) = CudaPeers::of(&[(transport, device)], Duration::from_secs(60)) {
///     println!("{error}");
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct CudaPeers {
    transport: Arc<dyn Transport>,
    deadline: Duration,
    device: Device,
    /// For the copies to this device, if there are any.
    stream: Option<MessageStream>,
    staged: HostStaged,
    /// The ranks of this process with a CUDA device, this one among them: none, or at least two.
    here: Vec<(Rank, Device)>,
    waiting: Arc<Waiting>,
    /// The way of messages.
    words: String,
}

/// The messages between the ranks of this process that the receiver has not taken yet. By sender, receiver and tag: the pieces, on the
/// device of the sender.
type Waiting = Mutex<BTreeMap<(Rank, Rank, Tag), Vec<DeviceBuffer>>>;

impl CudaPeers {
    /// The collectives of ranks of this process, each with its end of the group and its device; the group may have other ranks too. A
    /// message or an agreement that takes longer than `deadline` is an error.
    ///
    /// # Errors
    /// [`Error::Request`] for a device that is no CUDA device, [`Error::Device`] if the driver fails.
    pub fn of(ranks: &[(Arc<dyn Transport>, Device)], deadline: Duration) -> Result<Vec<Self>> {
        let of_rank = |(transport, device): &(Arc<dyn Transport>, Device)| (transport.rank(), device.clone());
        let here: Vec<(Rank, Device)> = ranks.iter().map(of_rank).collect();
        let waiting = Arc::default();
        let one = |(transport, device): &(Arc<dyn Transport>, Device)| {
            let group = here.iter().map(|(rank, _)| *rank).collect();
            Ok(Self {
                transport: transport.clone(),
                deadline,
                device: device.clone(),
                stream: Some(MessageStream::new(&cuda(device)?.device)?),
                staged: HostStaged::new(transport.clone(), deadline),
                here: here.clone(),
                waiting: Arc::clone(&waiting),
                words: form::words(&[group], transport.world() as usize),
            })
        };
        ranks.iter().map(one).collect()
    }

    fn is_here(&self, rank: Rank) -> bool {
        self.device_of(rank).is_some()
    }

    /// The device of a rank of this process.
    fn device_of(&self, rank: Rank) -> Option<&Device> {
        self.here.iter().find(|(of, _)| *of == rank).map(|(_, device)| device)
    }

    fn waiting(&self) -> MutexGuard<'_, BTreeMap<(Rank, Rank, Tag), Vec<DeviceBuffer>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// Takes the message `tag` of `from`, which is complete: copies of its pieces on the device of this rank.
    fn take(
        &self,
        from: Rank,
        tag: Tag,
        piece_bytes: &[usize],
    ) -> std::result::Result<Vec<DeviceBuffer>, ExchangeError> {
        let pieces = self.waiting().remove(&(from, self.transport.rank(), tag));
        // A sender of this process puts a message there before it tells.
        let (Some(pieces), Some(theirs)) = (pieces, self.device_of(from)) else {
            let text = format!("it says that the message of {tag} is in this process, and it is not");
            return Err(ExchangeError::Transport(TransportError::PeerMisbehaved { peer: from, text }));
        };
        self.copy_all(&pieces, theirs, piece_bytes).map_err(ExchangeError::Own)
    }

    /// Copies of pieces of the device `theirs` on the device of this rank.
    fn copy_all(
        &self,
        pieces: &[DeviceBuffer],
        theirs: &Device,
        piece_bytes: &[usize],
    ) -> Result<Vec<DeviceBuffer>> {
        let (own, theirs) = (cuda(&self.device)?, cuda(theirs)?);
        let stream = self.stream.as_ref().ok_or_else(|| foreign(&self.device))?;
        let copy = |(piece, bytes): (&DeviceBuffer, &usize)| {
            let piece = piece.get::<CudaBuffer>().ok_or_else(|| foreign(&self.device))?;
            let buffer = own.device.buffer("received", *bytes)?;
            if *bytes > 0 {
                stream.copy_from(&theirs.device, piece, &buffer, *bytes)?;
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
    /// For people: the way of messages, such as `copies from device to device between ranks 0, 1; all other messages through host memory`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.words)
    }
}

/// Tells a receiver that the message waits for it.
const HERE: Bytes = Bytes::from_static(&[1]);

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
        let (sends_here, sends_there): (Vec<Outgoing>, Vec<Outgoing>) =
            sends.iter().cloned().partition(|send| self.is_here(send.to));
        let (recvs_here, recvs_there): (Vec<Incoming>, Vec<Incoming>) =
            recvs.iter().cloned().partition(|recv| self.is_here(recv.from));
        let is_here: Vec<bool> = recvs.iter().map(|recv| self.is_here(recv.from)).collect();
        let me = self.transport.rank();
        let received: Vec<_> = recvs_here
            .into_iter()
            .map(|recv| (self.transport.post_recv(recv.from, tag, &[HERE.len()], self.deadline), recv))
            .map(|(posted, Incoming { from, piece_bytes })| async move {
                posted.await.map_err(ExchangeError::Transport)?;
                self.take(from, tag, &piece_bytes)
            })
            .collect();
        let sent: Vec<_> = sends_here
            .into_iter()
            .map(|Outgoing { to, pieces }| {
                let ready = self.backend(device).and_then(|backend| {
                    let buffers = pieces.iter().map(|piece| Self::piece(device, memory, piece));
                    let buffers = buffers.collect::<Result<Vec<_>>>()?;
                    let written: Vec<_> =
                        buffers.iter().filter_map(DeviceBuffer::get::<CudaBuffer>).collect();
                    let ready = backend.device.written(&written)?;
                    Ok((buffers, ready))
                });
                meter.sent(pieces.iter().map(|piece| piece.bytes.len() as u64).sum());
                let pulse = self.transport.pulse();
                async move {
                    let (buffers, ready) = ready.map_err(ExchangeError::Own)?;
                    // The receiver's device must not wait for this one: it could not tell a device that hangs from its own.
                    let work = pulse.work();
                    let complete = ready.await.unwrap_or(Err(Error::Cancelled));
                    drop(work);
                    complete.map_err(ExchangeError::Own)?;
                    self.waiting().insert((me, to, tag), buffers);
                    let posted = self.transport.post_send(to, tag, vec![HERE], self.deadline);
                    posted.await.map_err(ExchangeError::Transport)?;
                    Ok(())
                }
            })
            .collect();
        let there = self.staged.post_exchange(device, meter, tag, memory, &sends_there, &recvs_there);
        Box::pin(async move {
            let (mut here, mut there_arrived) = (none(received.len()), none(recvs_there.len()));
            let ours = async {
                try_join(keep_each(received, &mut here), try_join_all(sent)).await?;
                Ok(())
            };
            let theirs = async {
                let (arrived, error) = match there.await {
                    Ok(arrived) => (arrived.into_iter().map(Some).collect(), None),
                    Err(Broken { error, arrived }) => (arrived, Some(error)),
                };
                there_arrived = arrived;
                error.map_or(Ok(()), Err)
            };
            // The first failure ends the exchange. What has arrived by then may be of use to survivors.
            let ended = try_join(ours, theirs).await;
            let (mut here, mut there) = (here.into_iter(), there_arrived.into_iter());
            let place = |is_here| if is_here { here.next() } else { there.next() }.flatten();
            let arrived: Vec<Option<Vec<DeviceBuffer>>> = is_here.into_iter().map(place).collect();
            match ended {
                Ok(_) => Ok(arrived.into_iter().flatten().collect()),
                Err(error) => Err(Broken { error, arrived }),
            }
        })
    }

    fn transport(&self) -> &Arc<dyn Transport> {
        &self.transport
    }

    fn deadline(&self) -> Duration {
        self.deadline
    }
}

fn none<T>(count: usize) -> Vec<Option<T>> {
    (0..count).map(|_| None).collect()
}

/// Ends when all of `futures` have ended or one of them has failed. Puts each value into its place in `kept` when it is there.
async fn keep_each<T, E>(
    futures: Vec<impl Future<Output = std::result::Result<T, E>>>,
    kept: &mut [Option<T>],
) -> std::result::Result<(), E> {
    let kept = futures.into_iter().zip(kept).map(|(future, kept)| async move {
        *kept = Some(future.await?);
        Ok(())
    });
    try_join_all(kept).await.map(drop)
}
