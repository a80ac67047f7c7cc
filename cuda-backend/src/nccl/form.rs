//! The ranks of a group agree to use NCCL, and make a communicator.
//!
//! The name of the communicator is a secret: whoever has it can join. It goes from rank 0 to the others with the votes, over the
//! connections of the group, which are authenticated.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use kyklos::Result;
use kyklos::backend::Device;
use kyklos::bytes::Bytes;
use kyklos_transport::{MAX_NOTE_BYTES, Rank, Transport, Vote};

use super::collective::{NcclCollective, NcclOptions, NcclRefusal};
use super::communicator::Blocks;
use super::exchange::Failure;
use super::library::{Nccl, NcclVersion, UniqueId};
use super::thread::Setup;
use super::worker::Worker;
use crate::backend::CudaBackend;
use crate::device::MessageStream;

/// What the ranks of a group have agreed on: the same on all of them.
#[derive(Debug)]
pub enum NcclDecision {
    /// All of them use NCCL.
    Use(NcclCollective),
    /// One of them cannot, so none does.
    Leave(NcclRefusal),
}

/// Hashes for the votes: ranks that do something else at that time are told so.
const OFFER: [u8; 32] = *b"kyklos: an offer of NCCL, rel. 1";
const MADE: [u8; 32] = *b"kyklos: NCCL is ready, release 1";

/// What a rank has, as it tells the others.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Offer {
    /// NCCL of this version; from rank 0 also the name of the communicator.
    Has(NcclVersion, Option<Box<[u8; 128]>>),
    Lacks(String),
}

/// The parts of a collective that are this rank's own.
struct Prepared {
    nccl: &'static Nccl,
    id: Option<UniqueId>,
    stream: MessageStream,
}

impl NcclCollective {
    /// Agrees with all ranks of the group of `transport` whether they use NCCL, and makes a communicator if all can. All ranks call it,
    /// at the same place between two operations of the group, also those on other devices. Two votes.
    ///
    /// The future must be polled to its end: other ranks wait for its votes. If it is dropped before, abort the group.
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// use kyklos::backend::Device;
    /// use kyklos::{Session, SessionOptions};
    /// use kyklos_cuda::{NcclCollective, NcclDecision, NcclOptions};
    /// use kyklos_transport::in_process_group;
    ///
    /// let transport = in_process_group(1).remove(0);
    /// # let device = Device::new(kyklos_backend_suite::DoNothing::open()?);
    /// let decision = pollster::block_on(NcclCollective::form(&transport, &device, NcclOptions::default()))?;
    /// let session = match decision {
    ///     NcclDecision::Use(nccl) => {
    ///         Session::with_collective(transport, device, Arc::new(nccl), SessionOptions::default())
    ///     }
    ///     NcclDecision::Leave(refusal) => {
    ///         println!("{refusal}");
    ///         Session::new(transport, device)
    ///     }
    /// };
    /// # Ok::<(), kyklos::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Transport`](kyklos::Error::Transport) if the group fails. That a rank cannot use NCCL, or that NCCL fails, is no error
    /// but the decision of all ranks.
    pub async fn form(
        transport: &Arc<dyn Transport>,
        device: &Device,
        options: NcclOptions,
    ) -> Result<NcclDecision> {
        let me = transport.rank();
        let prepared = prepare(me, device);
        let offer = match &prepared {
            Ok(Prepared { nccl, id, .. }) => Offer::Has(nccl.version(), id.map(|id| Box::new(*id.bytes()))),
            Err(why) => Offer::Lacks(why.clone()),
        };
        let vote = Vote::Ready { plan_hash: OFFER, note: offer.encode() };
        let notes = transport.agree(vote, options.form_within).await?;
        let id = match decide(&notes) {
            Ok(id) => id,
            Err(refusal) => return Ok(NcclDecision::Leave(refusal)),
        };
        let Ok(Prepared { nccl, stream, .. }) = prepared else {
            // `decide` has found this rank's own refusal.
            return Ok(NcclDecision::Leave(NcclRefusal::of(me, "it has no NCCL".to_owned())));
        };
        let setup = Setup {
            nccl,
            id: UniqueId::from_bytes(id),
            ranks: transport.world(),
            blocks: Blocks { least: options.min_blocks, most: options.max_blocks },
            stream,
            group: Arc::downgrade(transport),
            rank: me,
            stop: transport.stop_flag(),
            recorder: transport.recorder(),
            form_within: options.form_within,
            deadline: options.deadline,
        };
        let started = Worker::start(setup);
        let made = match started {
            Ok((worker, outcome)) => match outcome.await {
                Ok(Ok(())) => Ok(worker),
                Ok(Err(Failure::Own(error))) => Err(error.to_string()),
                Ok(Err(Failure::Late(error))) => Err(error.to_string()),
                Ok(Err(Failure::Group)) | Err(_) => Err("the group has ended".to_owned()),
            },
            Err(error) => Err(format!("no thread for NCCL: {error}")),
        };
        let note = made.as_ref().err().map_or_else(Bytes::new, |why| shortened(why));
        // A rank whose communicator is not made votes at the end of its time.
        let patience = options.form_within.saturating_mul(2);
        let notes = transport.agree(Vote::Ready { plan_hash: MADE, note }, patience).await?;
        let failed = (0..).zip(&notes).find(|(_, note)| !note.is_empty());
        Ok(match (made, failed) {
            (Ok(worker), None) => NcclDecision::Use(Self {
                transport: transport.clone(),
                device: device.clone(),
                version: nccl.version(),
                options,
                worker,
                moving: Mutex::new(BTreeMap::new()),
                checked: Mutex::new(None),
            }),
            (made, failed) => {
                let (rank, note) = failed.unwrap_or((me.0, &notes[0]));
                // Aborts the communicator of this rank.
                drop(made);
                NcclDecision::Leave(NcclRefusal::of(Rank(rank), String::from_utf8_lossy(note).into_owned()))
            }
        })
    }
}

