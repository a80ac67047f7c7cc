//! The work of one rank: the cells that rank 0 names, one after the other.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use kyklos::backend::{Backend, Device, DeviceClass};
use kyklos::collect::RowTensors;
use kyklos::plan::ProvedPlans;
use kyklos::{Error, LoweredPlan, Observer, Output, RunOptions, Session, SessionOptions};
use kyklos_transport::{Group, Rank, Transport, TransportError, Vote, harmless};

use super::bench::{Bench, Planned, TENSORS, elapsed_ns};
use super::leader::{Leader, Outcome};
use super::memory::{self, RanksHere};
use super::times::{RankTimes, RunTimes};
use crate::devices::DeviceReport;
use crate::failure::{Failure, Result};
use crate::job::refusal::{REFUSE, refuse};
use crate::messages::Messages;
use crate::observe::page::sent;
use crate::run::call::RankCall;
use crate::run::quiet;
use crate::tensors::results::HostOutput;
use crate::verify::Sample;

/// Runs the cells that rank 0 names until there are no more, and leaves the group. Rank 0 has the
/// `leader`.
///
/// # Errors
/// If the group ends, or never runs.
pub(super) fn work(
    bench: &Bench,
    here: &RanksHere,
    transport: &Group,
    device: Result<Device>,
    leader: Option<&mut Leader<'_>>,
) -> Result<()> {
    let result = RankWork::new(bench, here.clone(), transport, device).and_then(|mut rank| rank.all(leader));
    // The cells are done: a peer that fails now changes nothing.
    let _ = pollster::block_on(transport.close(if result.is_ok() { bench.deadline } else { LEAVE }));
    result
}

/// A rank between two cells.
struct RankWork<'a> {
    bench: &'a Bench,
    here: RanksHere,
    session: Session,
    starts: Arc<Starts>,
    /// Devices by rank.
    labels: Vec<String>,
    /// How messages go between devices.
    messages: String,
    /// Cases whose sampled rows have been computed by each kind of device alone.
    known: BTreeSet<usize>,
}

/// Records when this rank starts its first step.
#[derive(Debug, Default)]
struct Starts(Mutex<Option<Instant>>);

impl Observer for Starts {
    fn step(&self, _: Rank, _: u64, step: usize, _: usize, _: &dyn Fn() -> String) {
        if step == 0 {
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        }
    }
}

impl Starts {
    fn take(&self) -> Option<Instant> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// The results of a rank.
struct Ran {
    plans: Arc<ProvedPlans>,
    output: Output,
    times: RankTimes,
}

impl<'a> RankWork<'a> {
    /// Agrees with all ranks on the cells, and learns their devices.
    fn new(bench: &'a Bench, here: RanksHere, transport: &Group, device: Result<Device>) -> Result<Self> {
        let device = device.map_err(|failure| refuse(&**transport, failure))?;
        let label: String =
            DeviceReport::new(device.info()).label().chars().take(MOST_DEVICE_CHARS).collect();
        let vote = Vote::Ready { plan_hash: bench.hash(), note: label.into() };
        let notes = pollster::block_on(transport.agree(vote, REFUSE))?;
        let labels = notes.iter().map(|note| harmless(&String::from_utf8_lossy(note))).collect();
        let starts = Arc::new(Starts::default());
        let run = RunOptions { observer: starts.clone(), ..quiet() };
        let options = SessionOptions { deadline: bench.deadline, run, ..SessionOptions::default() };
        let (session, agreed) = bench.ways.open(transport, device, options)?;
        let messages = agreed.map_or_else(|| "host memory".to_owned(), |(words, _)| words);
        Ok(Self { bench, here, session, starts, labels, messages, known: BTreeSet::new() })
    }

