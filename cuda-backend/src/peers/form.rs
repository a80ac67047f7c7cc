//! The ranks of a group find out which of them are in one process and have a CUDA device.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kyklos::Result;
use kyklos::backend::Device;
use kyklos::bytes::Bytes;
use kyklos::collective::HostStaged;
use kyklos_transport::{Group, Rank, TransportError, Vote};

use super::waiting::Waiting;
use super::{CudaPeers, cuda};
use crate::device::{DeviceStatus, MessageStream};

/// Hashes for the votes: ranks that do something else at that time are told so.
const PLACES: [u8; 32] = *b"kyklos: CUDA ranks by process, 1";
const FOUND: [u8; 32] = *b"kyklos: CUDA ranks are found, r1";

/// A number that no other process of a group has, also after a fork.
fn process() -> u64 {
    static KEYS: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    KEYS.hash_one(std::process::id())
}

/// The ranks of this process that look for each other, by number.
static RANKS: Mutex<BTreeMap<u64, Entry>> = Mutex::new(BTreeMap::new());

#[derive(Debug)]
struct Entry {
    device: Arc<DeviceStatus>,
    waiting: Arc<Waiting>,
}

/// A rank of this process with a CUDA device: the others find it until this is dropped.
#[derive(Debug)]
pub(super) struct Registered(u64);

impl Registered {
    fn new(device: Arc<DeviceStatus>) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        ranks().insert(number, Entry { device, waiting: Arc::default() });
        Self(number)
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        ranks().remove(&self.0);
    }
}

fn ranks() -> MutexGuard<'static, BTreeMap<u64, Entry>> {
    RANKS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where a rank is, as it tells the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    process: u64,
    number: u64,
}

impl Place {
    fn encode(self) -> Bytes {
        [self.process.to_le_bytes(), self.number.to_le_bytes()].concat().into()
    }

    /// `None` for a rank without a CUDA device.
    fn decode(note: &[u8]) -> Option<Self> {
        let (process, number) = note.split_first_chunk()?;
        Some(Self {
            process: u64::from_le_bytes(*process),
            number: u64::from_le_bytes(number.try_into().ok()?),
        })
    }
}

/// The ranks with CUDA devices of each process that has at least two, in order. A place that two
/// ranks name is of none of them.
fn together(places: &[Option<Place>]) -> Vec<Vec<Rank>> {
    let mut processes: Vec<(u64, Vec<Rank>)> = Vec::new();
    for (rank, place) in (0..).map(Rank).zip(places) {
        let Some(Place { process, .. }) = place else { continue };
        if places.iter().filter(|other| *other == place).count() > 1 {
            continue;
        }
        match processes.iter_mut().find(|(known, _)| known == process) {
            Some((_, ranks)) => ranks.push(rank),
            None => processes.push((*process, vec![rank])),
        }
    }
    processes.into_iter().map(|(_, ranks)| ranks).filter(|ranks| ranks.len() > 1).collect()
}