/// What this rank needs, or why it cannot use NCCL.
fn prepare(me: Rank, device: &Device) -> std::result::Result<Prepared, String> {
    let Some(backend) = device.backend::<CudaBackend>() else {
        return Err(format!("its device is {}, not a CUDA device", device.info().name));
    };
    let nccl = Nccl::load().map_err(|why| why.to_string())?;
    let id = (me == Rank::COORDINATOR).then(|| nccl.unique_id()).transpose();
    let id = id.map_err(|error| error.to_string())?;
    let stream = MessageStream::new(&backend.device).map_err(|error| error.to_string())?;
    Ok(Prepared { nccl, id, stream })
}

/// The name of the communicator, if all ranks can use NCCL.
fn decide(notes: &[Bytes]) -> std::result::Result<[u8; 128], NcclRefusal> {
    let (mut first, mut name) = (None, None);
    for (rank, note) in (0..).map(Rank).zip(notes) {
        match Offer::decode(note) {
            Some(Offer::Has(version, id)) => {
                let first = *first.get_or_insert(version);
                if version != first {
                    let why = format!("its NCCL is {version}, and that of rank 0 is {first}");
                    return Err(NcclRefusal::of(rank, why));
                }
                name = name.or(id);
            }
            Some(Offer::Lacks(why)) => return Err(NcclRefusal::of(rank, why)),
            None => {
                return Err(NcclRefusal::of(
                    rank,
                    "its offer has a form that this release does not know".to_owned(),
                ));
            }
        }
    }
    name.map(|name| *name).ok_or_else(|| NcclRefusal::of(Rank(0), "it has sent no name".to_owned()))
}

/// The first byte of an offer.
const LACKS: u8 = 0;
const HAS: u8 = 1;

impl Offer {
    fn encode(&self) -> Bytes {
        match self {
            Self::Lacks(why) => [&[LACKS][..], &shortened(why)].concat().into(),
            Self::Has(NcclVersion { major, minor, patch }, id) => {
                let mut note = vec![HAS];
                [major, minor, patch].iter().for_each(|number| note.extend(number.to_le_bytes()));
                note.extend(id.iter().flat_map(|id| id.iter()));
                note.into()
            }
        }
    }

    fn decode(note: &[u8]) -> Option<Self> {
        let (kind, rest) = note.split_first()?;
        if *kind == LACKS {
            return Some(Self::Lacks(String::from_utf8_lossy(rest).into_owned()));
        }
        let (numbers, id) = rest.split_at_checked(12).filter(|_| *kind == HAS)?;
        let number = |at: usize| Some(u32::from_le_bytes(numbers[at..at + 4].try_into().ok()?));
        let version = NcclVersion { major: number(0)?, minor: number(4)?, patch: number(8)? };
        let id = if id.is_empty() { None } else { Some(Box::new(id.try_into().ok()?)) };
        Some(Self::Has(version, id))
    }
}

/// As much of a reason as fits into a note.
fn shortened(why: &str) -> Bytes {
    let end = (0..MAX_NOTE_BYTES).rev().find(|end| why.is_char_boundary(*end)).unwrap_or(0);
    Bytes::copy_from_slice(&why.as_bytes()[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    const VERSION: NcclVersion = NcclVersion { major: 2, minor: 28, patch: 9 };

    fn has(version: NcclVersion, name: Option<u8>) -> Offer {
        Offer::Has(version, name.map(|byte| Box::new([byte; 128])))
    }

    #[test]
    fn offers_come_back_as_they_were_sent() {
        let long = "no library ".repeat(200) + "é";
        for offer in [has(VERSION, Some(7)), has(VERSION, None), Offer::Lacks("none".to_owned())] {
            assert_eq!(Offer::decode(&offer.encode()), Some(offer));
        }
        let note = Offer::Lacks(long).encode();
        assert!(note.len() <= MAX_NOTE_BYTES);
        assert!(matches!(Offer::decode(&note), Some(Offer::Lacks(why)) if why.starts_with("no library no")));
        for wrong in [&[][..], &[9, 1], &[HAS, 1, 2], &[HAS; 20], &[HAS; 200]] {
            assert_eq!(Offer::decode(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn the_lowest_rank_that_cannot_decides_for_all() {
        let decided = |offers: &[Offer]| decide(&offers.iter().map(Offer::encode).collect::<Vec<_>>());
        let (own, other) = (has(VERSION, None), has(NcclVersion { minor: 27, ..VERSION }, None));
        assert_eq!(decided(&[has(VERSION, Some(3)), own.clone()]), Ok([3; 128]));
        let lacks = Offer::Lacks("its device is Fake CPU".to_owned());
        let refused = decided(&[has(VERSION, Some(3)), other.clone(), lacks.clone()]).unwrap_err();
        assert_eq!(
            (refused.rank, refused.why.as_str()),
            (1, "its NCCL is 2.27.9, and that of rank 0 is 2.28.9")
        );
        assert_eq!(decided(&[lacks, other]).unwrap_err().rank, 0);
        assert_eq!(decided(&[own.clone(), own]).unwrap_err().why, "it has sent no name");
    }
}
