//! QUIC's packets in TCP streams, for networks that drop UDP.
//!
//! A packet is its length (u16, little-endian) and its bytes. Everything else stays as it is:
//! identity, encryption and streams are QUIC's, inside. A rank has one address, as over UDP: it
//! dials from the port at which it listens. A length of 0 is followed by a text and the end of the
//! stream: the listener refuses TCP. Anybody can send that, so it is a hint, and the text is not
//! read.
//!
//! A peer that opens a stream is a stranger until its QUIC connection has shown an identity of the
//! group. Until then it has a place among few, little memory, and the time of a handshake.

use std::fmt;
use std::io::{self, IoSliceMut};
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use quinn::udp::{RecvMeta, Transmit};
use quinn::{AsyncUdpSocket, UdpPoller};
#[cfg(any(target_os = "linux", target_os = "android"))]
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;

use super::routes::{Packets, Routes, STRANGER_BYTES, Sent, StreamPeers};
use crate::quic::network::handshakes::{HandshakeDecision, PendingHandshakes};
use crate::quic::network::timing::LinkProfile;

/// A socket whose datagrams travel in streams.
pub(crate) struct Tunnel {
    shared: Arc<Shared>,
    inbox: Mutex<mpsc::Receiver<(SocketAddr, Vec<u8>)>>,
    /// Dropped with the tunnel, which ends the listening.
    _open: watch::Sender<()>,
}

struct Shared {
    local: SocketAddr,
    profile: LinkProfile,
    routes: Arc<Routes>,
    arrived: mpsc::Sender<(SocketAddr, Vec<u8>)>,
    /// A dialled listener has refused TCP.
    refused: watch::Sender<bool>,
    pending: PendingHandshakes,
}

impl fmt::Debug for Tunnel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tunnel").field("local", &self.shared.local).finish_non_exhaustive()
    }
}

impl Tunnel {
    /// Keeps at most `member_bytes` for each member that reads slowly. Must be called in a tokio
    /// context with I/O.
    pub(crate) fn new(
        listener: std::net::TcpListener,
        member_bytes: usize,
        profile: LinkProfile,
    ) -> io::Result<Self> {
        let listener = TcpListener::from_std(listener)?;
        let (arrived, inbox) = mpsc::channel(INBOX_PACKETS);
        let (open, is_open) = watch::channel(());
        let shared = Arc::new(Shared {
            local: listener.local_addr()?,
            profile,
            routes: Arc::new(Routes::new(member_bytes)),
            arrived,
            refused: watch::Sender::new(false),
            pending: PendingHandshakes::of_streams(),
        });
        tokio::spawn(Arc::clone(&shared).listen(listener, is_open));
        Ok(Self { shared, inbox: Mutex::new(inbox), _open: open })
    }

    /// Becomes true when a dialled listener has refused TCP.
    pub(crate) fn refused(&self) -> watch::Receiver<bool> {
        self.shared.refused.subscribe()
    }

    /// Where the tunnel learns which peers belong to the group.
    pub(crate) fn peers(&self) -> StreamPeers {
        StreamPeers(Arc::downgrade(&self.shared.routes))
    }
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        self.shared.routes.clear();
    }
}

impl Shared {
    fn send(self: &Arc<Self>, to: SocketAddr, packet: Vec<u8>) {
        if let Sent::Dial(packets) = self.routes.send(to, packet) {
            tokio::spawn(Arc::clone(self).dial(to, packets));
        }
    }

    async fn dial(self: Arc<Self>, to: SocketAddr, packets: Packets) {
        match timeout(self.profile.stream_dial(), connect(self.local, to)).await {
            Ok(Ok(stream)) => self.carry(to, stream, packets, None).await,
            // Queued packets are lost, and QUIC sends them again. Until then there is no other dial.
            _ => tokio::time::sleep(DIAL_PAUSE).await,
        }
    }

