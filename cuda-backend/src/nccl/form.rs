//! The ranks of a group agree which of them use NCCL, and make communicators.
//!
//! The name of a communicator is a secret: whoever has it can join. It goes from the first rank of
//! an island to the others with the votes, over the connections of the group, which are
//! authenticated.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_channel::oneshot;
use futures_util::future::{Either, select};
use kyklos::Result;
use kyklos::backend::Device;
use kyklos::bytes::Bytes;
use kyklos::collective::HostStaged;
use kyklos_transport::{Group, Rank, Vote};

use super::collective::{NcclCollective, NcclOptions};
use super::communicator::Blocks;
use super::exchange::{Failure, Outcome};
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

/// Hashes for the votes: ranks that do something else at that time, or with another
/// [`NcclOptions::partial`], are told so.
const OFFER: [u8; 32] = *b"kyklos: an offer of NCCL, rel. 3";
const OFFER_PARTIAL: [u8; 32] = *b"kyklos: offer of NCCL, partly, 3";
const NAMES: [u8; 32] = *b"kyklos: names of NCCL, release 3";
const MADE: [u8; 32] = *b"kyklos: NCCL is ready, release 3";

/// A rank whose communicator is being made votes after this time, and after longer ones up to the
/// second, so that all ranks soon learn that one has failed: NCCL would let the others wait for it.
const FIRST_PATIENCE: Duration = Duration::from_millis(100);
const LONGEST_PATIENCE: Duration = Duration::from_secs(1);

/// The parts of a collective that are this rank's own.
struct Prepared {
    nccl: &'static Nccl,
    stream: MessageStream,
}

impl NcclCollective {
    /// Agrees with all ranks of the group of `transport` which of them use NCCL, and makes the
    /// communicators. All ranks call it, at the same place between two operations of the group,
    /// also those on other devices. Two votes, and then one about every second
    /// until all communicators are made: if NCCL fails on one rank, the others stop making theirs
    /// at the next.
    ///
    /// The future must be polled to its end: other ranks wait for its votes. If it is dropped
    /// before, abort the group.
    ///
    /// ```
    /// use kyklos::backend::Device;
    /// use kyklos::{Session, SessionOptions};
    /// use kyklos_cuda::{NcclCollective, NcclDecision, NcclOptions};
    /// use kyklos_transport::in_process_group;
    ///
    /// let group = in_process_group(1).remove(0);
    /// # let device = Device::new(kyklos_backend_suite::DoNothing::open()?);
    /// let decision = pollster::block_on(NcclCollective::form(&group, &device, NcclOptions::default()))?;
    /// let session = match decision {
    ///     NcclDecision::Use(nccl) => {
    ///         Session::with_collective(group, device, nccl, SessionOptions::default())
    ///     }
    ///     NcclDecision::Leave(refusal) => {
    ///         println!("{refusal}");
    ///         Session::new(group, device)
    ///     }
    /// };
    /// # Ok::<(), kyklos::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Transport`](kyklos::Error::Transport) if the group fails. That a rank cannot use
    /// NCCL, or that NCCL fails, is no error but the decision of all ranks.
    pub async fn form(group: &Group, device: &Device, options: NcclOptions) -> Result<NcclDecision> {
        let me = group.rank();
        let prepared = prepare(device);
        let offer = match &prepared {
            Ok(Prepared { nccl, .. }) => Offer::Has { version: nccl.version(), cluster: options.cluster },
            Err(why) => Offer::Lacks(why.clone()),
        };
        let plan_hash = if options.partial { OFFER_PARTIAL } else { OFFER };
        let vote = Vote::Ready { plan_hash, note: offer.encode() };
        let notes = group.agree(vote, options.form_within).await?;
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
        let notes = group.agree(Vote::Ready { plan_hash: NAMES, note }, options.form_within).await?;
        let firsts = all.islands.iter().map(|island| island.ranks[0]);
        let names: std::result::Result<Vec<_>, _> =
            firsts.map(|rank| name(rank, &notes[rank.0 as usize])).collect();
        let names = match names {
            Ok(names) => names,
            Err(refusal) => return Ok(NcclDecision::Leave(refusal)),
        };

        let mut making = match own {
            None => Making::Done(None),
            Some((prepared, island)) => {
                let named = all.islands.iter().zip(names).find(|(one, _)| *one == island);
                let (_, id) = named.expect("each island has a name");
                Making::start(group, prepared, island, id, options)
            }
        };
        let mut patience = FIRST_PATIENCE;
        loop {
            making = making.news(patience).await;
            patience = LONGEST_PATIENCE.min(patience.saturating_mul(2));
            let vote = Vote::Ready { plan_hash: MADE, note: making.status() };
            // A rank that cannot start a thread for its patience votes at the end of its time.
            let notes = group.agree(vote, options.form_within.saturating_mul(2)).await?;
            match verdict(&notes) {
                // The communicator of this rank is aborted.
                Verdict::Failed(refusal) => return Ok(NcclDecision::Leave(refusal)),
                Verdict::Wait => {}
                Verdict::Made => break,
            }
        }
        let Making::Done(worker) = making else { unreachable!("this rank has voted that it is done") };
        Ok(NcclDecision::Use(Arc::new(Self {
            host: HostStaged::new(group.clone(), options.deadline),
            device: device.clone(),
            options,
            own: worker.zip(island),
            all,
            moving: Mutex::new(BTreeMap::new()),
            checked: Mutex::new(None),
        })))
    }
}

