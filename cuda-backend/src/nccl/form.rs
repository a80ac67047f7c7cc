//! The ranks of a group agree which of them use NCCL, and make communicators.
//!
//! The name of a communicator is a secret: whoever has it can join. It goes from the first rank of an island to the others with the
//! votes, over the connections of the group, which are authenticated.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use kyklos::Result;
use kyklos::backend::Device;
use kyklos::bytes::Bytes;
use kyklos::collective::HostStaged;
use kyklos_transport::{Rank, Transport, Vote};

use super::collective::{NcclCollective, NcclOptions};
use super::communicator::Blocks;
use super::exchange::Failure;
use super::islands::{Islands, NcclIsland, NcclRefusal, Offer, shortened};
use super::library::{Nccl, UniqueId};
use super::thread::Setup;
use super::worker::Worker;
use crate::backend::CudaBackend;
use crate::device::MessageStream;

/// What the ranks of a group have agreed on: the same on all of them.
#[derive(Debug)]
pub enum NcclDecision {
    /// Messages go by NCCL where [`NcclCollective::islands`] says so.
    Use(Arc<NcclCollective>),
    /// No rank uses NCCL.
    Leave(NcclRefusal),
}

/// Hashes for the votes: ranks that do something else at that time, or with another [`NcclOptions::partial`], are told so.
const OFFER: [u8; 32] = *b"kyklos: an offer of NCCL, rel. 2";
const OFFER_PARTIAL: [u8; 32] = *b"kyklos: offer of NCCL, partly, 2";
const NAMES: [u8; 32] = *b"kyklos: names of NCCL, release 2";
const MADE: [u8; 32] = *b"kyklos: NCCL is ready, release 2";

/// The parts of a collective that are this rank's own.
struct Prepared {
    nccl: &'static Nccl,
    stream: MessageStream,
}

impl NcclCollective {
    /// Agrees with all ranks of the group of `transport` which of them use NCCL, and makes the communicators. All ranks call it,
    /// at the same place between two operations of the group, also those on other devices. At most three votes.
    ///
    /// The future must be polled to its end: other ranks wait for its votes. If it is dropped before, abort the group.
    ///
    /// ```
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
    ///         Session::with_collective(transport, device, nccl, SessionOptions::default())
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
        let prepared = prepare(device);
        let offer = match &prepared {
            Ok(Prepared { nccl, .. }) => Offer::Has { version: nccl.version(), cluster: options.cluster },
            Err(why) => Offer::Lacks(why.clone()),
        };
        let plan_hash = if options.partial { OFFER_PARTIAL } else { OFFER };
        let vote = Vote::Ready { plan_hash, note: offer.encode() };
        let notes = transport.agree(vote, options.form_within).await?;
        let offers: Vec<_> = notes.iter().map(|note| Offer::decode(note)).collect();
        let gap = Islands::gap(&offers);
        let Islands { islands, outside } = Islands::of(&offers);
        if let Some(refusal) = gap.filter(|_| !options.partial || islands.is_empty()) {
            return Ok(NcclDecision::Leave(refusal));
        }
        let all = Islands { islands, outside };
        let island = all.with(me).cloned();
        let own = prepared.ok().zip(island.as_ref());

        // The first rank of an island names its communicator.
        let (mut unnamed, mut note) = (None, Bytes::new());
        if let Some((Prepared { nccl, .. }, island)) = &own
            && island.ranks.first() == Some(&me)
        {
            match nccl.unique_id() {
                Ok(id) => note = [&[NAMED][..], id.bytes()].concat().into(),
                Err(error) => unnamed = Some(error.to_string()),
            }
        }
        if let Some(why) = &unnamed {
            note = [&[UNNAMED][..], &shortened(why)].concat().into();
        }
        let notes = transport.agree(Vote::Ready { plan_hash: NAMES, note }, options.form_within).await?;
        let firsts = all.islands.iter().map(|island| island.ranks[0]);
        let names: std::result::Result<Vec<_>, _> =
            firsts.map(|rank| name(rank, &notes[rank.0 as usize])).collect();
        let names = match names {
            Ok(names) => names,
            Err(refusal) => return Ok(NcclDecision::Leave(refusal)),
        };

