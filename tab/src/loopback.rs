//! Both ends in one process.

use std::rc::Rc;
use std::sync::Arc;

use futures_channel::mpsc::unbounded;
use futures_util::StreamExt;
use futures_util::future::join;
use kyklos::backend::Backend;
use kyklos::{Error, Result};

use crate::backend::TabBackend;
use crate::executor::execute;
use crate::frame::{Decoder, MOST_HEADER_BYTES};
use crate::link::Link;
use crate::protocol::{Hello, Limits, Reply};

/// The device that `open` gives, behind the protocol of tabs: a thread carries out the commands.
/// For tests.
///
/// # Errors
/// [`Error::Device`] when `open` fails or the thread cannot start.
pub fn loopback<B: Backend + 'static>(
    open: impl FnOnce() -> Result<B> + Send + 'static,
    limits: Limits,
) -> Result<TabBackend> {
    let (to_tab, mut commands) = unbounded();
    let (from_tab, mut replies) = unbounded();
    let failed = |native: String| Error::Device {
        device: "loopback".to_owned(),
        operation: "start".to_owned(),
        native,
    };
    let tab = move || {
        let Ok(backend) = open() else { return };
        // Without the other end nothing is left to send.
        let send = Rc::new(move |bytes| drop(from_tab.unbounded_send(bytes)));
        let (inbox, work) = execute(backend, limits, "", send);
        let feed = async {
            while let Some(chunk) = commands.next().await {
                let chunk: bytes::Bytes = chunk;
                inbox.push(&chunk).await;
            }
            inbox.close();
        };
        // The host knows why it has ended.
        let (_, ()) = futures_executor::block_on(join(work, feed));
    };
    std::thread::Builder::new()
        .name("tab".to_owned())
        .spawn(tab)
        .map_err(|error| failed(error.to_string()))?;
    let mut decoder = Decoder::<Reply>::default();
    let hello = loop {
        let next = decoder.next([MOST_HEADER_BYTES, 0]).map_err(failed)?;
        match next.map(|frame| frame.message) {
            Some(Reply::Hello(hello)) => break hello,
            Some(other) => return Err(failed(format!("{other:?}"))),
            None => {}
        }
        let chunk = futures_executor::block_on(replies.next());
        decoder.push(&chunk.ok_or_else(|| failed("the device did not open".to_owned()))?);
    };
    let Hello { device, .. } = *hello;
    let (link, mut outgoing) = Link::new(device.name.clone(), decoder);
    let link = Arc::new(link);
    let (reader, sink) = (link.clone(), to_tab);
    let host = move || {
        let write = async {
            while let Some(frame) = outgoing.next().await {
                for part in frame.encode() {
                    // The reader tells when the other end is gone.
                    let _ = sink.unbounded_send(part);
                }
            }
            sink.close_channel();
        };
        let read = async {
            while let Some(chunk) = replies.next().await {
                if let Err(reason) = reader.received(&chunk) {
                    reader.end(reason);
                }
            }
            reader.end("its thread has ended".to_owned());
        };
        futures_executor::block_on(join(write, read));
    };
    std::thread::Builder::new()
        .name("tab host".to_owned())
        .spawn(host)
        .map_err(|error| failed(error.to_string()))?;
    Ok(TabBackend::new(link, device))
}