    async fn listen(self: Arc<Self>, listener: TcpListener, mut open: watch::Receiver<()>) {
        loop {
            let accepted = tokio::select! {
                biased;
                accepted = listener.accept() => accepted,
                _ = open.changed() => return,
            };
            let Ok((stream, from)) = accepted else {
                // Of a connection that was gone at once, or for want of descriptors.
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            };
            // A peer that has opened a stream has proven its address.
            let HandshakeDecision::Accept(slot) = self.pending.decide(from.ip(), true) else { continue };
            let shared = Arc::clone(&self);
            tokio::spawn(async move {
                let (packets, proven) = shared.routes.accepted(from);
                let until_stranger_is_late = async {
                    let mut proven = proven.clone();
                    let is_proven = timeout(STRANGER_TIMEOUT, proven.wait_for(|proven| *proven));
                    let is_proven = tokio::select! {
                        biased;
                        is_proven = is_proven => matches!(is_proven, Ok(Ok(_))),
                        () = slot.taken() => false,
                    };
                    if !is_proven {
                        return;
                    }
                    // A member takes no place among strangers.
                    drop(slot);
                    std::future::pending().await
                };
                tokio::select! {
                    biased;
                    () = until_stranger_is_late => {}
                    () = shared.carry(from, stream, packets, Some(proven.clone())) => {}
                }
                // Strangers connect from new ports again and again.
                shared.routes.ended(from);
            });
        }
    }

    /// Carries packets both ways until one of them ends. An accepted stream has `proven`.
    async fn carry(
        &self,
        peer: SocketAddr,
        stream: TcpStream,
        packets: Packets,
        proven: Option<watch::Receiver<bool>>,
    ) {
        let _ = stream.set_nodelay(true);
        // Where the system has no such limit, a stream lasts until its silence has.
        #[cfg(any(target_os = "linux", target_os = "android"))]
        let _ = SockRef::from(&stream).set_tcp_user_timeout(self.profile.stream_stall());
        let (reading, writing) = stream.into_split();
        tokio::select! {
            biased;
            // Whatever ends a stream, QUIC only sees that no packet arrives.
            _ = self.read(peer, reading, proven) => {}
            _ = write(writing, packets) => {}
        }
    }

    async fn read(
        &self,
        peer: SocketAddr,
        reading: OwnedReadHalf,
        proven: Option<watch::Receiver<bool>>,
    ) -> io::Result<()> {
        let mut reading = BufReader::with_capacity(READ_BYTES, reading);
        loop {
            let packet = timeout(LONGEST_SILENCE, async {
                let length = usize::from(reading.read_u16_le().await?);
                let is_stranger = proven.as_ref().is_some_and(|proven| !*proven.borrow());
                if is_stranger && length > STRANGER_PACKET_BYTES {
                    return Err(io::ErrorKind::InvalidData.into());
                }
                let mut packet = vec![0; length];
                reading.read_exact(&mut packet).await?;
                io::Result::Ok(packet)
            });
            let packet = packet.await??;
            if packet.is_empty() {
                if proven.is_none() {
                    self.refused.send_replace(true);
                }
                return Ok(());
            }
            if self.arrived.send((peer, packet)).await.is_err() {
                return Ok(());
            }
        }
    }
}

async fn write(mut writing: OwnedWriteHalf, mut packets: Packets) -> io::Result<()> {
    while let Some(packet) = packets.recv().await {
        timeout(WRITE_TIMEOUT, writing.write_all(&packet.bytes)).await??;
    }
    writing.shutdown().await
}

/// Bytes that the strangers of an endpoint can make it hold: for each the packets that wait for it,
/// and what is read from it.
pub(crate) const STRANGERS_BYTES: u64 =
    PendingHandshakes::MAX_STREAMS as u64 * (STRANGER_BYTES + READ_BYTES + STRANGER_PACKET_BYTES) as u64;

async fn connect(from: SocketAddr, to: SocketAddr) -> io::Result<TcpStream> {
    let socket = if to.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    #[cfg(unix)]
    socket.set_reuseport(true)?;
    socket.bind(from)?;
    socket.connect(to).await
}