    fn all(&mut self, mut leader: Option<&mut Leader<'_>>) -> Result<()> {
        if let Some(leader) = leader.as_deref_mut() {
            leader.start(&self.labels, &self.messages).map_err(|failure| self.refuse_all(failure))?;
        }
        loop {
            let next = match leader.as_deref_mut().map(Leader::next).transpose() {
                Ok(next) => next.flatten(),
                Err(failure) => return Err(self.refuse_all(failure)),
            };
            let Some(index) = self.told(next)? else { return Ok(()) };
            let result = self.cell(index, leader.as_deref_mut());
            if let Some(leader) = leader.as_deref_mut() {
                let outcome = match &result {
                    Ok(outcome) => outcome.clone(),
                    Err(failure) => Outcome::failed(&failure.text),
                };
                let noted = leader.end(index, outcome);
                if result.is_ok() {
                    noted.map_err(|failure| self.refuse_all(failure))?;
                }
            }
            result?;
        }
    }

    /// Ends the bench on all ranks, at their next vote.
    fn refuse_all(&self, failure: Failure) -> Failure {
        refuse(&**self.session.group(), failure)
    }

    /// The cell that rank 0 names, on all ranks; none at the end.
    fn told(&self, next: Option<usize>) -> Result<Option<usize>> {
        let number = next.map_or(END, |index| index as u64);
        let note = match self.session.rank().0 {
            0 => Bytes::copy_from_slice(&number.to_le_bytes()),
            _ => Bytes::new(),
        };
        let vote = Vote::Ready { plan_hash: NEXT, note };
        // Rank 0 may measure the devices or compare a result with the oracle before it votes.
        let notes = pollster::block_on(self.session.group().agree(vote, REFUSE))?;
        let number = notes.first().and_then(|note| Some(u64::from_le_bytes(note[..].try_into().ok()?)));
        match number {
            Some(END) => Ok(None),
            Some(index) if index < self.bench.cells.len() as u64 => Ok(usize::try_from(index).ok()),
            _ => Err(Failure::run("rank 0 names a cell that does not exist")),
        }
    }

    /// Runs a cell.
    ///
    /// # Errors
    /// If the group has ended. Everything else is an outcome, the same on all ranks but for its
    /// text.
    fn cell(&mut self, index: usize, leader: Option<&mut Leader<'_>>) -> Result<Outcome> {
        memory::forget_peak();
        let planned = self.bench.plans(index).and_then(|planned| {
            self.check(&planned.plans)?;
            Ok(planned)
        });
        let planned = match self.vote(planned)? {
            Ok(planned) => planned,
            Err(why) => return Ok(Outcome::refused(&why)),
        };
        let outcome = match self.run(planned)? {
            Ok(ran) => self.deliver(index, ran, leader)?,
            Err(why) => Outcome::failed(&why),
        };
        self.session.device().release_idle();
        Ok(outcome)
    }

    /// Refuses a cell that this rank's device or machine cannot run.
    fn check(&self, plans: &ProvedPlans) -> Result<()> {
        let problem = &plans.set().problem;
        let device = self.session.device();
        device.supports(problem.dtype, problem.head_dim as usize)?;
        LoweredPlan::check_states(plans.set(), self.session.rank(), device.most_state_bytes())?;
        let on_cores = matches!(device.info().class, DeviceClass::Cpu | DeviceClass::SoftwareGpu);
        memory::fits(plans, &self.here, self.bench.memory.filter(|_| on_cores))
    }

    /// Agrees with all ranks that all of them can run the cell: its plans, or why a rank cannot.
    fn vote(&self, planned: Result<Planned>) -> Result<Result<Planned, String>> {
        let transport = &**self.session.group();
        match planned {
            Ok(planned) => {
                let vote = Vote::ready(planned.plans.hash());
                match pollster::block_on(transport.agree(vote, REFUSE)) {
                    Ok(_) => Ok(Ok(planned)),
                    Err(refused @ TransportError::Refused { .. }) => Ok(Err(Failure::from(refused).text)),
                    Err(error) => Err(error.into()),
                }
            }
            Err(failure) => Ok(Err(refuse(transport, failure).text)),
        }
    }

