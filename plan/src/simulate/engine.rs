//! The events of a run, in order of time: ranks start and end work, and messages start and end. All
//! users of a device or a link at one time get equal shares of it. No clock and no randomness: the
//! same input gives the same events.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::cluster::Cluster;
use super::events::{Activity, PredictedEvents, PredictedWork};
use super::network::Network;
use super::program::{Op, Program};
use super::share::{
    ChannelUse, Flow, LEAST_SPEED, Processor, RankState, RankTimes, Sender, Share, SharedChannel, Turns,
    ends, remove, whole_ns,
};
use crate::error::{Error, Result};

/// The result of a run.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) ranks: Vec<RankTimes>,
    pub(super) channels: Vec<ChannelUse>,
    /// Empty unless they were asked for.
    pub(super) events: PredictedEvents,
}

/// Plays `program` on `cluster`. With `keeps_events` the outcome has them.
pub(super) fn play(program: &Program, cluster: &Cluster, keeps_events: bool) -> Result<Outcome> {
    let mut network = Network::new(cluster);
    let mut flows = Vec::with_capacity(program.messages.len());
    for message in &program.messages {
        let devices = [message.from, message.to].map(|rank| program.ranks[rank].device);
        flows.push(Flow::new(message.bytes, devices, network.route(devices[0], devices[1])?));
    }
    let channels = network.channels.into_iter().map(|channel| SharedChannel {
        capacity: channel.capacity,
        active: Vec::new(),
        busy_since_ns: 0,
        used: ChannelUse { name: channel.name, ..ChannelUse::default() },
    });
    let mut engine = Engine {
        program,
        now_ns: 0,
        events: BinaryHeap::new(),
        sequence: 0,
        ranks: program.ranks.iter().map(|rank| RankState::new(rank.exchanges.len())).collect(),
        flows,
        channels: channels.collect(),
        processors: (0..cluster.device_count()).map(|_| Processor::default()).collect(),
        senders: (0..cluster.device_count()).map(|_| Sender::default()).collect(),
        turns: Turns::default(),
        dirty_channels: Vec::new(),
        dirty_processors: Vec::new(),
        dirty_senders: Vec::new(),
        shared_out: 0,
        kept: keeps_events.then(PredictedEvents::default),
    };
    for rank in 0..program.ranks.len() {
        engine.at(0, Event::Rank(rank));
    }
    engine.run()?;
    Ok(Outcome {
        ranks: engine.ranks.iter().map(|rank| rank.times).collect(),
        channels: engine.channels.into_iter().map(|channel| channel.used).collect(),
        events: engine.kept.unwrap_or_default(),
    })
}

struct Engine<'a> {
    program: &'a Program,
    now_ns: u64,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    sequence: u64,
    ranks: Vec<RankState>,
    flows: Vec<Flow>,
    channels: Vec<SharedChannel>,
    processors: Vec<Processor>,
    /// By device.
    senders: Vec<Sender>,
    turns: Turns,
    dirty_channels: Vec<usize>,
    dirty_processors: Vec<usize>,
    dirty_senders: Vec<usize>,
    /// The number of speed updates.
    shared_out: u64,
    kept: Option<PredictedEvents>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A rank issues its next steps.
    Rank(usize),
    /// A rank's computation has ended; valid only if its speed has not changed since.
    Computed(usize, u32),
    /// A message may move: both ends have posted it.
    Start(usize),
    /// The last byte of the device's next message, or of several, has left; valid only if no speed
    /// of its messages has changed since.
    Sent(usize, u32),
    /// A message has arrived.
    Arrived(usize),
}

