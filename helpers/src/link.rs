//! The owner's end of one helper.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use kyklos::{Error, Result};
use kyklos_transport::{Group, TransportError, Vote};

use crate::forecast::{DeviceSpeed, LinkSpeed};
use crate::message::{
    HELPER, Hello, Measured, PROTOCOL, Request, Shape5, header, header_tag, piece_tags, request_tag,
};
use crate::wait::wait_until;

/// A helper that has joined.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) name: String,
    /// Unique among the helpers of an owner, also of those that are gone.
    pub(crate) number: u64,
    pub(crate) group: Group,
    pub(crate) hello: Hello,
    pub(crate) speed: Option<LinkSpeed>,
    /// By type, dim, query heads and key/value heads.
    pub(crate) speeds: HashMap<Asked, Option<DeviceSpeed>>,
    /// The number of the next request.
    op: u64,
    said_bye: bool,
    gone: Gone,
}

/// Tells whether a helper is gone.
#[derive(Clone, Debug)]
pub struct Gone {
    group: Group,
    dropped: Arc<AtomicBool>,
    aborted: Arc<AtomicBool>,
}

impl Gone {
    /// Whether the owner has let the helper go, or their group has ended.
    pub fn is_gone(&self) -> bool {
        self.dropped.load(Ordering::Relaxed) || self.aborted.load(Ordering::Relaxed)
    }

    /// Ends the group of a helper that is gone, also if the owner has not noticed yet: then its
    /// address is free. Blocks for a moment.
    pub fn close(&self) {
        let _ = pollster::block_on(self.group.close(LEAVING));
    }
}

/// The calls whose speed is asked for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Asked {
    pub(crate) dtype: &'static str,
    pub(crate) head_dim: u32,
    pub(crate) q_heads: u32,
    pub(crate) kv_heads: u32,
}

impl Link {
    /// The link to the helper that has formed a group of two with this process. Blocks until it
    /// has said what it is.
    ///
    /// # Errors
    /// [`Error::Transport`] for a helper of another release, or one that says nothing.
    pub(crate) fn greet(name: &str, group: Group) -> Result<Self> {
        if group.size() != 2 || group.rank() != crate::message::OWNER {
            return Err(Error::request(
                format!("an owner that is rank {} of {}", group.rank(), group.size()),
                "form a group of two for each helper, in which the owner is rank 0",
            ));
        }
        let vote = Vote::Ready { plan_hash: PROTOCOL, note: Bytes::new() };
        let notes = pollster::block_on(group.agree(vote, GREETING))?;
        let hello: Option<Hello> = notes.get(1).and_then(|note| serde_json::from_slice(note).ok());
        let hello = hello
            .ok_or_else(|| Error::request("a helper that does not say what it is", "use equal releases"))?;
        let hello = Hello { device: kyklos_transport::harmless(&hello.device), ..hello };
        let gone = Gone { group: group.clone(), dropped: Arc::default(), aborted: group.stop_flag() };
        Ok(Self {
            name: name.to_owned(),
            number: 0,
            gone,
            group,
            hello,
            speed: None,
            speeds: HashMap::new(),
            op: 0,
            said_bye: false,
        })
    }

    /// Sends a request, and returns its number. It does not block.
    pub(crate) fn request(&mut self, request: &Request) -> u64 {
        let op = self.op;
        self.op += 1;
        let text = request.to_bytes();
        let messages = [(header_tag(op), header(text.len())), (request_tag(op), text)];
        for (tag, bytes) in messages {
            // Whatever comes of it, the answer will not come either.
            drop(self.group.post_send(HELPER, tag, vec![bytes], QUEUED));
        }
        op
    }

    /// A message each way of so many bytes; how long it took.
    pub(crate) fn echo(&mut self, up: usize, down: usize) -> Result<Duration> {
        let began = Instant::now();
        let op = self.request(&Request::Echo { up: up as u64, down: down as u64 });
        let [there, back, _] = piece_tags(op, 0);
        let sent = self.group.post_send(HELPER, there, vec![vec![0; up].into()], MESSAGE);
        let mut received = self.group.post_recv(HELPER, back, &[down], MESSAGE);
        pollster::block_on(sent)?;
        wait_until(&mut received, began + 2 * MESSAGE).ok_or(TransportError::Closed)??;
        Ok(began.elapsed())
    }

