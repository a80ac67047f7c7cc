//! Messages between the devices of a group's ranks, by NCCL.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kyklos::backend::{Device, DeviceBuffer};
use kyklos::collective::{
    Arrivals, Broken, Collective, ExchangeError, Incoming, Memory, Outgoing, Piece, Settled,
};
use kyklos::plan::{ProvedPlans, check_in_order};
use kyklos::{Error, Meter, Result};
use kyklos_transport::{Progress, Rank, Tag, Transport, Vote};

use super::exchange::{Failure, Outcome, Transfer};
use super::library::NcclVersion;
use super::worker::Worker;
use crate::backend::CudaBackend;
use crate::device::CudaBuffer;

/// Options of an [`NcclCollective`].
///
/// ```
/// use std::time::Duration;
///
/// let options = kyklos_cuda::NcclOptions { max_blocks: Some(4), ..Default::default() };
/// assert_eq!(options.deadline, Duration::from_secs(60));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct NcclOptions {
    /// How long an exchange may take from its posting. While messages are under way the device does not count as lost, even after
    /// [`CudaOptions::stuck_after`](crate::CudaOptions::stuck_after): attention waits on the device for its keys.
    pub deadline: Duration,
    /// How long the ranks may take to vote, and then to meet in NCCL. If NCCL fails on one rank, the others wait for so long.
    pub form_within: Duration,
    /// Whether an exchange ends only when its messages have moved. A session with
    /// [`SessionOptions::resumable`](kyklos::SessionOptions::resumable) needs it, because what it keeps must be there. Otherwise
    /// attention is submitted before, and the device waits.
    pub resumable: bool,
    /// Fewest and most blocks of threads of NCCL's kernels, each of which takes a multiprocessor from the attention. `None`: NCCL's
    /// choice, which `NCCL_MIN_CTAS` and `NCCL_MAX_CTAS` set.
    pub min_blocks: Option<u16>,
    /// See [`Self::min_blocks`].
    pub max_blocks: Option<u16>,
}

impl Default for NcclOptions {
    /// A deadline of 60 s, 60 s to form, not resumable, NCCL's choice of blocks.
    fn default() -> Self {
        Self {
            deadline: Duration::from_secs(60),
            form_within: Duration::from_secs(60),
            resumable: false,
            min_blocks: None,
            max_blocks: None,
        }
    }
}

/// A [`Collective`] that moves messages from device memory to device memory by NCCL. [`Self::form`] makes it.
///
/// - **Order.** The messages of an exchange are one group of sends and receives on a stream of their own. Events order it with the
///   kernels that write and read the buffers; the host waits for neither.
/// - **Plans.** A stream carries out one exchange after the other, so a plan must end that way: [`check_in_order`]. The plans of all
///   strategies do.
/// - **Failure.** NCCL has no deadlines and does not always notice that a rank has died. A thread looks after the messages. When one is
///   late or fails, or when the group is aborted, it aborts the communicator: every rank does, because the transport tells all of
///   them. From then on every exchange ends with the error.
/// - **Votes** and everything else that is no message of a plan go through the transport.
/// - **Drop** does not block: the thread leaves the communicator, or aborts it where the other ranks do not leave in time.
///
/// **It has run with a fake NCCL only, never on a GPU.** NCCL's own connections are not encrypted and not authenticated: use it on
/// a network that only the ranks can reach.
#[derive(Debug)]
pub struct NcclCollective {
    pub(super) transport: Arc<dyn Transport>,
    pub(super) device: Device,
    pub(super) version: NcclVersion,
    pub(super) options: NcclOptions,
    pub(super) worker: Worker,
    /// Of the exchanges that are in the stream.
    pub(super) moving: Mutex<BTreeMap<Tag, Outcome>>,
    /// The hash of the last plans that were checked.
    pub(super) checked: Mutex<Option<[u8; 32]>>,
}

impl NcclCollective {
    /// The version of NCCL, the same on all ranks.
    pub fn version(&self) -> NcclVersion {
        self.version
    }

