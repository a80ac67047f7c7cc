//! Packets that leave in batches, as many of them in one datagram for the system as it takes.

use std::future::poll_fn;
use std::io::{self, IoSliceMut};
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll};

use quinn::udp::{EcnCodepoint, RecvMeta, Transmit};
use quinn::{AsyncUdpSocket, UdpPoller};
use tokio::runtime::Handle;
use tokio::sync::Notify;

/// Packets that quinn hands over at a time at most (`MAX_TRANSMIT_SEGMENTS`, which is private). If
/// it hands over as many, more may follow at once.
const BURST: usize = 10;

/// A socket that hands packets to the system in datagrams of as many packets as one holds, and
/// never of more.
///
/// The system's price is for a datagram, whether it has one packet or forty. quinn hands over at
/// most ten packets at a time, so this socket keeps full bursts until the tasks of its thread that
/// are ready have had their turn, or no more fits. Anything less than a full burst leaves at once,
/// with what was kept.
///
/// The system refuses datagrams of more than 65,507 bytes; quinn takes the refusal for loss, and
/// falls back to small packets. A datagram that is lost on this host, for want of buffers, has all
/// its packets. quinn's receive buffer has up to 32 datagrams of as many packets as the socket
/// says: of 64 packets of 65,000 bytes, 134 MB.
#[derive(Debug)]
pub(crate) struct BatchingSocket {
    socket: Arc<dyn AsyncUdpSocket>,
    transmit: usize,
    receive: usize,
    batch: Mutex<Batch>,
    kept: Arc<Notify>,
}

impl BatchingSocket {
    /// A socket whose datagrams have at most `transmit` packets sent and `receive` packets
    /// received. What it keeps is sent by a task of `runtime`, which should be that of the
    /// tasks that send.
    pub(crate) fn new(
        socket: Arc<dyn AsyncUdpSocket>,
        transmit: usize,
        receive: usize,
        runtime: &Handle,
    ) -> Arc<Self> {
        let (batch, kept) = (Mutex::new(Batch::default()), Arc::new(Notify::new()));
        let this = Arc::new(Self { socket, transmit, receive, batch, kept });
        runtime.spawn(send_what_is_kept(Arc::downgrade(&this), Arc::clone(&this.kept)));
        this
    }

    fn batch(&self) -> MutexGuard<'_, Batch> {
        // After a panic the batch is whole: it changes only after calls that could panic.
        self.batch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends the batch once no other task of this thread adds to it.
    async fn send_batch(&self) {
        loop {
            let before = self.batch().bytes.len();
            next_turn().await;
            let sent = {
                let mut batch = self.batch();
                if batch.bytes.len() != before {
                    continue;
                }
                batch.send(&*self.socket)
            };
            match sent {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let mut writable = Arc::clone(&self.socket).create_io_poller();
                    if poll_fn(|context| writable.as_mut().poll_writable(context)).await.is_err() {
                        return;
                    }
                }
                // To QUIC a datagram that could not be sent is one that was lost.
                Ok(()) | Err(_) => return,
            }
        }
    }
}

impl Drop for BatchingSocket {
    fn drop(&mut self) {
        // What the system does not take now is lost, as with any socket.
        let _ = self.batch().send(&*self.socket);
        self.kept.notify_one();
    }
}

/// Until the socket is gone.
async fn send_what_is_kept(socket: Weak<BatchingSocket>, kept: Arc<Notify>) {
    loop {
        kept.notified().await;
        match socket.upgrade() {
            Some(socket) => socket.send_batch().await,
            None => return,
        }
    }
}

/// Lets the other tasks of the thread that are ready have a turn.
async fn next_turn() {
    let mut had = false;
    poll_fn(|context| match std::mem::replace(&mut had, true) {
        true => Poll::Ready(()),
        false => {
            context.waker().wake_by_ref();
            Poll::Pending
        }
    })
    .await;
}