    /// How fast the link is, in about a tenth of a second.
    ///
    /// # Errors
    /// Of the link.
    pub(crate) fn measure_link(&mut self) -> Result<()> {
        let mut hop = self.echo(FEW, FEW)?;
        for _ in 0..HOPS {
            hop = hop.min(self.echo(FEW, FEW)?);
        }
        let up = self.rate(hop, |link, bytes| link.echo(bytes, FEW))?;
        let down = self.rate(hop, |link, bytes| link.echo(FEW, bytes))?;
        let hop_s = hop.as_secs_f64() / 2.0;
        self.speed = Some(LinkSpeed { up_bytes_per_s: up, down_bytes_per_s: down, hop_s });
        Ok(())
    }

    /// Bytes in a second, of messages that take long enough.
    #[expect(clippy::cast_precision_loss, reason = "megabytes")]
    fn rate(&mut self, hop: Duration, send: impl Fn(&mut Self, usize) -> Result<Duration>) -> Result<f64> {
        let mut bytes = FIRST;
        loop {
            let took = send(self, bytes)?;
            if took >= LONG_ENOUGH || bytes >= MOST {
                let took = took.min(send(self, bytes)?).saturating_sub(hop).max(took / 10);
                return Ok(bytes as f64 / took.as_secs_f64().max(1e-9));
            }
            bytes *= 4;
        }
    }

    /// Asks how fast the helper attends in such calls.
    ///
    /// # Errors
    /// Of the link.
    pub(crate) fn measure(&mut self, asked: &Asked) -> Result<()> {
        if self.speeds.contains_key(asked) {
            return Ok(());
        }
        let Asked { dtype, head_dim, q_heads, kv_heads } = asked.clone();
        let op =
            self.request(&Request::Measure(Shape5 { dtype: dtype.to_owned(), head_dim, q_heads, kv_heads }));
        let tag = piece_tags(op, 0)[0];
        let answer =
            pollster::block_on(self.group.post_recv(HELPER, tag, &[size_of::<Measured>()], MEASURING))?;
        let measured: Measured = bytemuck::pod_read_unaligned(&answer.concat());
        #[expect(clippy::cast_precision_loss, reason = "speeds, to a few digits")]
        let speed =
            DeviceSpeed { pairs_per_s: measured.pairs_per_s as f64, step_s: measured.step_ns as f64 / 1e9 };
        self.speeds.insert(asked.clone(), (measured.pairs_per_s > 0).then_some(speed));
        Ok(())
    }

    /// Whether the group has ended.
    pub(crate) fn is_lost(&self) -> bool {
        self.gone.is_gone()
    }

    /// What tells others when this helper is gone.
    pub(crate) fn gone(&self) -> Gone {
        self.gone.clone()
    }
}

impl Link {
    /// Tells the helper that it is needed no more. It does not block: whoever closes the group
    /// next, the helper knows why.
    pub(crate) fn say_bye(&mut self) {
        if !self.is_lost() && !std::mem::replace(&mut self.said_bye, true) {
            self.request(&Request::Bye);
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.say_bye();
        let _ = pollster::block_on(self.group.close(FAREWELL));
        self.gone.dropped.store(true, Ordering::Relaxed);
    }
}

const GREETING: Duration = Duration::from_secs(20);
/// A request may have to wait until the helper has done all that came before.
const QUEUED: Duration = Duration::from_secs(24 * 3600);
const MESSAGE: Duration = Duration::from_secs(60);
/// Kernels may have to be compiled.
const MEASURING: Duration = Duration::from_secs(120);
const LEAVING: Duration = Duration::from_secs(2);
/// A helper that is alive leaves at once. One that is not is waited for on a thread of its own.
const FAREWELL: Duration = Duration::from_secs(4);
const FEW: usize = 64;
const HOPS: u32 = 4;
const FIRST: usize = 256 << 10;
const MOST: usize = 16 << 20;
const LONG_ENOUGH: Duration = Duration::from_millis(20);
