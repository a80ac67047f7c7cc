//! The host's end of the connection to a tab: what was asked, what was answered, and why it ended.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use bytes::Bytes;
use futures_channel::mpsc::{UnboundedReceiver, UnboundedSender, unbounded};
use futures_util::future::poll_fn;
use kyklos::backend::Control;
use kyklos::{Error, Result};

use crate::frame::{Decoder, Frame};
use crate::protocol::{BufferId, Command, Reply, RequestId};

/// The connection to a tab. Its driver writes what [`Link::new`] gives to the stream, and calls
/// [`Link::received`] and [`Link::end`].
#[derive(Debug)]
pub(crate) struct Link {
    /// Name of the device, for errors.
    device: String,
    commands: UnboundedSender<Frame<Command>>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    decoder: Decoder<Reply>,
    last_request: RequestId,
    last_buffer: BufferId,
    requests: HashMap<RequestId, Request>,
    /// Pieces of attend steps that are done.
    pieces: u64,
    /// Of the futures that wait for anything.
    wakers: Vec<Waker>,
    ended: Option<String>,
}

/// A request that was sent.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked {
    pub(crate) request: RequestId,
    /// The count of pieces when it was sent.
    pieces: u64,
}

#[derive(Debug)]
enum Request {
    /// Not answered yet; the answer has so many bytes.
    Open(u64),
    /// Not answered yet, and nobody waits for it.
    Abandoned(u64),
    Answered(Bytes),
}

impl Link {
    /// A connection whose first frame has been read by `decoder`, and the commands to write to its
    /// stream. They end when the last handle of the connection is gone.
    pub(crate) fn new(device: String, decoder: Decoder<Reply>) -> (Self, UnboundedReceiver<Frame<Command>>) {
        let (commands, outgoing) = unbounded();
        let state = State {
            decoder,
            last_request: 0,
            last_buffer: 0,
            requests: HashMap::new(),
            pieces: 0,
            wakers: Vec::new(),
            ended: None,
        };
        (Self { device, commands, state: Mutex::new(state) }, outgoing)
    }

    /// Sends a command that has no answer.
    ///
    /// # Errors
    /// The reason why the connection has ended, as in all methods.
    pub(crate) fn tell(&self, command: impl Into<Frame<Command>>) -> Result<()> {
        self.check()?;
        // Without a receiver the connection ends in this moment: the next call says so.
        let _ = self.commands.unbounded_send(command.into());
        Ok(())
    }

    /// Sends a command whose answer has `bytes` bytes of data.
    pub(crate) fn ask(&self, bytes: u64, command: impl FnOnce(RequestId) -> Command) -> Result<Asked> {
        self.check()?;
        let mut state = self.lock();
        state.last_request += 1;
        let request = state.last_request;
        state.requests.insert(request, Request::Open(bytes));
        // While the state is locked, so that requests are sent in their order.
        let _ = self.commands.unbounded_send(command(request).into());
        Ok(Asked { request, pieces: state.pieces })
    }

    pub(crate) fn check(&self) -> Result<()> {
        self.lock().ended.as_deref().map_or(Ok(()), |reason| Err(self.error(reason)))
    }

    pub(crate) fn new_buffer(&self) -> BufferId {
        let mut state = self.lock();
        state.last_buffer += 1;
        state.last_buffer
    }

    /// Waits for the answer. With a control, tells it of the pieces that the device has done since
    /// the request.
    pub(crate) async fn answer(&self, asked: Asked, control: Option<&Control>) -> Result<Bytes> {
        let Asked { request, pieces: mut seen } = asked;
        let abandon = Abandon { link: self, request };
        let answer = poll_fn(|context| {
            let mut state = self.lock();
            if let Some(control) = control {
                for _ in seen..state.pieces {
                    if let Err(error) = control.piece_done() {
                        return Poll::Ready(Err(error));
                    }
                }
                seen = state.pieces;
            }
            if matches!(state.requests.get(&request), Some(Request::Answered(_)))
                && let Some(Request::Answered(data)) = state.requests.remove(&request)
            {
                return Poll::Ready(Ok(data));
            }
            if let Some(reason) = &state.ended {
                return Poll::Ready(Err(self.error(reason)));
            }
            state.wakers.push(context.waker().clone());
            Poll::Pending
        })
        .await;
        drop(abandon);
        answer
    }

