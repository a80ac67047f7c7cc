//! One connection: from a stranger to a device.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_channel::mpsc::UnboundedReceiver;
use futures_util::StreamExt;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep, timeout};
use wtransport::endpoint::IncomingSession;
use wtransport::endpoint::endpoint_side::Server;
use wtransport::error::ConnectionError;
use wtransport::quinn::VarInt;
use wtransport::{Connection, Endpoint, RecvStream, SendStream};

use super::RECEIVE_WINDOW_BYTES;
use super::invitations::{Admission, Invitations};
use crate::VERSION;
use crate::backend::TabBackend;
use crate::frame::{Decoder, Frame};
use crate::link::{Link, one_line};
use crate::protocol::{Command, Hello, Reply};

/// Takes connections until `stops`. Then waits for tabs that are told of the end.
pub(super) async fn accept(
    endpoint: Endpoint<Server>,
    invitations: Arc<Invitations>,
    mut stops: oneshot::Receiver<()>,
) {
    let strangers = Arc::new(Strangers::default());
    // Each tab holds one.
    let (held, mut ends) = mpsc::channel::<()>(1);
    loop {
        let incoming = tokio::select! {
            incoming = endpoint.accept() => incoming,
            _ = &mut stops => break,
        };
        // Whoever has not shown that packets reach it gets no memory.
        if !incoming.remote_address_validated() {
            incoming.retry();
            continue;
        }
        let Some(place) = strangers.take(incoming.remote_address().ip()) else {
            incoming.refuse();
            continue;
        };
        let (invitations, held) = (invitations.clone(), held.downgrade());
        tokio::spawn(async move {
            // A stranger that fails is forgotten: it may be anybody.
            if let Ok(Some(tab)) = timeout(HELLO, greet(incoming, &invitations)).await {
                drop(place);
                let _held = held.upgrade();
                tab.run().await;
            }
        });
    }
    drop(held);
    let told = async {
        ends.recv().await;
        endpoint.wait_idle().await;
    };
    let _ = timeout(2 * BYE, told).await;
}

/// Those that have shown no token yet, by address.
#[derive(Debug, Default)]
struct Strangers(Mutex<HashMap<IpAddr, usize>>);

/// The place of a stranger.
struct Place {
    strangers: Arc<Strangers>,
    address: IpAddr,
}

impl Strangers {
    /// None where too many wait.
    fn take(self: &Arc<Self>, address: IpAddr) -> Option<Place> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if all.values().sum::<usize>() >= MOST_STRANGERS
            || all.get(&address).is_some_and(|own| *own >= MOST_OF_ONE)
        {
            return None;
        }
        *all.entry(address).or_default() += 1;
        Some(Place { strangers: self.clone(), address })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut all = self.strangers.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = all.get_mut(&self.address) {
            *own -= 1;
            if *own == 0 {
                all.remove(&self.address);
            }
        }
    }
}

/// A tab that was let in.
struct Tab {
    connection: Connection,
    link: Arc<Link>,
    commands: UnboundedReceiver<Frame<Command>>,
    streams: (SendStream, RecvStream),
}

/// Reads the first frame of a connection, and lets it in if its token is good.
async fn greet(incoming: IncomingSession, invitations: &Invitations) -> Option<Tab> {
    let connection = incoming.await.ok()?.accept().await.ok()?;
    let (mut send, mut receive) = connection.accept_bi().await.ok()?;
    let mut decoder = Decoder::<Reply>::default();
    let mut chunk = vec![0; 4096];
    let hello = loop {
        match decoder.next([MOST_HELLO_BYTES, 0]).ok()? {
            Some(Frame { message: Reply::Hello(hello), .. }) => break *hello,
            Some(_) => return None,
            None => {}
        }
        let length = receive.read(&mut chunk).await.ok()??;
        decoder.push(&chunk[..length]);
    };
    let Hello { version, token, device } = hello;
    let refusal = if version == VERSION {
        match invitations.admit(&token) {
            Admission::In(waits) => {
                // Let in: now it may send as much as a device does.
                connection.quic_connection().set_receive_window(VarInt::from_u32(RECEIVE_WINDOW_BYTES));
                let (link, commands) = Link::new(one_line(&device.name), decoder);
                let link = Arc::new(link);
                // Before the rank gets the device, so that this is the first command.
                let _ = link.tell(Command::Welcome);
                return match waits.send(TabBackend::new(link.clone(), device)) {
                    Ok(()) => Some(Tab { connection, link, commands, streams: (send, receive) }),
                    // The rank has ended in this moment.
                    Err(_) => None,
                };
            }
            Admission::Refused(reason) => reason.to_owned(),
        }
    } else {
        format!(
            "the page has version {version} of the protocol, the host has {VERSION}: use the page of the host's release"
        )
    };
    for part in Frame::from(Command::End { reason: refusal }).encode() {
        send.write_all(&part).await.ok()?;
    }
    send.finish().await.ok()?;
    // The tab closes when it has read the reason.
    connection.closed().await;
    None
}

