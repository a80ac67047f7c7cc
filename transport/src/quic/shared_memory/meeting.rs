//! How two ranks find out that they are on one host, and hand each other memory.
//!
//! One rank listens at a Unix socket without a file, whose random name and two secrets travel over
//! the authenticated connection of the two. A name of this kind exists within one network namespace
//! only, so the other rank reaches it only there. Each side shows its secret, and the kernel tells
//! each side which user and which process of its own process namespace the other is.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;

use aws_lc_rs::constant_time::verify_slices_are_equal;
use rustix::cmsg_space;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::{UnixListener, UnixStream};

use super::segment::{Segment, SegmentSize};
use crate::wire::MemoryOffer;

/// Two ranks that have met: the socket between them, and a segment for each direction.
#[derive(Debug)]
pub(crate) struct Meeting {
    pub(crate) socket: UnixStream,
    pub(crate) outgoing: Segment,
    pub(crate) incoming: Segment,
}

/// The socket of the rank that offers memory.
#[derive(Debug)]
pub(crate) struct MeetingPlace {
    listener: UnixListener,
    offer: MemoryOffer,
}

impl MeetingPlace {
    /// Must be called in a tokio context.
    pub(crate) fn open() -> Result<(Self, MemoryOffer), String> {
        let offer = MemoryOffer { socket: random()?, secret_of_guest: random()?, secret_of_host: random()? };
        let open = || {
            let address = std::os::unix::net::SocketAddr::from_abstract_name(full_name(offer.socket))?;
            let listener = std::os::unix::net::UnixListener::bind_addr(&address)?;
            listener.set_nonblocking(true)?;
            UnixListener::from_std(listener)
        };
        let listener = open().map_err(|error| format!("no Unix socket: {error}"))?;
        Ok((Self { listener, offer }, offer))
    }

    /// Waits for the other rank, and gives and takes memory.
    pub(crate) async fn meet(self, size: SegmentSize) -> Result<Meeting, String> {
        let mut socket = self.guest().await?;
        let outgoing = Segment::new(size)?;
        let file = outgoing.file().ok_or("memory without a file")?;
        send_file(&socket, &self.offer.secret_of_host, file).await?;
        let incoming = receive_file(&socket, &mut [0; READY.len()]).await?;
        let incoming = Segment::of_peer(incoming, size)?;
        socket.write_all(&READY).await.map_err(ended)?;
        Ok(Meeting { socket, outgoing, incoming })
    }

    /// The socket to the process that shows the secret. Others who connect are sent away.
    pub(super) async fn guest(&self) -> Result<UnixStream, String> {
        loop {
            let accepted = self.listener.accept().await;
            let (mut socket, _) = accepted.map_err(|error| format!("no Unix socket: {error}"))?;
            let mut shown = [0; 32];
            if same_user_and_processes(&socket).is_ok()
                && socket.read_exact(&mut shown).await.is_ok()
                && verify_slices_are_equal(&shown, &self.offer.secret_of_guest).is_ok()
            {
                return Ok(socket);
            }
        }
    }
}

/// Goes to the socket of a rank that offers memory, and takes and gives memory. Ends when that rank
/// ends the meeting.
pub(crate) async fn accept(offer: MemoryOffer, size: SegmentSize) -> Result<Meeting, String> {
    let mut socket = connect(offer.socket).map_err(|error| {
        format!("its Unix socket is not reached, it is on another host or in another namespace: {error}")
    })?;
    same_user_and_processes(&socket)?;
    socket.write_all(&offer.secret_of_guest).await.map_err(ended)?;
    let mut shown = [0; 32];
    let incoming = receive_file(&socket, &mut shown).await?;
    verify_slices_are_equal(&shown, &offer.secret_of_host)
        .map_err(|_| "another process answers at its Unix socket".to_owned())?;
    let incoming = Segment::of_peer(incoming, size)?;
    let outgoing = Segment::new(size)?;
    send_file(&socket, &READY, outgoing.file().ok_or("memory without a file")?).await?;
    socket.read_exact(&mut [0; READY.len()]).await.map_err(ended)?;
    Ok(Meeting { socket, outgoing, incoming })
}

/// The number that the kernel shows for all users that have none in a user namespace.
const UNKNOWN_USER: u32 = 65_534;

/// Says that the memory of the other side is mapped.
const READY: [u8; 1] = [1];

fn full_name(name: [u8; 16]) -> String {
    format!("kyklos-{}", data_encoding::HEXLOWER.encode(&name))
}

fn random<const N: usize>() -> Result<[u8; N], String> {
    let mut bytes = [0; N];
    aws_lc_rs::rand::fill(&mut bytes).map_err(|_| "no randomness".to_owned())?;
    Ok(bytes)
}

/// Does not wait: a queue that strangers fill must not stop this thread.
pub(super) fn connect(name: [u8; 16]) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new_abstract_name(full_name(name).as_bytes())?)?;
    UnixStream::from_std(std::os::unix::net::UnixStream::from(socket))
}

/// A process of another user must not see the payload, and neither must one of another container.
fn same_user_and_processes(socket: &UnixStream) -> Result<(), String> {
    let peer = socket.peer_cred().map_err(|error| format!("its process is not known: {error}"))?;
    if peer.uid() == UNKNOWN_USER {
        return Err("its user has no number in the namespace of this process".into());
    }
    if peer.uid() != rustix::process::geteuid().as_raw() {
        return Err("it is a process of another user".into());
    }
    // The kernel gives 0 for a process that has no number in the namespace of this one.
    if peer.pid().is_none_or(|number| number <= 0) {
        return Err("it is in another process namespace".into());
    }
    Ok(())
}

pub(super) async fn send_file(socket: &UnixStream, bytes: &[u8], file: BorrowedFd<'_>) -> Result<(), String> {
    let send = || {
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
        let mut files = SendAncillaryBuffer::new(&mut space);
        let fds = [file];
        files.push(SendAncillaryMessage::ScmRights(&fds));
        let sent = rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut files, SendFlags::NOSIGNAL)?;
        if sent == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    };
    socket.async_io(Interest::WRITABLE, send).await.map_err(ended)
}

pub(super) async fn receive_file(socket: &UnixStream, bytes: &mut [u8]) -> Result<OwnedFd, String> {
    let receive = || {
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
        let mut files = RecvAncillaryBuffer::new(&mut space);
        let mut into = [IoSliceMut::new(bytes)];
        let received = rustix::net::recvmsg(socket, &mut into, &mut files, RecvFlags::CMSG_CLOEXEC)?;
        let mut file = None;
        for message in files.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                file = fds.last();
            }
        }
        Ok((received.bytes, file))
    };
    let (count, file) = socket.async_io(Interest::READABLE, receive).await.map_err(ended)?;
    match file {
        Some(file) if count == bytes.len() => Ok(file),
        _ => Err("it ended the meeting".into()),
    }
}

fn ended(error: io::Error) -> String {
    format!("the Unix socket between the ranks ended: {error}")
}
