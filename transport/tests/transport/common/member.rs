//! A hand-made rank with a valid certificate. It joins correctly; then the test decides what it
//! sends.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use kyklos_transport::wire::{Frame, PROTOCOL_VERSION, Purpose};
use kyklos_transport::{Progress, Rank};
use quinn::crypto::rustls::QuicClientConfig;
use quinn::{Connection, Endpoint, RecvStream, SendStream};
use tokio::sync::Mutex;
use tokio::time::timeout;

use super::{Job, LONG, welcome};

/// The highest rank of its group: it dials all other ranks, and no rank dials it.
pub(crate) struct Member {
    /// To rank 0.
    pub(crate) control: Line,
    /// To every other rank, by rank.
    pub(crate) data: Vec<Line>,
    _endpoint: Endpoint,
}

/// A connection and its stream of frames.
pub(crate) struct Line {
    pub(crate) connection: Connection,
    pub(crate) send: Arc<Mutex<SendStream>>,
    recv: RecvStream,
    pending: Vec<u8>,
}

impl Line {
    pub(crate) fn new(connection: Connection, send: SendStream, recv: RecvStream) -> Self {
        Self { connection, send: Arc::new(Mutex::new(send)), recv, pending: Vec::new() }
    }

    pub(crate) async fn say(&self, bytes: &[u8]) {
        // The peer may close the connection before everything is written.
        let _ = self.send.lock().await.write_all(bytes).await;
    }

    /// The next frame, if it arrives soon.
    pub(crate) async fn hear(&mut self, patience: Duration) -> Option<Frame> {
        loop {
            if let Some((frame, taken)) = Frame::decode(&self.pending).unwrap() {
                self.pending.drain(..taken);
                return Some(frame);
            }
            let chunk = timeout(patience, self.recv.read_chunk(4096, true)).await.ok()?.ok()??;
            self.pending.extend_from_slice(&chunk.bytes);
        }
    }

    /// Opens a stream for a message and writes these bytes first.
    pub(crate) async fn stream(&self, bytes: &[u8]) -> Option<SendStream> {
        let mut stream = self.connection.open_uni().await.ok()?;
        stream.write_all(bytes).await.ok()?;
        Some(stream)
    }
}

impl Member {
    /// Dials all other ranks and waits until the group starts, unless the test sends something
    /// first.
    pub(crate) async fn come(job: &Job, size: u32) -> Self {
        let me = Rank(size - 1);
        let endpoint = Endpoint::client(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
        let dial = async |to: u32, address: SocketAddr, purpose: Purpose| {
            let protocol = if purpose == Purpose::Data { "kyklos/1" } else { "kyklos-ctl/1" };
            let tls = QuicClientConfig::try_from(job.tls(Some(me.0), protocol)).unwrap();
            let mut config = quinn::ClientConfig::new(Arc::new(tls));
            let mut transport = quinn::TransportConfig::default();
            transport.keep_alive_interval(Some(Duration::from_millis(500)));
            // Small windows: only a few unread bytes can be in flight.
            transport.stream_receive_window(quinn::VarInt::from_u32(64 << 10));
            config.transport_config(Arc::new(transport));
            let connection = endpoint.connect_with(config, address, &job.name(to)).unwrap().await.unwrap();
            let (mut send, recv) = connection.open_bi().await.unwrap();
            let protocol = PROTOCOL_VERSION;
            let hello = Frame::Hello { protocol, purpose, job: job.id.0, epoch: 0, rank: me, size };
            send.write_all(&hello.encode()).await.unwrap();
            if purpose == Purpose::Control {
                let said = Frame::Advertise { addresses: Vec::new() };
                send.write_all(&said.encode()).await.unwrap();
            }
            let mut line = Line::new(connection, send, recv);
            assert_eq!(line.hear(LONG).await, Some(welcome()));
            line
        };
        let mut control = dial(0, job.coordinator, Purpose::Control).await;
        let Some(Frame::AddressTable { candidates }) = control.hear(LONG).await else { panic!("no table") };
        let mut data = vec![dial(0, job.coordinator, Purpose::Data).await];
        for (to, addresses) in (1..me.0).zip(candidates.iter().skip(1)) {
            data.push(dial(to, addresses[0], Purpose::Data).await);
        }
        Self { control, data, _endpoint: endpoint }
    }

    /// Like `come`, and the group has started. From now on the rank sends heartbeats until it is
    /// dropped.
    pub(crate) async fn join(job: &Job, size: u32) -> Self {
        let mut member = Self::come(job, size).await;
        member.control.say(&Frame::Meshed.encode()).await;
        assert_eq!(member.control.hear(LONG).await, Some(Frame::Start));
        let send = Arc::clone(&member.control.send);
        let progress = Progress { op: 0, step: 0 };
        let ping = Frame::Ping { progress, beats: 0, works: false, waits_for: Vec::new() }.encode();
        tokio::spawn(async move {
            while send.lock().await.write_all(&ping).await.is_ok() {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        });
        member
    }
}
