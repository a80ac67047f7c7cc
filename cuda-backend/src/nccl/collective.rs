//! Messages between the devices of a group's ranks: by NCCL inside an island, through the host to
//! all other ranks.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::try_join;
use kyklos::backend::{Device, DeviceBuffer};
use kyklos::collective::{
    Arrivals, Collective, ExchangeError, HostStaged, Incoming, Memory, Outgoing, Piece, Settled, all_in_order,
};
use kyklos::plan::{ProvedPlans, check_in_order};
use kyklos::{Error, Meter, Result};
use kyklos_transport::{Group, Progress, Rank, Tag, Vote};

use super::exchange::{Failure, Outcome, Transfer};
use super::islands::{Islands, NcclIsland, NcclRefusal};
use super::observer::NcclObserver;
use super::worker::Worker;
use crate::backend::CudaBackend;
use crate::device::CudaBuffer;
use crate::staged;

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
    /// How long an exchange may take from its posting. While messages are under way the device does
    /// not count as lost, even after
    /// [`CudaOptions::stuck_after`](crate::CudaOptions::stuck_after): attention waits on the device
    /// for its keys.
    pub deadline: Duration,
    /// How long the ranks may take to vote, and then to meet in NCCL. If NCCL fails on one rank,
    /// the others wait for so long.
    pub form_within: Duration,
    /// How many steps of a plan may be submitted to the device and not done: the host waits for the
    /// oldest of them before it submits another, so the device need not wait for the host
    /// between steps. Each step under way keeps its buffers. 0: the host waits for each step.
    pub steps_ahead: usize,
    /// Fewest and most blocks of threads of NCCL's kernels, each of which takes a multiprocessor
    /// from the attention. `None`: NCCL's choice, which `NCCL_MIN_CTAS` and `NCCL_MAX_CTAS`
    /// set.
    pub min_blocks: Option<u16>,
    /// See [`Self::min_blocks`].
    pub max_blocks: Option<u16>,
    /// Number of the cluster of this rank, of the caller's choice: NCCL is used between ranks of
    /// one cluster only. Give ranks unlike numbers where NCCL cannot, or must not, connect
    /// them.
    pub cluster: u32,
    /// Whether NCCL is used between the ranks that can where others cannot, which then exchange
    /// their messages through the host. If not, one such rank keeps all from NCCL. The same on
    /// all ranks.
    pub partial: bool,
}

impl Default for NcclOptions {
    /// A deadline of 60 s, 60 s to form, 4 steps ahead, NCCL's choice of blocks, one cluster, all
    /// ranks or none.
    fn default() -> Self {
        Self {
            deadline: Duration::from_secs(60),
            form_within: Duration::from_secs(60),
            steps_ahead: 4,
            min_blocks: None,
            max_blocks: None,
            cluster: 0,
            partial: false,
        }
    }
}

/// A [`Collective`] that moves messages from device memory to device memory by NCCL. [`Self::form`]
/// makes it.
///
/// - **Islands.** With [`NcclOptions::partial`] or [`NcclOptions::cluster`] only the ranks of an
///   [`NcclIsland`] reach each other by NCCL. Messages to and from all others go through the host,
///   as by [`HostStaged`]; one exchange can have both.
/// - **Order.** The messages of an exchange are one group of sends and receives on a stream of
///   their own. Events order it with the kernels that write and read the buffers; the host waits
///   for neither, and submits some steps of a plan before those in front of them are done
///   ([`NcclOptions::steps_ahead`]).
/// - **Plans.** A stream carries out one exchange after the other, so a plan must end that way:
///   [`check_in_order`]. The plans of all strategies do.
/// - **Failure.** NCCL has no deadlines and does not always notice that a rank has died. A thread
///   looks after the messages. When one is late or fails, or when the group is aborted, it aborts
///   the communicator: every rank does, because the group tells all of them. From then on every
///   exchange ends with the error.
/// - **Votes** and everything else that is no message of a plan go through the group.
/// - **Drop** does not block: the thread leaves the communicator, or aborts it where the other
///   ranks do not leave in time.
///
/// **It has run with a fake NCCL only, never on a GPU.** NCCL's own connections are not encrypted
/// and not authenticated: use it on a network that only the ranks can reach.
#[derive(Debug)]
pub struct NcclCollective {
    pub(super) host: HostStaged,
    pub(super) device: Device,
    pub(super) options: NcclOptions,
    pub(super) all: Islands,
    /// The island of this rank, and the thread of its communicator.
    pub(super) own: Option<(Worker, NcclIsland)>,
    /// Of the exchanges that are in the stream.
    pub(super) moving: Mutex<BTreeMap<Tag, Outcome>>,
    /// The hash of the last plans that were checked.
    pub(super) checked: Mutex<Option<[u8; 32]>>,
}