    /// Loads the tensors and runs the plan: once to compile kernels, then the timed runs. The inner
    /// error is the reason of a rank that refuses, which leaves the group as it was.
    fn run(&mut self, Planned { plans, ns }: Planned) -> Result<Result<Ran, String>> {
        let mut times = RankTimes { plan_ns: ns, ..RankTimes::default() };
        let started = Instant::now();
        let set = plans.set();
        let rank = self.session.rank();
        let (queries, keys) = (set.q_placement.of_rank(rank), set.kv_placement.held_by(rank));
        let tensors = match TENSORS.all(&set.problem, queries, &keys) {
            Ok(tensors) => tensors,
            Err(failure) => {
                // The others are refused a run, which counts.
                self.session.take_operation();
                return Ok(Err(self.refuse_all(failure).text));
            }
        };
        // A rank that cannot load refuses the run.
        let call = match pollster::block_on(RankCall::open(&mut self.session, &plans, tensors, None)) {
            Ok(call) => call,
            Err(error @ (Error::Transport(_) | Error::Group { .. })) => return Err(error.into()),
            Err(error) => return Ok(Err(Failure::from(error).text)),
        };
        times.load_ns = elapsed_ns(started);
        let (mut last, mut before) = (None, (None, Vec::new()));
        for run in 0..=self.bench.repeat {
            if run == 1 {
                before = (self.packets(), self.sent());
            }
            // Its results stay on the device until they are dropped.
            drop(last.take());
            let output = match pollster::block_on(call.attend(&mut self.session)) {
                Ok(output) => output,
                Err(error @ (Error::Request { .. } | Error::Transport(TransportError::Refused { .. }))) => {
                    return Ok(Err(Failure::from(error).text));
                }
                Err(error) => return Err(error.into()),
            };
            let wall_ns = self.starts.take().map_or(0, elapsed_ns);
            times.runs.push(RunTimes { wall_ns, report: output.report.clone() });
            last = Some(output);
        }
        let runs = u64::from(self.bench.repeat.max(1));
        let of_one = |(before, after): (u64, u64)| after.saturating_sub(before) / runs;
        let (packets, sent) = before;
        times.wire_bytes = packets.zip(self.packets()).map(of_one);
        times.sent_bytes = sent.into_iter().zip(self.sent()).map(of_one).collect();
        let output = last.ok_or_else(|| Failure::run("no run took place"))?;
        Ok(Ok(Ran { plans: Arc::clone(&plans), output, times }))
    }

    /// Bytes of all packets that this rank has sent so far; none within one process.
    fn packets(&self) -> Option<u64> {
        let connections = self.session.group().connections();
        let sent = connections.iter().flatten().map(|figures| figures.bytes_sent);
        connections.iter().any(Option::is_some).then(|| sent.sum())
    }

    /// Bytes of all messages that this rank has sent so far, by peer.
    fn sent(&self) -> Vec<u64> {
        self.session.group().recorder().peers().iter().map(|peer| peer.bytes_sent).collect()
    }