/// The communicator of this rank while it is made. Dropping it aborts the communicator.
enum Making {
    /// `None`: this rank is in no island.
    Done(Option<Worker>),
    UnderWay(Worker, Outcome),
    Failed(String),
}

impl Making {
    /// Begins to make the communicator of an island, in a thread.
    fn start(
        group: &Group,
        Prepared { nccl, stream }: Prepared,
        island: &NcclIsland,
        id: UniqueId,
        options: NcclOptions,
    ) -> Self {
        let rank = group.rank();
        let number = island.number(rank).expect("the island of this rank");
        let setup = Setup {
            nccl,
            id,
            number,
            ranks: u32::try_from(island.ranks.len()).expect("ranks are numbered in u32"),
            blocks: Blocks { least: options.min_blocks, most: options.max_blocks },
            stream,
            group: Arc::downgrade(&group.transport),
            rank,
            stop: group.stop_flag(),
            recorder: group.recorder(),
            form_within: options.form_within,
            deadline: options.deadline,
        };
        match Worker::start(setup) {
            Ok((worker, outcome)) => Self::UnderWay(worker, outcome),
            Err(error) => Self::Failed(format!("no thread for NCCL: {error}")),
        }
    }

    /// Waits until it is made or has failed, at most for `patience`.
    async fn news(self, patience: Duration) -> Self {
        let Self::UnderWay(worker, outcome) = self else { return self };
        match select(outcome, pin!(after(patience))).await {
            Either::Left((Ok(Ok(())), _)) => Self::Done(Some(worker)),
            Either::Left((Ok(Err(Failure::Own(error))), _)) => Self::Failed(error.to_string()),
            Either::Left((Ok(Err(Failure::Late(error))), _)) => Self::Failed(error.to_string()),
            Either::Left((Ok(Err(Failure::Group)) | Err(_), _)) => {
                Self::Failed("the group has ended".to_owned())
            }
            Either::Right((_, outcome)) => Self::UnderWay(worker, outcome),
        }
    }

    /// For the other ranks.
    fn status(&self) -> Bytes {
        match self {
            Self::Done(_) => Bytes::from_static(&[IS_MADE]),
            Self::UnderWay(..) => Bytes::from_static(&[IS_UNDER_WAY]),
            Self::Failed(why) => [&[HAS_FAILED][..], &shortened(why)].concat().into(),
        }
    }
}

/// What the statuses of all ranks say together.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Made,
    Wait,
    /// The lowest rank that has failed, and why.
    Failed(NcclRefusal),
}

/// The first byte of a status.
const IS_MADE: u8 = 0;
const IS_UNDER_WAY: u8 = 1;
const HAS_FAILED: u8 = 2;

fn verdict(notes: &[Bytes]) -> Verdict {
    let mut all = Verdict::Made;
    for (rank, note) in (0..).map(Rank).zip(notes) {
        match note.split_first() {
            Some((&IS_MADE, [])) => {}
            Some((&IS_UNDER_WAY, [])) => all = Verdict::Wait,
            Some((&HAS_FAILED, why)) => {
                return Verdict::Failed(NcclRefusal::failed(rank, String::from_utf8_lossy(why)));
            }
            _ => {
                let why = "its status has a form that this release does not know";
                return Verdict::Failed(NcclRefusal::failed(rank, why));
            }
        }
    }
    all
}

/// Ends after a time. The ranks have no timer of their own, so each is a short-lived thread;
/// without one it never ends.
async fn after(time: Duration) {
    let (sender, receiver) = oneshot::channel::<()>();
    let wait = move || {
        std::thread::sleep(time);
        drop(sender);
    };
    if std::thread::Builder::new().name("kyklos-nccl-form".to_owned()).spawn(wait).is_err() {
        std::future::pending::<()>().await;
    }
    let _ = receiver.await;
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

/// The first byte of the note of an island's first rank: the name of the communicator follows, or
/// why there is none.
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
    Err(NcclRefusal::failed(rank, why))
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
            assert_eq!(name(Rank(2), note).unwrap_err(), NcclRefusal::failed(Rank(2), why));
        }
    }

    #[test]
    fn one_failure_is_the_verdict_of_all_and_one_rank_under_way_keeps_all_waiting() {
        let status = |bytes: &[u8]| Bytes::copy_from_slice(bytes);
        let [made, under_way] = [status(&[IS_MADE]), status(&[IS_UNDER_WAY])];
        let failed = status(b"\x02no network");
        assert_eq!(verdict(&[made.clone(), made.clone()]), Verdict::Made);
        assert_eq!(verdict(&[under_way.clone(), made.clone()]), Verdict::Wait);
        let told = Verdict::Failed(NcclRefusal::failed(Rank(1), "no network"));
        assert_eq!(verdict(&[under_way, failed, made.clone()]), told);
        for unknown in [&[][..], &[9], &[IS_MADE, 1]] {
            assert!(
                matches!(verdict(&[made.clone(), status(unknown)]), Verdict::Failed(why) if why.rank == 1)
            );
        }
    }
}
