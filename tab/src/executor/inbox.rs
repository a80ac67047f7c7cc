//! What arrives from the host.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;
use std::task::{Poll, Waker};

use futures_channel::mpsc::{UnboundedReceiver, UnboundedSender, unbounded};
use futures_util::StreamExt;
use futures_util::future::poll_fn;

use super::{Cancelled, Replies};
use crate::frame::{Decoder, Frame, MOST_HEADER_BYTES};
use crate::protocol::{Command, Reply};

/// Takes the bytes of the stream from the host. Cloning gives another handle of the same inbox.
#[derive(Clone)]
pub struct Inbox {
    shared: Rc<Shared>,
    commands: UnboundedSender<Result<Frame<Command>, String>>,
}

struct Shared {
    decoder: RefCell<Decoder<Command>>,
    queue: Rc<Queue>,
    replies: Replies,
    cancelled: Rc<Cancelled>,
    most_data: u64,
    /// Bytes since the host was last told that some have arrived.
    taken: Cell<usize>,
}

impl Inbox {
    pub(super) fn new(replies: Replies, cancelled: Rc<Cancelled>, most_data: u64) -> (Self, Commands) {
        let (commands, waiting) = unbounded();
        let queue = Rc::new(Queue::default());
        let shared = Shared {
            decoder: RefCell::default(),
            queue: queue.clone(),
            replies,
            cancelled,
            most_data,
            taken: Cell::new(0),
        };
        (Self { shared: Rc::new(shared), commands }, Commands { waiting, queue, under_way: 0 })
    }

    /// Takes bytes from the stream. Ends when there is room for more, so that a slow device slows
    /// the host down instead of filling the memory of the page.
    pub async fn push(&self, chunk: &[u8]) {
        let Shared { decoder, queue, replies, cancelled, most_data, taken } = &*self.shared;
        decoder.borrow_mut().push(chunk);
        taken.update(|taken| taken + chunk.len());
        if taken.get() >= TOLD_BYTES {
            taken.set(0);
            replies.send(Reply::Pong);
        }
        loop {
            let next = decoder.borrow_mut().next([MOST_HEADER_BYTES, *most_data]).transpose();
            let Some(next) = next else { break };
            match &next {
                // At once, also while the device works.
                Ok(Frame { message: Command::Ping, .. }) => replies.send(Reply::Pong),
                Ok(Frame { message: Command::Cancel { up_to }, .. }) => cancelled.cancel(*up_to),
                _ => {
                    let failed = next.is_err();
                    queue.bytes.update(|bytes| bytes + next.as_ref().map_or(0, |frame| frame.data.len()));
                    // Without a receiver the work has ended.
                    let _ = self.commands.unbounded_send(next);
                    if failed {
                        break;
                    }
                }
            }
        }
        poll_fn(|context| {
            if queue.bytes.get() <= MOST_QUEUED_BYTES || self.commands.is_closed() {
                return Poll::Ready(());
            }
            queue.waits.replace(Some(context.waker().clone()));
            Poll::Pending
        })
        .await;
    }

    /// The stream has ended: the work ends too.
    pub fn close(&self) {
        self.commands.close_channel();
    }
}

impl fmt::Debug for Inbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inbox").field("queued_bytes", &self.shared.queue.bytes.get()).finish_non_exhaustive()
    }
}

/// Bytes of data that wait for the device.
#[derive(Default)]
struct Queue {
    bytes: Cell<usize>,
    waits: RefCell<Option<Waker>>,
}

impl Queue {
    fn release(&self, bytes: usize) {
        self.bytes.update(|queued| queued - bytes);
        if let Some(waker) = self.waits.take() {
            waker.wake();
        }
    }
}

/// The commands in their order.
pub(super) struct Commands {
    waiting: UnboundedReceiver<Result<Frame<Command>, String>>,
    queue: Rc<Queue>,
    /// Bytes of data of the command before.
    under_way: usize,
}

impl Commands {
    /// The next command, when the one before is carried out. None when the stream has ended.
    pub(super) async fn next(&mut self) -> Option<Result<Frame<Command>, String>> {
        self.queue.release(std::mem::take(&mut self.under_way));
        let next = self.waiting.next().await;
        if let Some(Ok(frame)) = &next {
            self.under_way = frame.data.len();
        }
        next
    }
}

/// Data beyond this waits on the network.
const MOST_QUEUED_BYTES: usize = 256 << 20;
/// The host hears from the tab after so many bytes, so that it knows that a long message arrives.
const TOLD_BYTES: usize = 64 << 10;