    /// Brings the output, the times and the sampled rows to rank 0.
    fn deliver(&mut self, index: usize, ran: Ran, leader: Option<&mut Leader<'_>>) -> Result<Outcome> {
        let Ran { plans, output, mut times } = ran;
        let transport = self.session.group().clone();
        let started = Instant::now();
        let output = pollster::block_on(HostOutput::of(output))?;
        self.collect(&plans, &output, &*transport)?;
        times.collect_ns = elapsed_ns(started);
        times.process_peak_bytes = memory::process_peak_bytes().unwrap_or(0);
        let op = self.session.take_operation();
        let messages = Messages { transport: &*transport, op, deadline: self.bench.deadline };
        let cell = &self.bench.cells[index];
        let case = self.bench.case(cell);
        let (rank, set) = (transport.rank(), plans.set());
        let ranks = transport.size() as usize;
        let sample = Sample::new(&case.problem, &TENSORS)?;
        let rows = sample.extract(set.q_placement.of_rank(rank), &output.o, &output.lse);
        // One rank of each kind of device computes the sampled rows alone, once for each case.
        let first_of_kind = self.first_of_kind(rank);
        let alone = match first_of_kind && !self.known.contains(&cell.case) {
            true => Some(sample.dense(self.session.device(), set, &sample.whole_kv()?, &quiet())?),
            false => None,
        };
        let is_new = self.known.insert(cell.case);
        let Some(leader) = leader else {
            messages.send(Rank(0), TIMES, times.encode(ranks))?;
            if !rows.is_empty() {
                messages.send(Rank(0), ROWS, rows)?;
            }
            if let Some(alone) = alone.filter(|rows| !rows.is_empty()) {
                messages.send(Rank(0), ALONE, alone)?;
            }
            return Ok(Outcome::Elsewhere);
        };
        let runs = times.runs.len();
        let mut all = vec![times];
        let mut found = sample.decode(&sample.rows_of(set, rank), &rows);
        let mut kinds = Vec::new();
        if let Some(alone) = alone {
            kinds.push((self.labels[0].clone(), sample.decode(sample.rows(), &alone)));
        }
        for other in (1..transport.size()).map(Rank) {
            let times = messages.recv(other, TIMES, RankTimes::message_bytes(ranks, runs))?;
            all.push(RankTimes::decode(&times, ranks, runs));
            let ids = sample.rows_of(set, other);
            if !ids.is_empty() {
                found.extend(sample.decode(&ids, &messages.recv(other, ROWS, sample.row_bytes(ids.len()))?));
            }
            let bytes = sample.row_bytes(sample.rows().len());
            if is_new && self.first_of_kind(other) && bytes > 0 {
                let rows = sample.decode(sample.rows(), &messages.recv(other, ALONE, bytes)?);
                kinds.push((self.labels[other.0 as usize].clone(), rows));
            }
        }
        let all: Vec<(String, RankTimes)> = self.labels.iter().cloned().zip(all).collect();
        Ok(leader.judge(index, (&sample, set), found, kinds, &all, &sent(&plans)))
    }

    /// Whether no lower rank has a device of the same name.
    fn first_of_kind(&self, rank: Rank) -> bool {
        let (lower, from) = self.labels.split_at(rank.0 as usize);
        from.first().is_some_and(|label| !lower.contains(label))
    }

    /// Brings the whole output to rank 0, which keeps nothing of it: the time counts.
    fn collect(&mut self, plans: &ProvedPlans, output: &HostOutput, transport: &dyn Transport) -> Result<()> {
        let op = self.session.take_operation();
        let (problem, deadline) = (&plans.set().problem, self.bench.deadline);
        let heads = problem.q_heads as usize;
        let rows = RowTensors {
            placement: &plans.set().q_placement,
            batch: problem.batch,
            row_bytes: vec![heads * problem.head_dim as usize * problem.dtype.bytes(), heads * 4],
        };
        let tensors = [&output.o, &output.lse];
        pollster::block_on(async {
            match transport.rank().0 {
                0 => rows.receive::<Failure>(transport, op, &tensors, deadline, |_| Ok(())).await,
                _ => Ok(rows.send(transport, op, &tensors, deadline).await.map(|_| ())?),
            }
        })
    }
}

/// How long a rank stays after the end of its group, so that the others learn of it.
const LEAVE: Duration = Duration::from_secs(3);
/// Each takes at most 4 bytes of a note.
const MOST_DEVICE_CHARS: usize = 120;
/// Instead of a cell.
const END: u64 = u64::MAX;
/// The hash under which ranks learn of the next cell.
const NEXT: [u8; 32] = *b"kyklos strategies: the next cell";
/// A rank's [`RankTimes`].
const TIMES: u32 = 0;
/// The sampled rows that a rank owns.
const ROWS: u32 = 1;
/// All sampled rows, computed alone.
const ALONE: u32 = 2;