    /// Takes bytes from the stream.
    ///
    /// # Errors
    /// Why the stream is not one of a tab; the driver ends the connection.
    pub(crate) fn received(&self, chunk: &[u8]) -> Result<(), String> {
        let mut state = self.lock();
        state.decoder.push(chunk);
        loop {
            let open = |request: &Request| match request {
                Request::Open(bytes) | Request::Abandoned(bytes) => Some(*bytes),
                Request::Answered(_) => None,
            };
            // No tab can make the host keep more than the host has asked for.
            let most_data = state.requests.values().filter_map(open).max().unwrap_or(0);
            let Some(Frame { message, data }) = state.decoder.next([MOST_REPLY_BYTES, most_data])? else {
                break;
            };
            match message {
                Reply::Pong => {}
                Reply::Hello(_) => return Err("it introduces itself twice".to_owned()),
                Reply::Pieces { done } => {
                    if done < state.pieces || done - state.pieces > MOST_PIECES {
                        return Err("its count of pieces jumps".to_owned());
                    }
                    state.pieces = done;
                }
                Reply::Failed { reason } => return Err(one_line(&reason)),
                Reply::Downloaded { request } | Reply::Done { request } => {
                    let length = data.len() as u64;
                    match state.requests.remove(&request) {
                        Some(Request::Open(bytes)) if bytes == length => {
                            state.requests.insert(request, Request::Answered(data));
                        }
                        Some(Request::Abandoned(bytes)) if bytes == length => {}
                        _ => return Err(format!("it answers with {length} bytes what was not asked")),
                    }
                }
            }
        }
        wake(state);
        Ok(())
    }

    /// Ends the connection: every call fails with `reason` from now on.
    pub(crate) fn end(&self, reason: String) {
        let mut state = self.lock();
        state.ended.get_or_insert(reason);
        self.commands.close_channel();
        wake(state);
    }

    /// The last command.
    pub(crate) fn bye(&self) {
        let _ = self
            .commands
            .unbounded_send(Command::End { reason: "the host has ended the work".to_owned() }.into());
        self.commands.close_channel();
    }

    fn error(&self, reason: &str) -> Error {
        Error::Device {
            device: self.device.clone(),
            operation: "work in a browser tab".to_owned(),
            native: reason.to_owned(),
        }
    }

    /// No code that panics runs under the lock but allocations.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Wakes outside of the lock: a waker may run the future at once.
fn wake(mut state: MutexGuard<'_, State>) {
    let wakers = std::mem::take(&mut state.wakers);
    drop(state);
    wakers.into_iter().for_each(Waker::wake);
}

/// Drops the answer of a future that is dropped.
struct Abandon<'a> {
    link: &'a Link,
    request: RequestId,
}

impl Drop for Abandon<'_> {
    fn drop(&mut self) {
        let mut state = self.link.lock();
        // An answered one is gone now. No abandoned one comes here: each request has one future.
        if let Some(Request::Open(bytes)) = state.requests.remove(&self.request) {
            state.requests.insert(self.request, Request::Abandoned(bytes));
        }
    }
}

/// Words of the other end, for a terminal.
pub(crate) fn one_line(text: &str) -> String {
    text.chars().map(|char| if char.is_control() { ' ' } else { char }).take(MOST_WORDS).collect()
}

/// The header of a reply.
const MOST_REPLY_BYTES: u64 = 1 << 16;
/// Between two replies.
const MOST_PIECES: u64 = 1 << 20;
/// Characters of a text of the tab.
const MOST_WORDS: usize = 300;

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    use kyklos::Error;
    use kyklos::backend::Control;

    use super::Link;
    use crate::frame::{Decoder, Frame};
    use crate::protocol::{Command, Reply};

    #[test]
    fn pieces_count_that_arrive_before_anybody_waits() {
        let (link, _commands) = Link::new("a tab".to_owned(), Decoder::default());
        let asked = link.ask(0, |request| Command::Wait { request }).unwrap();
        for reply in [Reply::Pieces { done: 3 }, Reply::Done { request: asked.request }] {
            link.received(&Frame::from(reply).encode().concat()).unwrap();
        }
        let cancelled = Control::new(Arc::new(AtomicBool::new(true)));
        let answer = pollster::block_on(link.answer(asked, Some(&cancelled)));
        assert!(matches!(answer, Err(Error::Cancelled)), "{answer:?}");
        assert_eq!(cancelled.pieces_done(), 1, "the first piece says that it is cancelled");
    }
}