/// Which messages of an exchange go by NCCL, by their places in it, and which through the host.
#[derive(Debug)]
struct Ways<T> {
    nccl: Vec<(usize, T)>,
    host: Vec<(usize, T)>,
}

impl NcclCollective {
    /// The ranks that exchange messages by NCCL: the same on all ranks, at least one island. Of a
    /// group that is not [`NcclOptions::partial`] it has all ranks.
    pub fn islands(&self) -> &[NcclIsland] {
        &self.all.islands
    }

    /// The ranks in no island, and why: the same on all ranks.
    pub fn outside(&self) -> &[NcclRefusal] {
        &self.all.outside
    }

    /// Tells what NCCL does for this rank. `None`: this rank is in no island.
    pub fn observe(&self) -> Option<NcclObserver> {
        let (worker, island) = self.own.as_ref()?;
        Some(worker.observe(island.clone()))
    }

    /// Which messages go by NCCL. `peer`: the other rank of a message.
    fn ways<T: Clone>(&self, messages: &[T], peer: impl Fn(&T) -> Rank) -> Ways<T> {
        let by_nccl = |(_, message): &(usize, T)| {
            self.own.as_ref().is_some_and(|(_, island)| island.number(peer(message)).is_some())
        };
        let (nccl, host) = messages.iter().cloned().enumerate().partition(by_nccl);
        Ways { nccl, host }
    }

    /// Posts messages on the worker, and allocates what it receives. `None`: nothing goes by NCCL.
    fn post(
        &self,
        device: &Device,
        tag: Tag,
        memory: &mut Memory<DeviceBuffer>,
        sends: &[(usize, Outgoing)],
        recvs: &[(usize, Incoming)],
    ) -> Result<Option<Posted>> {
        let Some((worker, island)) = self.own.as_ref().filter(|_| !sends.is_empty() || !recvs.is_empty())
        else {
            return Ok(None);
        };
        let number = |peer| island.number(peer).expect("a rank of the island");
        let backend = self.backend(device)?;
        let mut sent = Vec::new();
        let pieces = sends.iter().flat_map(|(_, send)| send.pieces.iter().map(|piece| (send.to, piece)));
        for (to, piece) in pieces {
            let Piece { buffer, tensor, bytes, .. } = piece;
            let Some(from) = memory.tensor(*buffer, *tensor).get::<CudaBuffer>() else {
                return Err(foreign(device));
            };
            sent.push(Transfer { peer: to, number: number(to), buffer: from.share(), bytes: bytes.clone() });
        }
        let (mut received, mut arrived) = (Vec::new(), Vec::new());
        for (_, Incoming { from, piece_bytes }) in recvs {
            let mut pieces = Vec::with_capacity(piece_bytes.len());
            for bytes in piece_bytes {
                let buffer = backend.device.buffer("received", *bytes)?;
                received.push(Transfer {
                    peer: *from,
                    number: number(*from),
                    buffer: buffer.share(),
                    bytes: 0..*bytes,
                });
                pieces.push(DeviceBuffer::new(buffer));
            }
            arrived.push(pieces);
        }
        // Both sides leave empty pieces out.
        for transfers in [&mut sent, &mut received] {
            transfers.retain(|transfer| !transfer.bytes.is_empty());
        }
        let [submitted, moved] = worker.post(tag, sent, received);
        Ok(Some(Posted { arrived, submitted, moved }))
    }

