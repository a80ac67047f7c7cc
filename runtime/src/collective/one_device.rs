//! Ranks of one process on one device: messages between them stay on the device.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::try_join3;
use kyklos_transport::{Group, Rank, Tag};

use super::{
    Arrivals, Collective, ExchangeError, HostStaged, Incoming, Memory, Outgoing, Piece, all_in_order,
};
use crate::backend::{Backend, Device, DeviceBuffer, Extent, Layout};
use crate::meter::{Meter, Timeline};

/// A collective for ranks of one process that share a device. Between them a message is a handle of
/// device memory, or a copy on the device where it is a part of a buffer; its arrival is told by
/// one byte through the transport, so deadlines and aborts are those of the transport. Messages to
/// other ranks are staged in host memory.
#[derive(Clone, Debug)]
pub struct OneDevice {
    group: Group,
    deadline: Duration,
    staged: HostStaged,
    shared: Arc<Shared>,
}

/// The messages between the ranks of a device that the receiver has not taken yet.
#[derive(Debug)]
struct Shared {
    ranks: Vec<Rank>,
    /// By sender, receiver and tag.
    waiting: Mutex<BTreeMap<(Rank, Rank, Tag), Vec<DeviceBuffer>>>,
}

impl Shared {
    fn waiting(&self) -> MutexGuard<'_, BTreeMap<(Rank, Rank, Tag), Vec<DeviceBuffer>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OneDevice {
    /// The collectives of ranks of this process that share a device; `groups` has the
    /// group on each of them; it may have other ranks too. A message or an agreement that takes
    /// longer than `deadline` is an error.
    pub fn of(groups: &[Group], deadline: Duration) -> Vec<Self> {
        let ranks = groups.iter().map(|group| group.rank()).collect();
        let shared = Arc::new(Shared { ranks, waiting: Mutex::default() });
        let one = |group: &Group| Self {
            group: group.clone(),
            deadline,
            staged: HostStaged::new(group.clone(), deadline),
            shared: shared.clone(),
        };
        groups.iter().map(one).collect()
    }

    fn is_here(&self, rank: Rank) -> bool {
        self.shared.ranks.contains(&rank)
    }

    /// A piece as a buffer of its own: the memory itself if the piece is all of it, else a copy.
    fn buffer(
        device: &Device,
        memory: &mut Memory<DeviceBuffer>,
        Piece { buffer, tensor, bytes, is_whole }: &Piece,
    ) -> crate::error::Result<DeviceBuffer> {
        if *is_whole {
            return Ok(device.share(memory.tensor(*buffer, *tensor)));
        }
        let mut copy = device.alloc("sent", bytes.len())?;
        let layout = |offset| Layout { offset, batch_stride: 0, row_stride: 0, head_stride: 0 };
        let extent = Extent { batch: 1, rows: 1, heads: 1, row_bytes: bytes.len() };
        device.repack(
            (memory.tensor(*buffer, *tensor), layout(bytes.start)),
            (&mut copy, layout(0)),
            extent,
        )?;
        Ok(copy)
    }
}

/// Tells a receiver that the message waits for it.
const HERE: Bytes = Bytes::from_static(&[1]);

impl Collective<Device> for OneDevice {
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
        let me = self.group.rank();
        let received: Vec<_> = recvs_here
            .iter()
            .map(|recv| (recv.from, self.group.post_recv(recv.from, tag, &[HERE.len()], self.deadline)))
            .map(|(from, posted)| async move {
                posted.await.map_err(ExchangeError::Transport)?;
                let buffers = self.shared.waiting().remove(&(from, me, tag));
                Ok(buffers.expect("the sender puts a message there before it tells"))
            })
            .collect();
        let sent: Vec<_> = sends_here
            .iter()
            .map(|send| {
                let started = meter.start();
                let buffers: crate::error::Result<Vec<_>> =
                    send.pieces.iter().map(|piece| Self::buffer(device, memory, piece)).collect();
                meter.end(started, Timeline::Copy, || format!("copy {tag}"));
                let posted = buffers.map(|buffers| {
                    self.shared.waiting().insert((me, send.to, tag), buffers);
                    meter.sent(send.pieces.iter().map(|piece| piece.bytes.len() as u64).sum());
                    (meter.start(), self.group.post_send(send.to, tag, vec![HERE], self.deadline))
                });
                async move {
                    let (started, posted) = posted.map_err(ExchangeError::Own)?;
                    let taken = posted.await.map_err(ExchangeError::Transport)?;
                    meter.taken(tag.message, started, taken.under_way);
                    Ok(())
                }
            })
            .collect();
        let there = self.staged.post_exchange(device, meter, tag, memory, &sends_there, &recvs_there);
        Box::pin(async move {
            let received = async {
                let received = all_in_order(received).await?;
                meter.arrived(tag.message);
                Ok(received)
            };
            let (here, _, there) = try_join3(received, all_in_order(sent), there).await?;
            let (mut here, mut there) = (here.into_iter(), there.into_iter());
            Ok(is_here
                .into_iter()
                .filter_map(|is_here| if is_here { here.next() } else { there.next() })
                .collect())
        })
    }

    fn group(&self) -> &Group {
        &self.group
    }

    fn deadline(&self) -> Duration {
        self.deadline
    }
}