        let made = match own {
            None => Ok(None),
            Some((prepared, island)) => {
                let named = all.islands.iter().zip(names).find(|(one, _)| *one == island);
                let (_, id) = named.expect("each island has a name");
                make(transport, prepared, island, id, options).await.map(Some)
            }
        };
        let note = made.as_ref().err().map_or_else(Bytes::new, |why| shortened(why));
        // A rank whose communicator is not made votes at the end of its time.
        let patience = options.form_within.saturating_mul(2);
        let notes = transport.agree(Vote::Ready { plan_hash: MADE, note }, patience).await?;
        let failed = (0..).map(Rank).zip(&notes).find(|(_, note)| !note.is_empty());
        Ok(match (made, failed) {
            (Ok(worker), None) => NcclDecision::Use(Arc::new(Self {
                host: HostStaged::new(transport.clone(), options.deadline),
                device: device.clone(),
                options,
                own: worker.zip(island),
                all,
                moving: Mutex::new(BTreeMap::new()),
                checked: Mutex::new(None),
            })),
            (made, failed) => {
                let (rank, note) = failed.unwrap_or((me, &notes[0]));
                // Aborts the communicator of this rank.
                drop(made);
                NcclDecision::Leave(NcclRefusal::of(rank, String::from_utf8_lossy(note)))
            }
        })
    }
}

/// The communicator of an island, in a thread, or why there is none.
async fn make(
    transport: &Arc<dyn Transport>,
    Prepared { nccl, stream }: Prepared,
    island: &NcclIsland,
    id: UniqueId,
    options: NcclOptions,
) -> std::result::Result<Worker, String> {
    let rank = transport.rank();
    let number = island.number(rank).expect("the island of this rank");
    let setup = Setup {
        nccl,
        id,
        number,
        ranks: u32::try_from(island.ranks.len()).expect("ranks are numbered in u32"),
        blocks: Blocks { least: options.min_blocks, most: options.max_blocks },
        stream,
        group: Arc::downgrade(transport),
        rank,
        stop: transport.stop_flag(),
        recorder: transport.recorder(),
        form_within: options.form_within,
        deadline: options.deadline,
    };
    let (worker, outcome) = Worker::start(setup).map_err(|error| format!("no thread for NCCL: {error}"))?;
    match outcome.await {
        Ok(Ok(())) => Ok(worker),
        Ok(Err(Failure::Own(error))) => Err(error.to_string()),
        Ok(Err(Failure::Late(error))) => Err(error.to_string()),
        Ok(Err(Failure::Group)) | Err(_) => Err("the group has ended".to_owned()),
    }
}

/// What this rank needs, or why it cannot use NCCL.
fn prepare(device: &Device) -> std::result::Result<Prepared, String> {
    let Some(backend) = device.backend::<CudaBackend>() else {
        return Err(format!("its device is {}, not a CUDA device", device.info().name));
    };
    let nccl = Nccl::load().map_err(|why| why.to_string())?;
    let stream = MessageStream::new(&backend.device).map_err(|error| error.to_string())?;
    Ok(Prepared { nccl, stream })
}

/// The first byte of the note of an island's first rank: the name of the communicator follows, or why there is none.
const UNNAMED: u8 = 0;
const NAMED: u8 = 1;

/// The name in the note of `rank`, the first one of an island.
fn name(rank: Rank, note: &[u8]) -> std::result::Result<UniqueId, NcclRefusal> {
    let why = match note.split_first() {
        Some((&NAMED, id)) => match id.try_into() {
            Ok(id) => return Ok(UniqueId::from_bytes(id)),
            Err(_) => "it has sent no name".into(),
        },
        Some((&UNNAMED, why)) => String::from_utf8_lossy(why),
        _ => "it has sent no name".into(),
    };
    Err(NcclRefusal::of(rank, why))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_taken_whole_or_not_at_all() {
        let note = [&[NAMED][..], &[7; 128]].concat();
        assert_eq!(name(Rank(2), &note).unwrap().bytes(), &[7; 128]);
        for (note, why) in [
            (&note[..100], "it has sent no name"),
            (&[], "it has sent no name"),
            (&[9; 129], "it has sent no name"),
            (b"\0no network", "no network"),
        ] {
            assert_eq!(name(Rank(2), note).unwrap_err(), NcclRefusal::of(Rank(2), why));
        }
    }
}