    /// Ends when what was posted is in the stream.
    async fn arrived(
        &self,
        tag: Tag,
        posted: Result<Option<Posted>>,
    ) -> std::result::Result<Vec<Vec<DeviceBuffer>>, ExchangeError> {
        let Some(Posted { arrived, submitted, moved }) = posted.map_err(ExchangeError::Own)? else {
            return Ok(Vec::new());
        };
        self.ended(submitted).await?;
        self.moving.lock().unwrap_or_else(PoisonError::into_inner).insert(tag, moved);
        Ok(arrived)
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
            // Any call of the group returns the failure of a group that has been aborted.
            Failure::Group => match self.group().agree(Vote::ready([0; 32]), self.options.deadline).await {
                Err(error) => ExchangeError::Transport(error),
                Ok(_) => ExchangeError::Own(Error::Cancelled),
            },
        })
    }
}

/// Messages on their way to the stream.
#[derive(Debug)]
struct Posted {
    /// The buffers of each message that arrives.
    arrived: Vec<Vec<DeviceBuffer>>,
    submitted: Outcome,
    moved: Outcome,
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
        let received = recvs.len();
        let (sends, recvs) = (self.ways(sends, |send| send.to), self.ways(recvs, |recv| recv.from));
        let posted = self.post(device, tag, memory, &sends.nccl, &recvs.nccl);
        for (_, send) in &sends.nccl {
            meter.sent(send.pieces.iter().map(|piece| piece.bytes.len() as u64).sum());
        }
        // Receives first: a peer may already wait for them.
        let far_received: Vec<_> = recvs
            .host
            .iter()
            .map(|(_, recv)| staged::receive(&self.host, device, meter, tag, recv))
            .collect();
        let (_, far_sends): (Vec<_>, Vec<_>) = sends.host.into_iter().unzip();
        let far_sent = staged::send(&self.host, device, meter, tag, memory, &far_sends);
        let places = |recvs: Vec<(usize, Incoming)>| recvs.into_iter().map(|(place, _)| place).collect();
        let [near_places, far_places]: [Vec<usize>; 2] = [places(recvs.nccl), places(recvs.host)];
        Box::pin(async move {
            let through_host = async {
                let sent = async {
                    match far_sent {
                        Some(sent) => sent.await,
                        None => Ok(()),
                    }
                };
                try_join(all_in_order(far_received), sent).await
            };
            let ((far, ()), near) = try_join(through_host, self.arrived(tag, posted)).await?;
            let mut arrived: Vec<Vec<DeviceBuffer>> = (0..received).map(|_| Vec::new()).collect();
            let placed = far_places.into_iter().zip(far).chain(near_places.into_iter().zip(near));
            placed.for_each(|(place, message)| arrived[place] = message);
            Ok(arrived)
        })
    }

    fn settled(&self, tag: Tag) -> Option<Settled<'_>> {
        let moved = self.moving.lock().unwrap_or_else(PoisonError::into_inner).remove(&tag)?;
        Some(Box::pin(self.ended(moved)))
    }

    fn steps_ahead(&self) -> usize {
        // A rank in no island waits for messages through the host before it submits what uses them.
        if self.own.is_none() { 0 } else { self.options.steps_ahead }
    }

    fn supports(&self, plans: &ProvedPlans) -> Result<()> {
        let mut checked = self.checked.lock().unwrap_or_else(PoisonError::into_inner);
        if *checked == Some(plans.hash()) {
            return Ok(());
        }
        check_in_order(plans.set()).map_err(|error| {
            Error::request(
                format!("plans for NCCL, which carries out one exchange after the other ({error})"),
                "stage the messages in host memory",
            )
        })?;
        *checked = Some(plans.hash());
        Ok(())
    }

    fn group(&self) -> &Group {
        Collective::<Device>::group(&self.host)
    }

    fn deadline(&self) -> Duration {
        self.options.deadline
    }

    fn report_progress(&self, progress: Progress) {
        if let Some((worker, _)) = &self.own {
            worker.report_progress(progress);
        }
        self.group().report_progress(progress);
    }
}
