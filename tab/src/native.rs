//! A tab without a browser, for tests: the same protocol over real WebTransport, the CPU as its
//! device.

use std::collections::HashMap;
use std::rc::Rc;
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes;
use kyklos::backend::Device;
use wtransport::endpoint::endpoint_side::Client;
use wtransport::tls::Sha256Digest;
use wtransport::{ClientConfig, Connection, Endpoint, RecvStream, SendStream};

use crate::{Limits, VERSION, execute};

/// What this tab lends.
pub const LIMITS: Limits = Limits { buffer_bytes: 1 << 28, total_bytes: 1 << 28, state_bytes: None };

/// Longest life of a tab.
const LIFE: Duration = Duration::from_secs(180);

/// The parts of a link behind `#`.
#[must_use]
pub fn parts(link: &str) -> HashMap<String, String> {
    let (_, fragment) = link.split_once('#').unwrap();
    let part =
        |part: &str| part.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned())).unwrap();
    fragment.split('&').map(part).collect()
}

/// Connects as the link says, and opens the stream.
pub async fn connect(link: &str) -> (Endpoint<Client>, Connection, SendStream, RecvStream) {
    let parts = parts(link);
    assert_eq!(parts["v"], VERSION.to_string());
    let mut hash = [0; 32];
    for (byte, digits) in hash.iter_mut().zip(parts["cert"].as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits).unwrap(), 16).unwrap();
    }
    let config = ClientConfig::builder()
        .with_bind_default()
        .with_server_certificate_hashes([Sha256Digest::new(hash)])
        .build();
    let endpoint = Endpoint::client(config).unwrap();
    let connection = endpoint.connect(format!("https://{}/", parts["at"])).await.unwrap();
    let (send, receive) = connection.open_bi().await.unwrap().await.unwrap();
    (endpoint, connection, send, receive)
}

/// Runs `work` on a thread with a runtime.
pub fn on_thread<T: Send + 'static>(work: impl AsyncFnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async { tokio::time::timeout(LIFE, work()).await.unwrap() })
    })
}

/// A tab that works until the host ends it, or until it has taken `most_bytes`. Gives the reason of
/// its end.
pub fn tab(link: &str, token: Option<&str>, most_bytes: usize) -> JoinHandle<String> {
    let (link, token) = (link.to_owned(), token.map(str::to_owned));
    on_thread(async move || {
        let (endpoint, connection, mut send, mut receive) = connect(&link).await;
        let token = token.unwrap_or_else(|| parts(&link)["token"].clone());
        let (to_host, mut outgoing) = tokio::sync::mpsc::unbounded_channel::<Bytes>();
        let (inbox, work) =
            execute(Device::cpu(), LIMITS, &token, Rc::new(move |bytes| drop(to_host.send(bytes))));
        let write = async {
            while let Some(bytes) = outgoing.recv().await {
                if send.write_all(&bytes).await.is_err() {
                    break;
                }
            }
            std::future::pending::<()>().await;
        };
        let read = async {
            let (mut chunk, mut taken) = (vec![0; 1 << 16], 0);
            while let Ok(Some(length)) = receive.read(&mut chunk).await {
                taken += length;
                if taken > most_bytes {
                    return "taken enough".to_owned();
                }
                inbox.push(&chunk[..length]).await;
            }
            inbox.close();
            std::future::pending().await
        };
        let reason = tokio::select! {
            reason = work => reason.unwrap_or_else(|failure| failure),
            reason = read => reason,
            () = write => String::new(),
        };
        connection.close(wtransport::VarInt::from_u32(0), b"");
        endpoint.wait_idle().await;
        reason
    })
}
