//! Which ranks of a group exchange their messages by NCCL.

use kyklos::bytes::Bytes;
use kyklos_transport::{MAX_NOTE_BYTES, Rank};

use super::library::NcclVersion;

/// Ranks that exchange messages with each other by NCCL: those of one
/// [`NcclOptions::cluster`](super::NcclOptions::cluster) with one version of NCCL. They have a
/// communicator. Messages between two islands go through the host.
///
/// ```
/// use kyklos_cuda::{NcclIsland, NcclVersion};
/// use kyklos_transport::Rank;
///
/// let version = NcclVersion { major: 2, minor: 28, patch: 9 };
/// let island = NcclIsland { ranks: vec![Rank(0), Rank(2)], version };
/// assert_eq!(island.to_string(), "NCCL 2.28.9 between ranks 0, 2");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NcclIsland {
    /// In order. A rank's place here is its number in the communicator.
    pub ranks: Vec<Rank>,
    /// The version of their NCCL.
    pub version: NcclVersion,
}

impl std::fmt::Display for NcclIsland {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ranks: Vec<_> = self.ranks.iter().map(ToString::to_string).collect();
        write!(f, "NCCL {} between ranks {}", self.version, ranks.join(", "))
    }
}

impl NcclIsland {
    /// The number of `rank` in the communicator.
    pub(super) fn number(&self, rank: Rank) -> Option<u32> {
        let place = self.ranks.binary_search(&rank).ok()?;
        Some(u32::try_from(place).expect("ranks are numbered in u32"))
    }
}

/// Why a rank does not use NCCL: the same on all of them.
///
/// ```
/// use kyklos_cuda::NcclRefusal;
///
/// let why = "its device is AVX-512, not a CUDA device".to_owned();
/// let refusal = NcclRefusal { rank: 1, why, has_failed: false };
/// assert_eq!(refusal.to_string(), "NCCL is not used: rank 1: its device is AVX-512, not a CUDA device");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NcclRefusal {
    /// The rank that cannot use it, or the lowest of them.
    pub rank: u32,
    /// The reason of that rank.
    pub why: String,
    /// It could have: NCCL has failed, so that another attempt may end otherwise.
    pub has_failed: bool,
}

impl std::fmt::Display for NcclRefusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "NCCL is not used: rank {}: {}", self.rank, self.why)
    }
}

impl std::error::Error for NcclRefusal {}

impl NcclRefusal {
    pub(super) fn of(rank: Rank, why: impl Into<String>) -> Self {
        Self { rank: rank.0, why: why.into(), has_failed: false }
    }

    pub(super) fn failed(rank: Rank, why: impl Into<String>) -> Self {
        Self { has_failed: true, ..Self::of(rank, why) }
    }
}

/// What a rank has, as it tells the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Offer {
    Has { version: NcclVersion, cluster: u32 },
    Lacks(String),
}

/// The islands of a group, in the order of their first ranks, and the ranks in none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Islands {
    pub(super) islands: Vec<NcclIsland>,
    pub(super) outside: Vec<NcclRefusal>,
}

impl Islands {
    /// The islands that `offers`, one of each rank, allow.
    pub(super) fn of(offers: &[Offer]) -> Self {
        let mut found: Vec<(u32, NcclIsland)> = Vec::new();
        let mut outside = Vec::new();
        for (rank, offer) in (0..).map(Rank).zip(offers) {
            match offer {
                Offer::Lacks(why) => outside.push(NcclRefusal::of(rank, why)),
                Offer::Has { version, cluster } => {
                    let same =
                        found.iter_mut().find(|(of, island)| (*of, island.version) == (*cluster, *version));
                    match same {
                        Some((_, island)) => island.ranks.push(rank),
                        None => found.push((*cluster, NcclIsland { ranks: vec![rank], version: *version })),
                    }
                }
            }
        }
        let mut islands = Vec::new();
        for (cluster, island) in found {
            // A group of one rank sends nothing. It may use NCCL as well.
            if island.ranks.len() > 1 || offers.len() == 1 {
                islands.push(island);
            } else {
                let why = format!("no other rank of cluster {cluster} has NCCL {}", island.version);
                outside.push(NcclRefusal::of(island.ranks[0], why));
            }
        }
        outside.sort_by_key(|refusal| refusal.rank);
        Self { islands, outside }
    }

    /// The lowest rank that is not with rank 0, if there is one.
    pub(super) fn gap(offers: &[Offer]) -> Option<NcclRefusal> {
        let mut first = None;
        (0..).map(Rank).zip(offers).find_map(|(rank, offer)| match offer {
            Offer::Lacks(why) => Some(NcclRefusal::of(rank, why)),
            Offer::Has { version, cluster } => {
                let (of_first, in_first) = *first.get_or_insert((*version, *cluster));
                let why = if *cluster != in_first {
                    format!("it is in cluster {cluster}, and rank 0 in cluster {in_first}")
                } else if *version != of_first {
                    format!("its NCCL is {version}, and that of rank 0 is {of_first}")
                } else {
                    return None;
                };
                Some(NcclRefusal::of(rank, why))
            }
        })
    }

