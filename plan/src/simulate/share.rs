//! Ranks and messages that share devices and links, and their speeds: equal shares. Of the messages
//! from one rank to another one moves at a time.

use std::collections::{HashMap, VecDeque};

use super::network::Route;
use super::program::Message;

/// An amount of work that is done at a changing speed.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Share {
    left: f64,
    pub(super) speed: f64,
    since_ns: u64,
    /// The end of the work, at this speed.
    pub(super) end_ns: u64,
}

/// A message in flight.
pub(super) struct Flow {
    pub(super) bytes: u64,
    pub(super) devices: [usize; 2],
    pub(super) route: Route,
    /// The times at which its sender and its receiver posted it.
    pub(super) posted: [Option<u64>; 2],
    pub(super) share: Share,
    /// When its first byte left.
    pub(super) started_ns: u64,
    /// The number of the last update of speeds that visited it.
    pub(super) shared_out: u64,
}

/// The messages in flight from a device. There is one event for the message that ends next, not one
/// for each message: every message that starts or ends changes the speed of all others on its
/// links.
#[derive(Default)]
pub(super) struct Sender {
    pub(super) flows: Vec<usize>,
    pub(super) version: u32,
}

/// Messages of at most so many bytes do not wait for others over QUIC.
const SMALL_BYTES: u64 = 64 << 10;

/// Messages from one rank to another leave one after the other, as over QUIC, through shared memory
/// and by NCCL: those that have not left, the first one first.
#[derive(Default)]
pub(super) struct Turns(HashMap<(usize, usize), VecDeque<usize>>);

impl Turns {
    /// A message queues. Returns whether it is its turn. Small ones do not queue.
    pub(super) fn wait(&mut self, message: &Message, flow: usize) -> bool {
        if message.bytes <= SMALL_BYTES {
            return true;
        }
        let queue = self.0.entry((message.from, message.to)).or_default();
        queue.push_back(flow);
        queue.len() == 1
    }

    /// `message`, whose turn it was, has left. Returns the next one.
    pub(super) fn next(&mut self, message: &Message) -> Option<usize> {
        if message.bytes <= SMALL_BYTES {
            return None;
        }
        let queue = self.0.get_mut(&(message.from, message.to))?;
        queue.pop_front();
        queue.front().copied()
    }
}

/// Sums over one rank's timeline.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RankTimes {
    pub(super) end_ns: u64,
    pub(super) compute_ns: u64,
    pub(super) copy_ns: u64,
    pub(super) wait_ns: u64,
}

/// A rank on its way through its program.
pub(super) struct RankState {
    pub(super) op: usize,
    pub(super) times: RankTimes,
    /// Messages of each exchange that have not arrived.
    pub(super) open: Vec<usize>,
    /// The exchange on which the rank waits, and the start of the wait.
    pub(super) waiting: Option<(usize, u64)>,
    pub(super) job: Share,
    pub(super) job_version: u32,
    pub(super) job_since_ns: u64,
    pub(super) done: bool,
}

impl RankState {
    pub(super) fn new(exchanges: usize) -> Self {
        Self {
            op: 0,
            times: RankTimes::default(),
            open: vec![0; exchanges],
            waiting: None,
            job: Share::default(),
            job_version: 0,
            job_since_ns: 0,
            done: false,
        }
    }
}

/// The load of one direction of a link.
#[derive(Clone, Debug, Default)]
pub(super) struct ChannelUse {
    pub(super) name: String,
    pub(super) bytes: u64,
    pub(super) busy_ns: u64,
}

/// One direction of a link, and the messages on it.
pub(super) struct SharedChannel {
    pub(super) capacity: f64,
    pub(super) active: Vec<usize>,
    pub(super) busy_since_ns: u64,
    pub(super) used: ChannelUse,
}

/// A device, and its users: ranks that compute, and messages that the device carries itself.
#[derive(Default)]
pub(super) struct Processor {
    pub(super) jobs: Vec<usize>,
    pub(super) flows: Vec<usize>,
}

impl Flow {
    pub(super) fn new(bytes: u64, devices: [usize; 2], route: Route) -> Self {
        Self {
            bytes,
            devices,
            route,
            posted: [None; 2],
            share: Share::default(),
            started_ns: 0,
            shared_out: 0,
        }
    }

    /// Compute nanoseconds of `device` for each byte: twice as many if the device is both ends.
    pub(super) fn load_on(&self, device: usize) -> f64 {
        let ends = self.devices.iter().filter(|end| **end == device).count();
        self.route.host_ns_per_byte * if ends > 1 { 2.0 } else { 1.0 }
    }

    /// Bytes in a nanosecond: the least of its shares of the channels that it crosses. A device
    /// that carries messages itself gives each message at most the share of a rank that
    /// computes there.
    #[expect(clippy::cast_precision_loss, reason = "messages of one moment")]
    pub(super) fn speed(&self, channels: &[SharedChannel], processors: &[Processor]) -> f64 {
        let Self { devices, route, .. } = self;
        let mut speed = f64::INFINITY;
        for channel in &route.channels {
            let channel = &channels[*channel];
            speed = speed.min(channel.capacity / channel.active.len() as f64);
        }
        if route.host_ns_per_byte > 0.0 {
            for device in devices {
                let Processor { jobs, flows } = &processors[*device];
                speed = speed.min(1.0 / (self.load_on(*device) * (jobs.len() + flows.len()) as f64));
            }
        }
        speed
    }
}

impl Share {
    pub(super) fn new(left: f64, now_ns: u64) -> Self {
        Self { left, speed: 0.0, since_ns: now_ns, end_ns: u64::MAX }
    }

    /// Continues at another speed. Returns whether the speed has changed.
    #[expect(clippy::cast_precision_loss, reason = "a run is far shorter than 2^52 ns, which is 52 days")]
    pub(super) fn set(&mut self, speed: f64, now_ns: u64) -> bool {
        if speed.to_bits() == self.speed.to_bits() {
            return false;
        }
        self.left = (self.left - self.speed * (now_ns - self.since_ns) as f64).max(0.0);
        (self.speed, self.since_ns) = (speed, now_ns);
        self.end_ns = now_ns + whole_ns(self.left / speed);
        true
    }
}

/// The devices at both ends, once where they are the same.
pub(super) fn ends([from, to]: [usize; 2]) -> impl Iterator<Item = usize> {
    std::iter::once(from).chain((from != to).then_some(to))
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "times are not negative, and end"
)]
pub(super) fn whole_ns(ns: f64) -> u64 {
    ns.ceil() as u64
}

/// The least share of a rank on a device that is busy with messages, so that the rank's computation
/// ends.
pub(super) const LEAST_SPEED: f64 = 1e-3;

/// Removes `one` from a list without keeping its order.
pub(super) fn remove(list: &mut Vec<usize>, one: usize) {
    if let Some(place) = list.iter().position(|other| *other == one) {
        list.swap_remove(place);
    }
}
