//! The times by which a rank judges its links: one table, with a row for each kind of link.

use std::fmt;
use std::time::Duration;

/// The kind of the links between the ranks; must be the same on all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LinkProfile {
    /// Links within a data centre: a dead rank is found after 2.4 s.
    #[default]
    Lan,
    /// Links between data centres: an outage of 10 s ends nothing, and a dead rank is found after
    /// 15 s.
    Wan,
}

impl fmt::Display for LinkProfile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Lan => "lan",
            Self::Wan => "wan",
        })
    }
}

/// A row of the table.
struct Row {
    heartbeat: Duration,
    /// A rank counts as dead after so much silence, or after [`LEAST_TICKS`] heartbeats if that is
    /// longer.
    silence: Duration,
    idle: Duration,
    dial: Duration,
    handshake: Duration,
    initial_round_trip: Duration,
    attempt: Duration,
    stream_dial: Duration,
    stream_stall: Option<Duration>,
}

const LAN: Row = Row {
    heartbeat: Duration::from_millis(200),
    silence: Duration::ZERO,
    idle: Duration::from_secs(5),
    dial: Duration::from_secs(4),
    handshake: Duration::from_secs(5),
    initial_round_trip: Duration::from_millis(50),
    attempt: Duration::from_secs(10),
    stream_dial: Duration::from_secs(4),
    stream_stall: None,
};

/// After an outage of 10 s the next heartbeat comes within half a second, over TCP within two (a
/// SYN is sent again after one second), and needs some round trips. QUIC sends data again after
/// twice the outage at the latest: its pauses double.
const WAN: Row = Row {
    heartbeat: Duration::from_millis(500),
    silence: Duration::from_secs(15),
    idle: Duration::from_secs(25),
    dial: Duration::from_secs(10),
    handshake: Duration::from_secs(10),
    initial_round_trip: Duration::from_millis(300),
    attempt: Duration::from_secs(40),
    stream_dial: Duration::from_millis(2500),
    stream_stall: Some(Duration::from_secs(3)),
};

/// The times of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Timing {
    /// Period of heartbeats.
    pub(crate) heartbeat: Duration,
    /// Heartbeats that may stay out before a rank on a short path counts as dead.
    silent_ticks: u32,
    /// How long a connection may be without any packet. Two ranks use the lower of their values.
    pub(crate) idle: Duration,
    /// How long one attempt at a handshake may take before the next one.
    pub(crate) dial: Duration,
    /// How long the dialled side waits for a handshake, and again for the hello after it.
    pub(crate) handshake: Duration,
    /// Of forming a group again: from the list of members to the start of the group.
    pub(crate) attempt: Duration,
    /// For how long survivors are waited for that may have something else to do, or have not
    /// noticed yet: longer than the silence after which a rank counts as dead.
    pub(crate) settle: Duration,
    /// The same for an attempt after the first one.
    pub(crate) settle_again: Duration,
}

impl Timing {
    /// The times of links of this kind, with the heartbeats of the kind or with others.
    pub(crate) fn new(profile: LinkProfile, heartbeat: Option<Duration>) -> Self {
        let row = profile.row();
        let heartbeat = heartbeat.unwrap_or(row.heartbeat);
        let least = row.silence.as_nanos().div_ceil(heartbeat.as_nanos().max(1));
        let silent_ticks = u32::try_from(least).unwrap_or(u32::MAX).max(LEAST_TICKS);
        let silence = heartbeat.saturating_mul(silent_ticks);
        Self {
            heartbeat,
            silent_ticks,
            // Half as long again as the silence after which a rank counts as dead: heartbeats notice that
            // first, and unlike this clock they do not count the time in which this rank itself
            // stood still.
            idle: (silence.saturating_mul(3) / 2).max(row.idle),
            dial: row.dial,
            handshake: row.handshake,
            attempt: row.attempt,
            settle: silence.saturating_mul(2),
            settle_again: silence.saturating_mul(2) / 3,
        }
    }

    /// Heartbeats that may stay out before a rank counts as dead whose packets take so long there
    /// and back.
    ///
    /// Counted in this rank's own ticks, not in time: a rank whose own I/O thread did not run for a
    /// while has not listened, and must not conclude anything from silence.
    pub(crate) fn silent_ticks(&self, round_trip: Duration) -> u32 {
        let late = round_trip.min(LONGEST_ROUND_TRIP) * LATE_ROUND_TRIPS;
        let late = late.as_nanos() / self.heartbeat.as_nanos().max(1);
        self.silent_ticks.saturating_add(u32::try_from(late).unwrap_or(u32::MAX))
    }
}

impl LinkProfile {
    fn row(self) -> &'static Row {
        match self {
            Self::Lan => &LAN,
            Self::Wan => &WAN,
        }
    }

    /// The round trip of a connection that has not measured it yet: packets that are not
    /// acknowledged by then are sent again.
    pub(crate) fn initial_round_trip(self) -> Duration {
        self.row().initial_round_trip
    }

    /// How long an attempt at a TCP stream may take. The system repeats it after one second and
    /// after three.
    pub(crate) fn stream_dial(self) -> Duration {
        self.row().stream_dial
    }

    /// A TCP stream whose bytes are not acknowledged for so long is opened anew: after an outage
    /// the system would wait as long again.
    #[cfg_attr(
        not(any(target_os = "linux", target_os = "android")),
        expect(dead_code, reason = "no other system has such a limit")
    )]
    pub(crate) fn stream_stall(self) -> Option<Duration> {
        self.row().stream_stall
    }
}

/// Heartbeats that may stay out at the least.
const LEAST_TICKS: u32 = 12;

/// On a long path, a heartbeat that was lost is late by a round trip and a half, and each further
/// loss takes twice as long.
const LATE_ROUND_TRIPS: u32 = 8;

/// Longer round trips are queues, or a peer that delays its answers.
const LONGEST_ROUND_TRIP: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dead_rank_is_found_within_the_limit_of_the_profile_and_an_outage_below_it_ends_nothing() {
        let ms = Duration::from_millis;
        let found = |profile, heartbeat: Option<u64>, round_trip| {
            let timing = Timing::new(profile, heartbeat.map(ms));
            assert!(timing.settle > timing.heartbeat * timing.silent_ticks(ms(0)));
            assert!(timing.idle > timing.heartbeat * timing.silent_ticks(ms(0)));
            (timing.heartbeat * timing.silent_ticks(ms(round_trip))).as_millis()
        };
        let (lan, wan) = (LinkProfile::Lan, LinkProfile::Wan);
        assert_eq!(found(lan, None, 0), 2400);
        assert_eq!(found(lan, None, 24), 2400);
        assert_eq!(found(lan, None, 600), 7200);
        assert_eq!(found(lan, Some(1000), 0), 12_000);
        assert_eq!(found(lan, Some(50), 0), 600);
        assert_eq!(found(wan, None, 0), 15_000);
        assert_eq!(found(wan, None, 600), 19_500);
        assert_eq!(found(wan, None, 60_000), 23_000);
        assert_eq!(found(wan, Some(100), 0), 15_000);
        assert_eq!(found(wan, Some(2000), 0), 24_000);
        // The settings of earlier versions.
        let timing = Timing::new(lan, None);
        assert_eq!((timing.idle, timing.settle, timing.settle_again), (ms(5000), ms(4800), ms(1600)));
        let timing = Timing::new(lan, Some(ms(1000)));
        assert_eq!((timing.idle, timing.settle, timing.settle_again), (ms(18_000), ms(24_000), ms(8000)));
    }
}
