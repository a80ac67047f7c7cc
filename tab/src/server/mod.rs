//! Lets tabs in.

mod connection;
mod invitations;

use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use kyklos::{Error, Result};
use rcgen::{CertificateParams, KeyPair, PKCS_ECDSA_P256_SHA256};
use tokio::sync::oneshot;
use wtransport::quinn::{TransportConfig, VarInt};
use wtransport::tls::{Certificate, CertificateChain, PrivateKey, Sha256DigestFmt};
use wtransport::{Endpoint, Identity, ServerConfig};

use self::connection::accept;
pub use self::invitations::Invitation;
use self::invitations::Invitations;

/// Where tabs come from, and where to.
#[derive(Clone, Debug)]
pub struct TabServerOptions {
    /// The UDP address to listen at; port 0 takes a free one.
    pub bind: SocketAddr,
    /// The addresses that links name, in the order in which a tab tries them; port 0 is the port of
    /// `bind`. At least one.
    pub addresses: Vec<SocketAddr>,
    /// Where the page of this release is served: an `https` address, or `http` on the tab's own
    /// machine.
    pub page: String,
}

/// Lets browser tabs in over WebTransport, each by a link that works once. A thread does the work.
/// Dropping this waits, at most 4 s, until tabs whose devices are dropped know that the work is
/// over; the others lose their connection.
#[derive(Debug)]
pub struct TabServer {
    /// Its end stops the thread.
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    invitations: Arc<Invitations>,
    /// The page, the addresses and the hash of the certificate.
    link: String,
}

impl TabServer {
    /// Starts to listen. The certificate is new, and valid for [13 days](https://www.w3.org/TR/webtransport/): browsers accept 14.
    ///
    /// # Errors
    /// [`Error::Request`] for a page address with a fragment or no address to name,
    /// [`Error::Device`] if the socket cannot be opened.
    pub fn start(options: &TabServerOptions) -> Result<Self> {
        let TabServerOptions { bind, addresses, page } = options;
        if page.contains('#') || !(page.starts_with("https://") || page.starts_with("http://")) {
            return Err(Error::request(
                format!("`{page}` is no address of a page"),
                "give one that starts with https:// or http:// and has no #",
            ));
        }
        if addresses.is_empty() {
            return Err(Error::request("tabs have no address to connect to", "give one"));
        }
        let (identity, hash) = identity()?;
        let (told, started) = oneshot::channel();
        let invitations = Arc::new(Invitations::default());
        let (shared, bind) = (invitations.clone(), *bind);
        let (stop, stops) = oneshot::channel();
        let serve = move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let runtime = match runtime {
                Ok(runtime) => runtime,
                Err(error) => return drop(told.send(Err(failed(&error)))),
            };
            runtime.block_on(async {
                let config = ServerConfig::builder()
                    .with_bind_address(bind)
                    .with_custom_transport(identity, transport())
                    .build();
                match Endpoint::server(config) {
                    Ok(endpoint) => {
                        let _ = told.send(endpoint.local_addr().map_err(|error| failed(&error)));
                        accept(endpoint, shared, stops).await;
                    }
                    Err(error) => drop(told.send(Err(failed(&error)))),
                }
            });
        };
        let thread = std::thread::Builder::new().name("tabs".to_owned()).spawn(serve);
        let thread = thread.map_err(|error| failed(&error))?;
        let local = started.blocking_recv().map_err(|error| failed(&error))??;
        let with_port = |address: &SocketAddr| {
            let port = if address.port() == 0 { local.port() } else { address.port() };
            SocketAddr::new(address.ip(), port).to_string()
        };
        let addresses = addresses.iter().map(with_port).collect::<Vec<_>>().join(",");
        let link = format!("{page}#v={}&at={addresses}&cert={hash}", crate::VERSION);
        Ok(Self { stop: Some(stop), thread: Some(thread), invitations, link })
    }

    /// A link for one tab.
    ///
    /// # Errors
    /// [`Error::Device`] if the system has no random numbers.
    pub fn invite(&self) -> Result<Invitation> {
        Invitation::new(&self.invitations, &self.link)
    }
}

impl Drop for TabServer {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A new certificate and its SHA-256 hash in hexadecimal digits.
fn identity() -> Result<(Identity, String)> {
    let make = || -> std::result::Result<_, rcgen::Error> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        let mut params = CertificateParams::new(vec!["kyklos".to_owned()])?;
        let now = SystemTime::now();
        // Clocks differ.
        params.not_before = (now - HOUR).into();
        params.not_after = (now + 13 * 24 * HOUR).into();
        Ok((params.self_signed(&key)?, key))
    };
    let (certificate, key) = make().map_err(|error| failed(&error))?;
    let certificate = Certificate::from_der(certificate.der().to_vec()).map_err(|error| failed(&error))?;
    let hash = certificate.hash().fmt(Sha256DigestFmt::DottedHex).replace(':', "");
    let key = PrivateKey::from_der_pkcs8(key.serialize_der());
    Ok((Identity::new(CertificateChain::single(certificate), key), hash))
}

/// A stranger gets little memory: a connection that is let in gets more, see [`connection`].
fn transport() -> TransportConfig {
    let mut config = TransportConfig::default();
    config
        .max_concurrent_bidi_streams(STREAMS.into())
        .max_concurrent_uni_streams(STREAMS.into())
        .stream_receive_window(VarInt::from_u32(RECEIVE_WINDOW_BYTES))
        .receive_window(VarInt::from_u32(STRANGER_BYTES))
        .send_window(SEND_WINDOW_BYTES)
        .datagram_receive_buffer_size(None)
        .max_idle_timeout(Some(VarInt::from_u32(IDLE_MS).into()))
        .keep_alive_interval(Some(Duration::from_millis(u64::from(IDLE_MS) / 4)));
    config
}

fn failed(error: &dyn std::fmt::Display) -> Error {
    Error::Device {
        device: "tab".to_owned(),
        operation: "listen for browser tabs".to_owned(),
        native: error.to_string(),
    }
}

const HOUR: Duration = Duration::from_secs(3600);
/// HTTP/3 needs three of one direction, a session one of both, and its data one more.
const STREAMS: u8 = 8;
/// Bytes on their way from a tab.
const RECEIVE_WINDOW_BYTES: u32 = 16 << 20;
/// Bytes on their way from somebody who has shown no token.
const STRANGER_BYTES: u32 = 64 << 10;
/// Bytes on their way to a tab.
const SEND_WINDOW_BYTES: u64 = 32 << 20;
/// A connection without a packet for so long is lost.
const IDLE_MS: u32 = 10_000;