/// Refuses every TCP stream to the address with a text, and notes from where ranks came: whatever
/// else connects sends no packet first. Returns at once if the port is not free.
pub(crate) async fn refuse_all(address: SocketAddr, text: &str, note: impl Fn(IpAddr)) {
    let Ok(listener) = TcpListener::bind(address).await else { return };
    loop {
        match listener.accept().await {
            Ok((stream, from)) => {
                let _ = timeout(2 * ACCEPT_PAUSE, refuse(stream, text, || note(from.ip()))).await;
            }
            Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
        }
    }
}

async fn refuse(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    text: &str,
    note: impl Fn(),
) -> io::Result<()> {
    // Before the refusal: a rank sends nothing after it.
    let mut start = [0; 3];
    let is_rank = timeout(ACCEPT_PAUSE, stream.read_exact(&mut start)).await;
    if matches!(is_rank, Ok(Ok(_))) && begins_handshake(start) {
        note();
    }
    stream.write_all(&[0, 0]).await?;
    stream.write_all(text.as_bytes()).await?;
    stream.shutdown().await?;
    // This side must read the bytes that the other side has sent. Otherwise the other side cannot
    // read this refusal.
    let _read = stream.read(&mut [0; 4096]).await?;
    Ok(())
}

/// Whether a stream begins with the length of QUIC's first packet, which is at least 1200 bytes
/// (RFC 9000, 14.1), and with the bits of a long header.
fn begins_handshake([low, high, first]: [u8; 3]) -> bool {
    let length = usize::from(u16::from_le_bytes([low, high]));
    (1200..=STRANGER_PACKET_BYTES).contains(&length) && first & 0xc0 == 0xc0
}

impl AsyncUdpSocket for Tunnel {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Box::pin(Ready)
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        // quinn is configured to send no larger packets.
        let Ok(length) = u16::try_from(transmit.contents.len()) else { return Ok(()) };
        let mut packet = Vec::with_capacity(2 + transmit.contents.len());
        packet.extend_from_slice(&length.to_le_bytes());
        packet.extend_from_slice(transmit.contents);
        self.shared.send(transmit.destination, packet);
        Ok(())
    }

    fn poll_recv(
        &self,
        context: &mut Context<'_>,
        buffers: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        let mut inbox = self.inbox.lock().unwrap_or_else(PoisonError::into_inner);
        let mut count = 0;
        while count < buffers.len().min(meta.len())
            && let Poll::Ready(Some((from, packet))) = inbox.poll_recv(context)
        {
            // A packet that is larger than this rank has announced is dropped.
            if let Some(space) = buffers[count].get_mut(..packet.len()) {
                space.copy_from_slice(&packet);
                meta[count] =
                    RecvMeta { addr: from, len: packet.len(), stride: packet.len(), ecn: None, dst_ip: None };
                count += 1;
            }
        }
        if count > 0 { Poll::Ready(Ok(count)) } else { Poll::Pending }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.shared.local)
    }

    fn may_fragment(&self) -> bool {
        false
    }
}

/// A queue that takes everything.
#[derive(Debug)]
struct Ready;

impl UdpPoller for Ready {
    fn poll_writable(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// Received packets that the endpoint has not processed. When this limit is reached, streams are no
/// longer read.
const INBOX_PACKETS: usize = 16;

/// Bytes read from a stream at once; the rest of a larger packet is read to its place.
const READ_BYTES: usize = 16 << 10;

/// The largest packet of a peer that has not proven who it is. Packets of a handshake are smaller.
const STRANGER_PACKET_BYTES: usize = 16 << 10;

/// By then a peer that has opened a stream must have proven who it is.
const STRANGER_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a packet may take to be written. A peer that reads nothing for so long can dial again.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// A peer that is silent for this long can dial again. Members send packets all the time.
const LONGEST_SILENCE: Duration = Duration::from_secs(60);

/// Pause between a failed attempt and the next one.
const DIAL_PAUSE: Duration = Duration::from_millis(100);

const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests;
