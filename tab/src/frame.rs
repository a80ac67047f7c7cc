//! Frames on the stream between the two ends: lengths, a header in postcard, data.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::protocol::narrow_all;

/// A message with its data.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Frame<T> {
    pub(crate) message: T,
    pub(crate) data: Bytes,
}

impl<T> From<T> for Frame<T> {
    fn from(message: T) -> Self {
        Self { message, data: Bytes::new() }
    }
}

impl<T: Serialize> Frame<T> {
    /// The bytes on the stream: the header, and the data where there is any.
    pub(crate) fn encode(self) -> [Bytes; 2] {
        let header = postcard::to_stdvec(&self.message).expect("plain data always serialises");
        let mut head = BytesMut::with_capacity(LENGTHS + header.len());
        head.put_u32_le(u32::try_from(header.len()).expect("rows of a step are counted in 32 bits"));
        head.put_u64_le(self.data.len() as u64);
        head.extend_from_slice(&header);
        [head.freeze(), self.data]
    }
}

/// Cuts a stream into frames.
#[derive(Debug)]
pub(crate) struct Decoder<T> {
    /// Bytes that belong to no frame yet.
    received: BytesMut,
    /// The frame whose data is on its way.
    under_way: Option<(T, Data)>,
}

impl<T> Default for Decoder<T> {
    fn default() -> Self {
        Self { received: BytesMut::new(), under_way: None }
    }
}

impl<T: DeserializeOwned> Decoder<T> {
    pub(crate) fn push(&mut self, chunk: &[u8]) {
        self.received.extend_from_slice(chunk);
    }

    /// The next frame, once it is complete. `most` are the longest header and the longest data that
    /// are allowed now, in bytes.
    ///
    /// # Errors
    /// What is wrong with the stream: it cannot be read any further.
    pub(crate) fn next(&mut self, most: [u64; 2]) -> Result<Option<Frame<T>>, String> {
        if self.under_way.is_none() {
            let Some(mut lengths) = self.received.get(..LENGTHS) else { return Ok(None) };
            let lengths = [u64::from(lengths.get_u32_le()), lengths.get_u64_le()];
            if lengths.iter().zip(most).any(|(length, most)| *length > most) {
                return Err(format!(
                    "a frame of {} + {} bytes, allowed are {} + {}",
                    lengths[0], lengths[1], most[0], most[1]
                ));
            }
            let Some([header, data]) = narrow_all(lengths) else {
                return Err("a frame beyond the address space".to_owned());
            };
            if self.received.len() - LENGTHS < header {
                return Ok(None);
            }
            self.received.advance(LENGTHS);
            let message = postcard::from_bytes(&self.received.split_to(header))
                .map_err(|error| format!("a frame that cannot be read: {error}"))?;
            self.under_way = Some((message, Data::new(data)));
        }
        let Some((_, data)) = &mut self.under_way else { return Ok(None) };
        data.take(&mut self.received);
        if !data.is_complete() {
            return Ok(None);
        }
        Ok(self.under_way.take().map(|(message, data)| Frame { message, data: data.into_bytes() }))
    }
}

/// Data that arrives, in memory that is aligned for every element type.
#[derive(Debug)]
struct Data {
    words: Vec<u128>,
    bytes: usize,
    whole: usize,
}

impl Data {
    fn new(whole: usize) -> Self {
        Self { words: Vec::new(), bytes: 0, whole }
    }

    fn take(&mut self, received: &mut BytesMut) {
        let more = received.split_to(received.len().min(self.whole - self.bytes));
        let end = self.bytes + more.len();
        // Grows with what has arrived: the length is only promised.
        self.words.resize(end.div_ceil(size_of::<u128>()), 0);
        bytemuck::cast_slice_mut(&mut self.words)[self.bytes..end].copy_from_slice(&more);
        self.bytes = end;
    }

    fn is_complete(&self) -> bool {
        self.bytes == self.whole
    }

    fn into_bytes(self) -> Bytes {
        let whole = self.whole;
        Bytes::from_owner(self).slice(..whole)
    }
}

impl AsRef<[u8]> for Data {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.words)
    }
}

/// Bytes of the two lengths.
const LENGTHS: usize = 12;
/// The longest header: the rows of a step.
pub(crate) const MOST_HEADER_BYTES: u64 = 1 << 28;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_survive_any_cut_and_data_is_aligned() {
        let frames =
            [("first".to_owned(), vec![]), (String::new(), vec![7; 1000]), ("x".repeat(300), vec![9; 33])];
        let encode = |(message, data): &(String, Vec<u8>)| {
            Frame { message: message.clone(), data: Bytes::from(data.clone()) }.encode().concat()
        };
        let stream: Vec<u8> = frames.iter().flat_map(encode).collect();
        for step in [1, 3, 12, 13, 100, 4096] {
            let mut decoder = Decoder::<String>::default();
            let mut seen = Vec::new();
            for chunk in stream.chunks(step) {
                decoder.push(chunk);
                while let Some(frame) = decoder.next([1 << 20, 1 << 20]).unwrap() {
                    assert!(frame.data.is_empty() || frame.data.as_ptr().addr() % 16 == 0);
                    seen.push((frame.message, frame.data.to_vec()));
                }
            }
            assert_eq!(seen, frames);
        }
    }

    #[test]
    fn longer_frames_than_allowed_and_garbage_are_refused() {
        let frame =
            Frame { message: "four".to_owned(), data: Bytes::from_static(&[1; 10]) }.encode().concat();
        for most in [[2, 10], [10, 9]] {
            let mut decoder = Decoder::<String>::default();
            decoder.push(&frame);
            let error = decoder.next(most).unwrap_err();
            assert!(error.contains("a frame of 5 + 10 bytes, allowed are"), "{error}");
        }
        let mut decoder = Decoder::<String>::default();
        decoder.push(&[&[2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0][..], &[200, 200]].concat());
        assert!(decoder.next([10, 10]).unwrap_err().contains("cannot be read"));
    }
}