impl Tab {
    /// Until the host needs the tab no more, or the tab is lost.
    async fn run(self) {
        let Self { connection, link, mut commands, streams: (mut send, mut receive) } = self;
        let alive = Alive::new();
        let write = async {
            loop {
                let frame = match timeout(PING, commands.next()).await {
                    Ok(Some(frame)) => frame,
                    Ok(None) => break,
                    Err(_) => Command::Ping.into(),
                };
                for part in frame.encode() {
                    if send.write_all(&part).await.is_err() {
                        return;
                    }
                }
            }
            let _ = send.finish().await;
        };
        let read = async {
            let mut chunk = vec![0; READ_BYTES];
            loop {
                match receive.read(&mut chunk).await {
                    Ok(Some(length)) => {
                        alive.beat();
                        if let Err(reason) = link.received(&chunk[..length]) {
                            return reason;
                        }
                    }
                    Ok(None) => return CLOSED.to_owned(),
                    // The connection says why.
                    Err(_) => return in_words(&connection.closed().await),
                }
            }
        };
        let reason = tokio::select! {
            reason = read => reason,
            reason = async { in_words(&connection.closed().await) } => reason,
            () = alive.ends() => format!("the tab has not answered for {} s: it sleeps, or its machine does", SILENCE.as_secs()),
            reason = async {
                write.await;
                // The last command was sent: the tab closes when it has read it.
                sleep(BYE).await;
                "the host has ended the work".to_owned()
            } => reason,
        };
        link.end(reason.clone());
        connection.close(wtransport::VarInt::from_u32(0), reason.as_bytes());
    }
}

/// When the tab was last heard of. It tells of bytes that it has taken, so it is heard of also
/// while a long message is on its way.
struct Alive {
    start: Instant,
    last_ms: AtomicU64,
}

impl Alive {
    fn new() -> Self {
        Self { start: Instant::now(), last_ms: AtomicU64::new(0) }
    }

    fn beat(&self) {
        let now_ms = u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last_ms.store(now_ms, Ordering::Relaxed);
    }

    /// Ends when it has been silent for too long.
    async fn ends(&self) {
        loop {
            let last = self.start + Duration::from_millis(self.last_ms.load(Ordering::Relaxed));
            if last.elapsed() >= SILENCE {
                return;
            }
            tokio::time::sleep_until(last + SILENCE).await;
        }
    }
}

fn in_words(error: &ConnectionError) -> String {
    match error {
        // The host closes no connection whose end it still waits for: wtransport says so where the tab's
        // close is not yet processed.
        ConnectionError::ApplicationClosed(_)
        | ConnectionError::ConnectionClosed(_)
        | ConnectionError::LocallyClosed => CLOSED.to_owned(),
        ConnectionError::TimedOut => "the tab has lost its network, or its browser was ended".to_owned(),
        other => one_line(&other.to_string()),
    }
}

const CLOSED: &str = "the tab was closed";
/// Time from the first packet to a good token.
const HELLO: Duration = Duration::from_secs(10);
/// Silence of the host before it asks whether the tab is there.
const PING: Duration = Duration::from_secs(2);
/// Silence of the tab before it counts as lost.
const SILENCE: Duration = Duration::from_secs(10);
/// Time for the last command.
const BYE: Duration = Duration::from_secs(2);
/// Connections without a token at a time.
const MOST_STRANGERS: usize = 64;
/// Of one address.
const MOST_OF_ONE: usize = 8;
/// The first frame: names, and a list of head dims.
const MOST_HELLO_BYTES: u64 = 32 << 10;
const READ_BYTES: usize = 256 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    /// Two tabs that were closed with their browser once ended with "connection locally closed".
    #[test]
    fn a_close_that_is_not_yet_processed_is_a_closed_tab() {
        assert_eq!(in_words(&ConnectionError::LocallyClosed), "the tab was closed");
    }
}