impl Engine<'_> {
    fn run(&mut self) -> Result<()> {
        while let Some(Reverse((time_ns, _, event))) = self.events.pop() {
            self.now_ns = time_ns;
            self.happen(event);
            // All events of one moment change speeds once.
            if self.events.peek().is_none_or(|Reverse((next, _, _))| *next > time_ns) {
                self.share_out();
            }
        }
        match self.ranks.iter().position(|rank| !rank.done) {
            None => Ok(()),
            Some(rank) => Err(Error::plan(
                kyklos_rank::Rank(u32::try_from(rank).unwrap_or(u32::MAX)),
                None,
                "the rank waits for ever for a message that no rank sends",
            )),
        }
    }

    fn at(&mut self, time_ns: u64, event: Event) {
        self.sequence += 1;
        self.events.push(Reverse((time_ns, self.sequence, event)));
    }

    fn after(&mut self, ns: f64, event: Event) {
        self.at(self.now_ns + whole_ns(ns), event);
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Rank(rank) => self.go_on(rank),
            Event::Computed(rank, version) => {
                let state = &mut self.ranks[rank];
                if state.job_version == version {
                    state.job_version += 1;
                    state.times.compute_ns += self.now_ns - state.job_since_ns;
                    let since_ns = state.job_since_ns;
                    self.keep(rank, Activity::Compute, None, since_ns);
                    let device = self.program.ranks[rank].device;
                    remove(&mut self.processors[device].jobs, rank);
                    self.dirty_processors.push(device);
                    self.go_on(rank);
                }
            }
            Event::Start(flow) => {
                if self.turns.wait(&self.program.messages[flow], flow) {
                    self.start(flow);
                }
            }
            Event::Sent(sender, version) => {
                if self.senders[sender].version == version {
                    let over = |flow: &usize| self.flows[*flow].share.end_ns <= self.now_ns;
                    let flows: Vec<usize> = self.senders[sender].flows.iter().copied().filter(over).collect();
                    for flow in flows {
                        self.sent(flow);
                    }
                }
            }
            Event::Arrived(flow) => {
                let message = self.program.messages[flow];
                let ns = self.flows[flow].started_ns..self.now_ns;
                self.kept.iter_mut().for_each(|kept| kept.message(&message, ns.clone()));
                self.arrived(message.from, message.exchanges[0], message.to);
                self.arrived(message.to, message.exchanges[1], message.from);
            }
        }
    }

    /// Issues a rank's steps until one takes time.
    fn go_on(&mut self, rank: usize) {
        let program = &self.program.ranks[rank];
        while let Some(op) = program.ops.get(self.ranks[rank].op) {
            self.ranks[rank].op += 1;
            match *op {
                Op::Compute(ns) => {
                    let state = &mut self.ranks[rank];
                    state.job = Share::new(ns, self.now_ns);
                    state.job_version += 1;
                    state.job_since_ns = self.now_ns;
                    self.processors[program.device].jobs.push(rank);
                    self.dirty_processors.push(program.device);
                    return;
                }
                Op::Copy(ns) => return self.copy(rank, ns),
                Op::Post(exchange) => {
                    let ns = self.post(rank, exchange);
                    if ns > 0.0 {
                        return self.copy(rank, ns);
                    }
                }
                Op::Wait(exchange) => {
                    if self.ranks[rank].open[exchange] > 0 {
                        self.ranks[rank].waiting = Some((exchange, self.now_ns));
                        return;
                    }
                    let ns = program.exchanges[exchange].stage_in_ns;
                    if ns > 0.0 {
                        return self.copy(rank, ns);
                    }
                }
            }
        }
        let state = &mut self.ranks[rank];
        (state.done, state.times.end_ns) = (true, self.now_ns);
    }

    /// Keeps what ends now, if events are kept.
    fn keep(&mut self, rank: usize, activity: Activity, peer: Option<usize>, start_ns: u64) {
        if let Some(kept) = &mut self.kept {
            kept.work.push(PredictedWork { rank, activity, peer, start_ns, end_ns: self.now_ns });
        }
    }

    fn copy(&mut self, rank: usize, ns: f64) {
        let ends_ns = self.now_ns + whole_ns(ns);
        self.kept.iter_mut().for_each(|kept| kept.copy(rank, self.now_ns..ends_ns));
        self.ranks[rank].times.copy_ns += whole_ns(ns);
        self.after(ns, Event::Rank(rank));
    }

    /// Posts an exchange. Returns the time that this takes the rank: messages leave one after the
    /// other.
    fn post(&mut self, rank: usize, exchange: usize) -> f64 {
        let posted = &self.program.ranks[rank].exchanges[exchange];
        self.ranks[rank].open[exchange] = posted.sends.len() + posted.recvs.len();
        for flow in &posted.recvs {
            self.ready(*flow, 1, self.now_ns);
        }
        let mut ns = posted.stage_out_ns;
        for flow in &posted.sends {
            ns += self.flows[*flow].route.message_ns;
            self.ready(*flow, 0, self.now_ns + whole_ns(ns));
        }
        ns
    }

    /// One end of a message has posted it. The receiver sends a request first, and the request
    /// takes the link's latency.
    fn ready(&mut self, flow: usize, end: usize, time_ns: u64) {
        self.flows[flow].posted[end] = Some(time_ns);
        if let [Some(sender), Some(receiver)] = self.flows[flow].posted {
            let asked = receiver + whole_ns(self.flows[flow].route.latency_ns);
            self.at(sender.max(asked).max(self.now_ns), Event::Start(flow));
        }
    }

    fn start(&mut self, flow: usize) {
        let Flow { bytes, devices, route, share, started_ns, .. } = &mut self.flows[flow];
        *started_ns = self.now_ns;
        #[expect(clippy::cast_precision_loss, reason = "bytes of a message are far below 2^52")]
        let left = *bytes as f64;
        *share = Share::new(left, self.now_ns);
        self.senders[devices[0]].flows.push(flow);
        for channel in &route.channels {
            let shared = &mut self.channels[*channel];
            if shared.active.is_empty() {
                shared.busy_since_ns = self.now_ns;
            }
            shared.active.push(flow);
            shared.used.bytes += *bytes;
            self.dirty_channels.push(*channel);
        }
        if route.host_ns_per_byte > 0.0 {
            for device in ends(*devices) {
                self.processors[device].flows.push(flow);
                self.dirty_processors.push(device);
            }
        }
    }

    fn sent(&mut self, flow: usize) {
        let Flow { devices, route, .. } = &self.flows[flow];
        let latency_ns = route.latency_ns;
        remove(&mut self.senders[devices[0]].flows, flow);
        self.dirty_senders.push(devices[0]);
        for channel in &route.channels {
            let shared = &mut self.channels[*channel];
            remove(&mut shared.active, flow);
            if shared.active.is_empty() {
                shared.used.busy_ns += self.now_ns - shared.busy_since_ns;
            }
            self.dirty_channels.push(*channel);
        }
        if route.host_ns_per_byte > 0.0 {
            for device in ends(*devices) {
                remove(&mut self.processors[device].flows, flow);
                self.dirty_processors.push(device);
            }
        }
        self.after(latency_ns, Event::Arrived(flow));
        if let Some(next) = self.turns.next(&self.program.messages[flow]) {
            self.start(next);
        }
    }

    /// A message of `exchange` with `peer` is complete for one of its ends.
    fn arrived(&mut self, rank: usize, exchange: usize, peer: usize) {
        let state = &mut self.ranks[rank];
        state.open[exchange] -= 1;
        if let Some((waited, since_ns)) = state.waiting
            && waited == exchange
            && state.open[exchange] == 0
        {
            state.waiting = None;
            state.times.wait_ns += self.now_ns - since_ns;
            self.keep(rank, Activity::Wait, Some(peer), since_ns);
            let ns = self.program.ranks[rank].exchanges[exchange].stage_in_ns;
            if ns > 0.0 { self.copy(rank, ns) } else { self.go_on(rank) }
        }
    }

    /// Sets new speeds for ranks and messages that share a device or a link with a rank or a
    /// message that has started or ended.
    fn share_out(&mut self) {
        self.shared_out += 1;
        let mut processors = std::mem::take(&mut self.dirty_processors);
        let mut senders = std::mem::take(&mut self.dirty_senders);
        let mut channels = std::mem::take(&mut self.dirty_channels);
        channels.sort_unstable();
        channels.dedup();
        let on_channels = channels.iter().flat_map(|channel| &self.channels[*channel].active);
        let carried = processors.iter().flat_map(|processor| &self.processors[*processor].flows);
        let mut flows: Vec<usize> = Vec::new();
        for flow in on_channels.chain(carried).copied() {
            let looked_at = std::mem::replace(&mut self.flows[flow].shared_out, self.shared_out);
            if looked_at != self.shared_out {
                flows.push(flow);
            }
        }
        for flow in flows {
            let speed = self.flows[flow].speed(&self.channels, &self.processors);
            let Flow { share, devices, route, .. } = &mut self.flows[flow];
            if route.host_ns_per_byte > 0.0 {
                processors.extend(*devices);
            }
            if share.set(speed, self.now_ns) {
                senders.push(devices[0]);
            }
        }
        senders.sort_unstable();
        senders.dedup();
        for sender in senders {
            let Sender { flows, version } = &mut self.senders[sender];
            *version += 1;
            let version = *version;
            if let Some(end_ns) = flows.iter().map(|flow| self.flows[*flow].share.end_ns).min() {
                self.at(end_ns, Event::Sent(sender, version));
            }
        }
        processors.sort_unstable();
        processors.dedup();
        for processor in processors {
            let Processor { jobs, flows } = &self.processors[processor];
            let carried: f64 = flows
                .iter()
                .map(|flow| &self.flows[*flow])
                .map(|flow| flow.share.speed * flow.load_on(processor))
                .sum();
            #[expect(clippy::cast_precision_loss, reason = "ranks of one device")]
            let speed = (1.0 - carried).max(LEAST_SPEED) / jobs.len() as f64;
            for rank in jobs.clone() {
                let state = &mut self.ranks[rank];
                if state.job.set(speed, self.now_ns) {
                    state.job_version += 1;
                    let (end_ns, version) = (state.job.end_ns, state.job_version);
                    self.at(end_ns, Event::Computed(rank, version));
                }
            }
        }
    }
}
