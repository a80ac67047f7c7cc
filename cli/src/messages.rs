//! Small messages between ranks, beside those of a plan: reports, sampled rows, timelines.

use std::time::Duration;

use bytes::Bytes;
use kyklos::Error;
use kyklos_transport::{Posted, Rank, Tag, Taken, Transport, TransportError};

use crate::failure::Result;

/// Messages of one operation, apart from those of the plan.
pub(crate) struct Messages<'a> {
    pub(crate) transport: &'a dyn Transport,
    pub(crate) op: u64,
    pub(crate) deadline: Duration,
}

impl Messages<'_> {
    pub(crate) fn send(&self, to: Rank, message: u32, bytes: Bytes) -> Result<()> {
        pollster::block_on(self.post(to, message, bytes))?;
        Ok(())
    }

    /// Starts sending.
    pub(crate) fn post(&self, to: Rank, message: u32, bytes: Bytes) -> Posted<Taken> {
        let tag = Tag { op: self.op, message };
        self.transport.post_send(to, tag, vec![bytes], self.deadline)
    }

    pub(crate) fn recv(&self, from: Rank, message: u32, bytes: usize) -> Result<Bytes> {
        let tag = Tag { op: self.op, message };
        let mut parts = pollster::block_on(self.transport.post_recv(from, tag, &[bytes], self.deadline))?;
        parts.pop().ok_or_else(|| {
            Error::from(TransportError::PeerMisbehaved { peer: from, text: "an empty message".to_owned() })
                .into()
        })
    }
}

/// The little-endian numbers of a message.
///
/// # Panics
/// If it is shorter: receivers say how long a message is.
pub(crate) fn numbers<const N: usize>(bytes: &[u8]) -> [u64; N] {
    let (numbers, _) = bytes.as_chunks::<8>();
    std::array::from_fn(|index| u64::from_le_bytes(numbers[index]))
}
