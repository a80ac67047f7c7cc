//! The first votes of a call: all ranks run the same call on the same inputs, or all end with one
//! error, before any tensor is sent.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use kyklos_transport::{Rank, Transport, Vote, harmless};

use super::call::Job;
use super::refusal::{REFUSE, refuse};
use super::terms::Terms;
use crate::activity;
use crate::failure::{Failure, Result};
use crate::tensors::{CopyId, DIGEST_BYTES, Digest, InputFile, Source};

impl Job {
    /// Agrees with all ranks on the terms of the call and on the bytes of the input.
    ///
    /// # Errors
    /// The same on all ranks.
    pub(super) fn agree(&self, transport: &dyn Transport) -> Result<()> {
        let copies = agree_on_terms(transport, &self.terms, self.settings.deadline)?;
        let Source::File(file) = &self.request.source else { return Ok(()) };
        let readers = Readers::of(&copies);
        // Ranks that read one copy read the same bytes.
        if readers.0.len() < 2 {
            return Ok(());
        }
        activity::doing("comparing the inputs");
        let mine = digests(file, &readers, transport.rank());
        let mine = mine.map_err(|failure| refuse(transport, self.named(transport.rank(), failure)))?;
        readers.compare(file, &vote(transport, INPUTS, mine, self.settings.deadline)?)
    }
}

impl Job {
    /// Tells all ranks the device of this one, for the live page. Returns the devices of all ranks.
    ///
    /// # Errors
    /// The same on all ranks.
    pub(super) fn tell_devices(&self, transport: &dyn Transport, device: &str) -> Result<Vec<String>> {
        let mine: String = device.chars().take(MOST_DEVICE_CHARS).collect();
        let notes = vote(transport, DEVICES, mine.into(), self.settings.deadline)?;
        Ok(notes.iter().map(|note| harmless(&String::from_utf8_lossy(note))).collect())
    }
}

/// Agrees with all ranks on the terms of the call. Returns the copy of the input that each rank
/// reads.
///
/// # Errors
/// The same on all ranks.
pub(super) fn agree_on_terms(
    transport: &dyn Transport,
    terms: &Terms,
    deadline: Duration,
) -> Result<Vec<CopyId>> {
    terms.compare(&vote(transport, TERMS, terms.note(), deadline)?)
}

fn vote(transport: &dyn Transport, round: [u8; 32], note: Bytes, deadline: Duration) -> Result<Vec<Bytes>> {
    let vote = Vote::Ready { plan_hash: round, note };
    Ok(pollster::block_on(transport.agree(vote, deadline.max(REFUSE)))?)
}

/// The ranks that read each copy of the input, in ascending order; the copies in the order of their
/// lowest rank.
struct Readers(Vec<Vec<Rank>>);

impl Readers {
    fn of(copies: &[CopyId]) -> Self {
        let mut readers: BTreeMap<CopyId, Vec<Rank>> = BTreeMap::new();
        for (rank, copy) in (0..).map(Rank).zip(copies) {
            readers.entry(*copy).or_default().push(rank);
        }
        let mut readers: Vec<Vec<Rank>> = readers.into_values().collect();
        readers.sort_unstable();
        Self(readers)
    }

    /// The rank that reads `section` of a copy, and how many of the sections before it that rank
    /// reads.
    fn reader(ranks: &[Rank], section: usize) -> (Rank, usize) {
        (ranks[section % ranks.len()], section / ranks.len())
    }

    /// Compares the digests of all copies. `notes` has those of each rank, in ascending order of
    /// their sections.
    fn compare(&self, file: &InputFile, notes: &[Bytes]) -> Result<()> {
        let digest = |ranks: &[Rank], section: usize| {
            let (rank, place) = Self::reader(ranks, section);
            notes[rank.0 as usize].chunks_exact(DIGEST_BYTES).nth(place)
        };
        let (first, others) = self.0.split_first().expect("there are at least two copies");
        let different = |section: &usize| {
            let wanted = digest(first, *section);
            others.iter().find(|ranks| wanted.is_none() || digest(ranks, *section) != wanted)
        };
        let found = (0..file.sections()).find_map(|section| Some((section, different(&section)?)));
        let Some((section, ranks)) = found else { return Ok(()) };
        Err(Failure::request(
            format!(
                "rank {} has other bytes in tensor `{}` of its input file than rank {}",
                ranks[0],
                file.tensor_of_section(section),
                first[0]
            ),
            "give every rank the same file",
        ))
    }
}

/// The digests of the sections that `rank` reads.
fn digests(file: &InputFile, readers: &Readers, rank: Rank) -> Result<Bytes> {
    let ranks = readers.0.iter().find(|ranks| ranks.contains(&rank)).expect("every rank reads a copy");
    let mine = (0..file.sections()).filter(|section| Readers::reader(ranks, *section).0 == rank);
    let digests: Vec<Digest> = mine.map(|section| file.digest_of_section(section)).collect::<Result<_>>()?;
    Ok(Bytes::from(digests.concat()))
}

/// Each takes at most 4 bytes of a note.
const MOST_DEVICE_CHARS: usize = 120;

/// The hashes under which these rounds vote.
const TERMS: [u8; 32] = *b"kyklos attend: terms, release 1.";
const INPUTS: [u8; 32] = *b"kyklos attend: inputs, release 1";
const DEVICES: [u8; 32] = *b"kyklos attend: devices, rel. 1..";