impl CudaPeers {
    /// Finds the ranks of the group of `transport` that are in one process and have CUDA devices:
    /// messages between these are copied from device to device, the others are staged in host
    /// memory. All ranks call it, at the same place between two operations of the group, also
    /// those on other devices. One vote, or two, of at most `form_within` each. `None`, on all
    /// ranks, if no process has two such ranks; a rank on whose device the driver fails is
    /// none. A message or an agreement that later takes longer than `deadline` is an error.
    ///
    /// The future must be polled to its end: other ranks wait for its votes. If it is dropped
    /// before, abort the group.
    ///
    /// ```
    /// use std::time::Duration;
    /// use kyklos::backend::Device;
    /// use kyklos::{Session, SessionOptions};
    /// use kyklos_cuda::CudaPeers;
    /// use kyklos_transport::in_process_group;
    ///
    /// let group = in_process_group(1).remove(0);
    /// # let device = Device::new(kyklos_backend_suite::DoNothing::open()?);
    /// let (form_within, deadline) = (Duration::from_secs(60), Duration::from_secs(600));
    /// let session = match pollster::block_on(CudaPeers::form(&group, &device, form_within, deadline))? {
    ///     Some(peers) => Session::with_collective(group, device, peers, SessionOptions::default()),
    ///     None => Session::new(group, device),
    /// };
    /// # Ok::<(), kyklos::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Transport`](kyklos::Error::Transport) if the group fails.
    pub async fn form(
        group: &Group,
        device: &Device,
        form_within: Duration,
        deadline: Duration,
    ) -> Result<Option<Arc<Self>>> {
        let (stream, own) = match cuda(device).and_then(|cuda| Ok((MessageStream::new(&cuda.device)?, cuda)))
        {
            Ok((stream, cuda)) => (Some(stream), Some(Registered::new(cuda.device.status().clone()))),
            Err(_) => (None, None),
        };
        let place = own.as_ref().map(|own| Place { process: process(), number: own.0 });
        let note = place.map_or_else(Bytes::new, Place::encode);
        let notes = group.agree(Vote::Ready { plan_hash: PLACES, note }, form_within).await?;
        let places: Vec<Option<Place>> = notes.iter().map(|note| Place::decode(note)).collect();
        let groups = together(&places);
        if groups.is_empty() {
            return Ok(None);
        }
        let here = groups.iter().find(|ranks| ranks.contains(&group.rank()));
        let mut found = Vec::new();
        let mut waiting = Arc::default();
        for (index, rank) in here.into_iter().flatten().enumerate() {
            let ranks = ranks();
            // Each is there until all ranks have voted that they have found the others, except in a group
            // that fails.
            let entry = places[rank.0 as usize].and_then(|place| ranks.get(&place.number));
            let Entry { device, waiting: theirs } = entry.ok_or(TransportError::Closed)?;
            found.push((*rank, device.clone()));
            if index == 0 {
                waiting = theirs.clone();
            }
        }
        group.agree(Vote::Ready { plan_hash: FOUND, note: Bytes::new() }, form_within).await?;
        drop(own);
        Ok(Some(Arc::new(Self {
            group: group.clone(),
            deadline,
            device: device.clone(),
            stream,
            staged: HostStaged::new(group.clone(), deadline),
            here: found,
            waiting,
            words: words(&groups, places.len()),
        })))
    }
}

/// The way of messages, for people.
pub(super) fn words(groups: &[Vec<Rank>], ranks: usize) -> String {
    let one = |group: &Vec<Rank>| {
        let ranks: Vec<String> = group.iter().map(ToString::to_string).collect();
        format!("ranks {}", ranks.join(", "))
    };
    let between: Vec<String> = groups.iter().map(one).collect();
    let rest = match groups {
        [all] if all.len() == ranks => "",
        _ => "; all other messages through host memory",
    };
    format!("copies from device to device between {}{rest}", between.join(", and between "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_ranks_of_one_process_with_cuda_devices_are_together() {
        let at = |process, number| Some(Place { process, number });
        let places = [at(7, 0), None, at(8, 0), at(7, 1), at(9, 0), at(8, 3), at(7, 4)];
        let groups = together(&places);
        assert_eq!(groups, [vec![Rank(0), Rank(3), Rank(6)], vec![Rank(2), Rank(5)]]);
        assert_eq!(
            words(&groups, places.len()),
            "copies from device to device between ranks 0, 3, 6, and between ranks 2, 5; all other messages through host memory"
        );
        assert_eq!(words(&[vec![Rank(0), Rank(1)]], 2), "copies from device to device between ranks 0, 1");
        assert!(together(&[at(1, 0), None, at(2, 0)]).is_empty());
        // A rank that names the place of another one has none, and takes it from the other.
        assert_eq!(together(&[at(1, 0), at(1, 1), at(1, 1), at(1, 2)]), [vec![Rank(0), Rank(3)]]);
    }

    #[test]
    fn a_place_is_read_back_and_anything_else_is_none() {
        let place = Place { process: 3, number: u64::MAX };
        assert_eq!(Place::decode(&place.encode()), Some(place));
        for note in [&b""[..], b"7", &[0; 15], &[0; 17]] {
            assert_eq!(Place::decode(note), None);
        }
    }
}