    /// Posts the exchange on the worker, and allocates what it receives.
    fn post(
        &self,
        device: &Device,
        tag: Tag,
        memory: &mut Memory<DeviceBuffer>,
        sends: &[Outgoing],
        recvs: &[Incoming],
    ) -> Result<(Vec<Vec<DeviceBuffer>>, [Outcome; 2])> {
        let backend = self.backend(device)?;
        let mut sent = Vec::new();
        for (to, piece) in sends.iter().flat_map(|send| send.pieces.iter().map(|piece| (send.to, piece))) {
            let Piece { buffer, tensor, bytes, .. } = piece;
            let Some(from) = memory.tensor(*buffer, *tensor).get::<CudaBuffer>() else {
                return Err(foreign(device));
            };
            sent.push(Transfer { peer: to, buffer: from.share(), bytes: bytes.clone() });
        }
        let (mut received, mut arrived) = (Vec::new(), Vec::new());
        for Incoming { from, piece_bytes } in recvs {
            let mut pieces = Vec::with_capacity(piece_bytes.len());
            for bytes in piece_bytes {
                let buffer = backend.device.buffer("received", *bytes)?;
                received.push(Transfer { peer: *from, buffer: buffer.share(), bytes: 0..*bytes });
                pieces.push(DeviceBuffer::new(buffer));
            }
            arrived.push(pieces);
        }
        // Both sides leave empty pieces out.
        for transfers in [&mut sent, &mut received] {
            transfers.retain(|transfer| !transfer.bytes.is_empty());
        }
        Ok((arrived, self.worker.post(tag, sent, received)))
    }

    fn backend<'d>(&self, device: &'d Device) -> Result<&'d CudaBackend> {
        let same = device.is_same(&self.device);
        device.backend::<CudaBackend>().filter(|_| same).ok_or_else(|| foreign(device))
    }

    async fn ended(&self, outcome: Outcome) -> std::result::Result<(), ExchangeError> {
        let failure = match outcome.await {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(failure)) => failure,
            // The thread of the communicator has ended.
            Err(_) => Failure::Group,
        };
        Err(match failure {
            Failure::Own(error) => ExchangeError::Own(error),
            Failure::Late(error) => ExchangeError::Transport(error),
            // Any call of the transport returns the failure of a group that has been aborted.
            Failure::Group => match self.transport.agree(Vote::ready([0; 32]), self.options.deadline).await {
                Err(error) => ExchangeError::Transport(error),
                Ok(_) => ExchangeError::Own(Error::Cancelled),
            },
        })
    }
}

fn foreign(device: &Device) -> Error {
    Error::request(
        format!("a message of {} by NCCL of another device", device.info().name),
        "use the device for which the collective was formed",
    )
}

impl Collective<Device> for NcclCollective {
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
        let received = recvs.len();
        Box::pin(async move {
            let done = async {
                let (arrived, [submitted, moved]) = posted.map_err(ExchangeError::Own)?;
                self.ended(submitted).await?;
                if self.options.resumable {
                    self.ended(moved).await?;
                } else {
                    self.moving.lock().unwrap_or_else(PoisonError::into_inner).insert(tag, moved);
                }
                Ok(arrived)
            };
            done.await.map_err(|error| Broken { error, arrived: (0..received).map(|_| None).collect() })
        })
    }

    fn settled(&self, tag: Tag) -> Option<Settled<'_>> {
        let moved = self.moving.lock().unwrap_or_else(PoisonError::into_inner).remove(&tag)?;
        Some(Box::pin(self.ended(moved)))
    }

    fn supports(&self, plans: &ProvedPlans) -> Result<()> {
        let mut checked = self.checked.lock().unwrap_or_else(PoisonError::into_inner);
        if *checked == Some(plans.hash()) {
            return Ok(());
        }
        check_in_order(plans.world()).map_err(|error| {
            Error::request(
                format!("plans for NCCL, which carries out one exchange after the other ({error})"),
                "stage the messages in host memory",
            )
        })?;
        *checked = Some(plans.hash());
        Ok(())
    }

    fn transport(&self) -> &Arc<dyn Transport> {
        &self.transport
    }

    fn deadline(&self) -> Duration {
        self.options.deadline
    }

    fn report_progress(&self, progress: Progress) {
        self.worker.report_progress(progress);
        self.transport.report_progress(progress);
    }
}

/// Why the ranks of a group do not use NCCL: the same on all of them.
///
/// ```
/// use kyklos_cuda::NcclRefusal;
///
/// let refusal = NcclRefusal { rank: 1, why: "its device is AVX-512, not a CUDA device".to_owned() };
/// assert_eq!(refusal.to_string(), "NCCL is not used: rank 1: its device is AVX-512, not a CUDA device");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NcclRefusal {
    /// The lowest rank that cannot use it.
    pub rank: u32,
    /// The reason of that rank.
    pub why: String,
}

impl std::fmt::Display for NcclRefusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "NCCL is not used: rank {}: {}", self.rank, self.why)
    }
}

impl std::error::Error for NcclRefusal {}

impl NcclRefusal {
    pub(super) fn of(rank: Rank, why: String) -> Self {
        Self { rank: rank.0, why }
    }
}