    /// The island of a rank.
    pub(super) fn with(&self, rank: Rank) -> Option<&NcclIsland> {
        self.islands.iter().find(|island| island.number(rank).is_some())
    }
}

/// The first byte of an offer.
const LACKS: u8 = 0;
const HAS: u8 = 1;

impl Offer {
    pub(super) fn encode(&self) -> Bytes {
        match self {
            Self::Lacks(why) => [&[LACKS][..], &shortened(why)].concat().into(),
            Self::Has { version: NcclVersion { major, minor, patch }, cluster } => {
                let mut note = vec![HAS];
                [major, minor, patch, cluster].iter().for_each(|number| note.extend(number.to_le_bytes()));
                note.into()
            }
        }
    }

    /// The offer of a note. One that this release does not know is none of NCCL.
    pub(super) fn decode(note: &[u8]) -> Self {
        let unknown = || Self::Lacks("its offer has a form that this release does not know".to_owned());
        match note.split_first() {
            Some((&LACKS, why)) => Self::Lacks(String::from_utf8_lossy(why).into_owned()),
            Some((&HAS, numbers)) => match numbers.as_chunks::<4>() {
                ([major, minor, patch, cluster], []) => {
                    let [major, minor, patch, cluster] =
                        [major, minor, patch, cluster].map(|bytes| u32::from_le_bytes(*bytes));
                    Self::Has { version: NcclVersion { major, minor, patch }, cluster }
                }
                _ => unknown(),
            },
            _ => unknown(),
        }
    }
}

/// As much of a reason as fits into a note.
pub(super) fn shortened(why: &str) -> Bytes {
    let end = (0..MAX_NOTE_BYTES).rev().find(|end| why.is_char_boundary(*end)).unwrap_or(0);
    Bytes::copy_from_slice(&why.as_bytes()[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    const VERSION: NcclVersion = NcclVersion { major: 2, minor: 28, patch: 9 };
    const OLDER: NcclVersion = NcclVersion { minor: 27, ..VERSION };

    fn has(version: NcclVersion, cluster: u32) -> Offer {
        Offer::Has { version, cluster }
    }

    fn lacks(why: &str) -> Offer {
        Offer::Lacks(why.to_owned())
    }

    #[test]
    fn offers_come_back_as_they_were_sent() {
        for offer in [has(VERSION, 7), has(OLDER, 0), lacks("none")] {
            assert_eq!(Offer::decode(&offer.encode()), offer);
        }
        let note = lacks(&("no library ".repeat(200) + "é")).encode();
        assert!(note.len() <= MAX_NOTE_BYTES);
        assert!(matches!(Offer::decode(&note), Offer::Lacks(why) if why.starts_with("no library no")));
        for wrong in [&[][..], &[9, 1], &[HAS, 1, 2], &[HAS; 16], &[HAS; 18], &[HAS; 200]] {
            assert!(matches!(Offer::decode(wrong), Offer::Lacks(why) if why.contains("form")), "{wrong:?}");
        }
    }

    #[test]
    fn ranks_of_one_cluster_and_version_are_an_island() {
        let offers = [
            has(VERSION, 0),
            lacks("its device is Fake CPU"),
            has(OLDER, 0),
            has(VERSION, 5),
            has(VERSION, 0),
            has(VERSION, 5),
        ];
        let Islands { islands, outside } = Islands::of(&offers);
        let ranks: Vec<_> = islands.iter().map(|island| island.ranks.as_slice()).collect();
        assert_eq!(ranks, [[Rank(0), Rank(4)], [Rank(3), Rank(5)]]);
        assert_eq!(islands[1].number(Rank(5)), Some(1));
        assert_eq!(islands[1].number(Rank(4)), None);
        let outside: Vec<_> = outside.iter().map(|refusal| (refusal.rank, refusal.why.as_str())).collect();
        assert_eq!(
            outside,
            [(1, "its device is Fake CPU"), (2, "no other rank of cluster 0 has NCCL 2.27.9")]
        );
        assert_eq!(Islands::of(&[has(VERSION, 0)]).islands.len(), 1);
        assert_eq!(Islands::of(&[has(VERSION, 0), has(VERSION, 1)]).islands, []);
    }

    #[test]
    fn the_lowest_rank_that_is_not_with_rank_0_is_named() {
        let gap = |offers: &[Offer]| Islands::gap(offers).map(|refusal| (refusal.rank, refusal.why));
        assert_eq!(gap(&[has(VERSION, 3), has(VERSION, 3)]), None);
        assert_eq!(
            gap(&[has(VERSION, 0), has(OLDER, 0), lacks("none")]),
            Some((1, "its NCCL is 2.27.9, and that of rank 0 is 2.28.9".to_owned()))
        );
        assert_eq!(
            gap(&[has(VERSION, 0), has(OLDER, 2)]),
            Some((1, "it is in cluster 2, and rank 0 in cluster 0".to_owned()))
        );
        assert_eq!(gap(&[lacks("none"), has(VERSION, 0)]), Some((0, "none".to_owned())));
    }
}
