//! The notes of all ranks in a round of votes, on their way from the coordinator to a rank.

use std::fmt;

use bytes::Bytes;

use super::codec::{Reader, WireError};
use super::limits::{ENVELOPE_BYTES, MAX_FRAME_BYTES};
use crate::rank::{MAX_NOTE_BYTES, MAX_RANKS};

/// The notes of ranks that follow each other: as many as fit one frame.
///
/// They share one allocation, whose size is that of the frame.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Notes {
    lengths: Vec<u16>,
    bytes: Bytes,
}

impl Notes {
    /// The notes of all ranks, in rank order, in as few frames as they fit; no frame if all notes
    /// are empty. A note is cut at [`MAX_NOTE_BYTES`].
    pub fn split(notes: &[Bytes]) -> Vec<Self> {
        if notes.iter().all(Bytes::is_empty) {
            return Vec::new();
        }
        let mut frames = Vec::new();
        let (mut lengths, mut bytes) = (Vec::new(), Vec::new());
        for note in notes {
            let note = &note[..note.len().min(MAX_NOTE_BYTES)];
            if FIXED_BYTES + NOTE_LENGTH_BYTES * (lengths.len() + 1) + bytes.len() + note.len()
                > MAX_FRAME_BYTES
            {
                frames.push(Self {
                    lengths: std::mem::take(&mut lengths),
                    bytes: std::mem::take(&mut bytes).into(),
                });
            }
            lengths.push(u16::try_from(note.len()).unwrap_or(u16::MAX));
            bytes.extend_from_slice(note);
        }
        frames.push(Self { lengths, bytes: bytes.into() });
        frames
    }

    /// Number of notes.
    pub fn len(&self) -> usize {
        self.lengths.len()
    }

    /// Whether there is no note.
    pub fn is_empty(&self) -> bool {
        self.lengths.is_empty()
    }

    /// The notes, in rank order. No bytes are copied.
    pub fn iter(&self) -> impl Iterator<Item = Bytes> {
        let mut rest = self.bytes.clone();
        self.lengths.iter().map(move |&length| rest.split_to(usize::from(length)))
    }

    pub(super) fn put(&self, out: &mut Vec<u8>) {
        let count = u32::try_from(self.lengths.len()).unwrap_or(u32::MAX);
        out.extend_from_slice(&count.to_le_bytes());
        for length in &self.lengths {
            out.extend_from_slice(&length.to_le_bytes());
        }
        out.extend_from_slice(&self.bytes);
    }

    pub(super) fn read(reader: &mut Reader<'_>) -> Result<Self, WireError> {
        let count = reader.u32()?;
        if count > MAX_RANKS {
            return Err(WireError::BadValue { field: "number of notes", value: u64::from(count) });
        }
        // Grows with the lengths that are present; the count alone reserves no memory.
        let mut lengths = Vec::new();
        let mut total = 0;
        for _ in 0..count {
            let length = read_length(reader)?;
            lengths.push(length);
            total += usize::from(length);
        }
        Ok(Self { lengths, bytes: Bytes::copy_from_slice(reader.bytes(total)?) })
    }
}

impl fmt::Debug for Notes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Error texts quote frames: the bytes of the notes are for programs.
        f.debug_struct("Notes").field("len", &self.lengths.len()).field("bytes", &self.bytes.len()).finish()
    }
}

/// Appends the note of a vote, at most [`MAX_NOTE_BYTES`] of it.
pub(super) fn put_note(out: &mut Vec<u8>, note: &Bytes) {
    let note = &note[..note.len().min(MAX_NOTE_BYTES)];
    out.extend_from_slice(&u16::try_from(note.len()).unwrap_or(u16::MAX).to_le_bytes());
    out.extend_from_slice(note);
}

pub(super) fn read_note(reader: &mut Reader<'_>) -> Result<Bytes, WireError> {
    let length = read_length(reader)?;
    reader.bytes(usize::from(length)).map(Bytes::copy_from_slice)
}

fn read_length(reader: &mut Reader<'_>) -> Result<u16, WireError> {
    let length = reader.u16()?;
    if usize::from(length) > MAX_NOTE_BYTES {
        return Err(WireError::BadValue { field: "length of a note", value: u64::from(length) });
    }
    Ok(length)
}

/// Bytes of the length of a note.
const NOTE_LENGTH_BYTES: usize = 2;

/// Bytes of a frame of notes besides the notes: envelope, number and layout of the frame, round,
/// count.
const FIXED_BYTES: usize = ENVELOPE_BYTES + 2 + 8 + 4;
