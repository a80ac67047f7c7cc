//! The accidents of a soak, and the seeded choices.

use std::time::Duration;

use crate::rank::Link;

/// The accident of one rank of a group.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Accident {
    Nothing,
    /// Strangers send packets to rank 0 while the group forms and works, and open streams where it
    /// has some.
    Flooded,
    /// Every link has 20 Mbit/s.
    Slow,
    /// No packet reaches the rank for seconds, over links between data centres.
    Outage {
        step: usize,
        during: Duration,
    },
    /// A router between the rank, which is the last one, and rank 0 gives it another port before a
    /// step. Only over UDP.
    Rebound {
        step: usize,
    },
    /// Killed before a step.
    Killed {
        step: usize,
    },
    /// Killed some time after its order: perhaps before the group forms, perhaps after its end.
    KilledAnyTime {
        after: Duration,
    },
    /// Stopped before a step. Continues before its peers regard it as dead.
    Stopped {
        step: usize,
        during: Duration,
    },
    /// Stopped before a step until all other ranks have ended.
    StoppedForLong {
        step: usize,
    },
    /// No packet reaches the rank for a short time.
    CutOff {
        step: usize,
        during: Duration,
    },
    /// No packet reaches the rank until all ranks have ended.
    CutOffForLong {
        step: usize,
    },
}

impl Accident {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Nothing => "none",
            Self::Flooded => "flooded",
            Self::Slow => "slow links",
            Self::Outage { .. } => "cut off for seconds (wan)",
            Self::Rebound { .. } => "another address",
            Self::Killed { .. } => "killed at a step",
            Self::KilledAnyTime { .. } => "killed at any time",
            Self::Stopped { .. } => "stopped for a moment",
            Self::StoppedForLong { .. } => "stopped for long",
            Self::CutOff { .. } => "cut off for a moment",
            Self::CutOffForLong { .. } => "cut off for long",
        }
    }

    pub(crate) fn step(self) -> Option<usize> {
        match self {
            Self::Nothing | Self::Flooded | Self::Slow | Self::KilledAnyTime { .. } => None,
            Self::Killed { step }
            | Self::Rebound { step }
            | Self::Stopped { step, .. }
            | Self::StoppedForLong { step }
            | Self::CutOff { step, .. }
            | Self::Outage { step, .. }
            | Self::CutOffForLong { step } => Some(step),
        }
    }

    /// Whether no rank may fail because of this accident.
    pub(crate) fn is_harmless(self) -> bool {
        !matches!(
            self,
            Self::Killed { .. }
                | Self::KilledAnyTime { .. }
                | Self::StoppedForLong { .. }
                | Self::CutOffForLong { .. }
        )
    }

    /// Whether it changes routes or queues, which a test may do in its own network namespace only.
    pub(crate) fn changes_the_network(self) -> bool {
        matches!(self, Self::Slow | Self::Outage { .. } | Self::CutOff { .. } | Self::CutOffForLong { .. })
    }
}

/// `SplitMix64`: all choices of a soak.
pub(crate) struct Chance(pub(crate) u64);

impl Chance {
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % end
    }

    pub(crate) fn accident(&mut self, steps: usize) -> Accident {
        let step = self.below(steps as u64) as usize;
        let moment = Duration::from_millis(100 + self.below(1100));
        match self.below(18) {
            0 | 1 => Accident::Nothing,
            2 | 12 => Accident::Flooded,
            13 => Accident::Slow,
            14 => Accident::Outage { step, during: Duration::from_millis(2000 + self.below(8000)) },
            3 | 4 => Accident::Killed { step },
            5 => Accident::KilledAnyTime { after: moment / 2 },
            6 | 7 => Accident::Stopped { step, during: moment },
            8 => Accident::StoppedForLong { step },
            15 | 16 => Accident::Rebound { step },
            9 | 10 => Accident::CutOff { step, during: moment },
            _ => Accident::CutOffForLong { step },
        }
    }

    /// The links of a group with this accident. Over TCP a cut rank may be silent for longer than
    /// the cut.
    pub(crate) fn link(&mut self, accident: Accident) -> Link {
        match accident {
            Accident::Outage { .. } => Link::Wan,
            Accident::Rebound { .. } if self.below(2) == 0 => Link::Wan,
            Accident::Rebound { .. } => Link::Lan,
            Accident::CutOff { .. } | Accident::CutOffForLong { .. } => Link::Lan,
            _ if self.below(3) == 0 => Link::Tcp,
            _ => Link::Lan,
        }
    }
}