impl AsyncUdpSocket for BatchingSocket {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Arc::clone(&self.socket).create_io_poller()
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        let mut batch = self.batch();
        let most = self.max_transmit_segments();
        if !batch.takes(transmit, most) {
            // Those that were there first leave first. If the system takes none now, quinn comes again with
            // `transmit`. Any other error is of packets of another connection, perhaps: to QUIC
            // they are lost.
            match batch.send(&*self.socket) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(error),
                Ok(()) | Err(_) => {}
            }
        }
        let burst = Burst::of(transmit);
        if batch.packets == 0 && !(burst.is_full() && most >= 2 * BURST) {
            return self.socket.try_send(transmit);
        }
        if batch.packets == 0 {
            self.kept.notify_one();
        }
        batch.add(transmit);
        if burst.is_full() && batch.packets + BURST <= most {
            return Ok(());
        }
        match batch.send(&*self.socket) {
            // It is in the batch, whose task waits for the system.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            sent => sent,
        }
    }

    fn poll_recv(
        &self,
        context: &mut Context<'_>,
        buffers: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        self.socket.poll_recv(context, buffers, meta)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    fn max_transmit_segments(&self) -> usize {
        self.socket.max_transmit_segments().min(self.transmit)
    }

    fn max_receive_segments(&self) -> usize {
        self.socket.max_receive_segments().min(self.receive)
    }

    fn may_fragment(&self) -> bool {
        self.socket.may_fragment()
    }
}

/// What quinn hands over at a time: packets of one size, of which the last may be smaller.
#[derive(Clone, Copy)]
struct Burst {
    packet_bytes: usize,
    packets: usize,
    ends_small: bool,
}

impl Burst {
    fn of(transmit: &Transmit<'_>) -> Self {
        let bytes = transmit.contents.len();
        let packet_bytes = transmit.segment_size.unwrap_or(bytes).max(1);
        Self {
            packet_bytes,
            packets: bytes.div_ceil(packet_bytes),
            ends_small: !bytes.is_multiple_of(packet_bytes),
        }
    }

    fn is_full(self) -> bool {
        self.packets == BURST && !self.ends_small
    }
}

/// Packets of one size for one address that have not been sent. The last may be smaller; it is the
/// end.
#[derive(Debug, Default)]
struct Batch {
    bytes: Vec<u8>,
    packets: usize,
    packet_bytes: usize,
    to: Option<Envelope>,
}

/// What the packets of a datagram have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Envelope {
    destination: SocketAddr,
    ecn: Option<EcnCodepoint>,
    source: Option<IpAddr>,
}

impl Envelope {
    fn of(transmit: &Transmit<'_>) -> Self {
        Self { destination: transmit.destination, ecn: transmit.ecn, source: transmit.src_ip }
    }
}

impl Batch {
    /// Whether these packets may follow those of the batch in one datagram of at most `most`
    /// packets.
    fn takes(&self, transmit: &Transmit<'_>, most: usize) -> bool {
        let burst = Burst::of(transmit);
        let fits = match burst.packets {
            // One packet may be the smaller one at the end.
            1 => burst.packet_bytes <= self.packet_bytes,
            _ => burst.packet_bytes == self.packet_bytes,
        };
        let ended = self.bytes.len() != self.packets * self.packet_bytes;
        let room = !ended && fits && self.packets + burst.packets <= most;
        self.packets == 0 || (room && self.to == Some(Envelope::of(transmit)))
    }

    fn add(&mut self, transmit: &Transmit<'_>) {
        let burst = Burst::of(transmit);
        if self.packets == 0 {
            self.packet_bytes = burst.packet_bytes;
            self.to = Some(Envelope::of(transmit));
        }
        self.bytes.extend_from_slice(transmit.contents);
        self.packets += burst.packets;
    }

    /// Sends what is there, and keeps it if the system takes nothing now.
    fn send(&mut self, socket: &dyn AsyncUdpSocket) -> io::Result<()> {
        let Some(Envelope { destination, ecn, source }) = self.to else { return Ok(()) };
        let segment_size = (self.packets > 1).then_some(self.packet_bytes);
        let transmit = Transmit { destination, ecn, contents: &self.bytes, segment_size, src_ip: source };
        let sent = socket.try_send(&transmit);
        if !matches!(&sent, Err(error) if error.kind() == io::ErrorKind::WouldBlock) {
            self.bytes.clear();
            (self.packets, self.to) = (0, None);
        }
        sent
    }
}

#[cfg(test)]
mod tests;
