//! Measures candidates on a device: compiles and checks each, then times them in turns until the
//! time limit.

use std::mem::discriminant;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use kyklos::AttentionProblem;
use kyklos::backend::wgpu::{AttendVariant, KernelChoice, WgpuBackend, WgpuBuffer, WgpuOptions};
use kyklos::backend::{Backend, Control};

use super::choose::Outcome;
use crate::failure::Result;
use crate::run::resident::Resident;
use crate::tensors::Source;
use crate::verify::{Sample, Verdict};

/// The measurements of the candidates of one case.
pub(super) struct Measured {
    pub(super) candidates: Vec<Candidate>,
    /// Whether the times are the device's own.
    pub(super) timestamps: bool,
}

/// One variant.
pub(super) struct Candidate {
    pub(super) variant: AttendVariant,
    /// Times are by a clock that all candidates of the case have.
    pub(super) outcome: Outcome,
    pub(super) verdict: Option<Verdict>,
}

impl Measured {
    /// The wrong candidates, with the reason.
    pub(super) fn wrong(&self) -> impl Iterator<Item = String> {
        self.candidates.iter().filter_map(|candidate| match &candidate.outcome {
            Outcome::Wrong(how) => Some(format!("{}: {how}", candidate.variant.name())),
            _ => None,
        })
    }
}

/// Measures `variants` on device `index` until about `until`: the last run may end later.
pub(super) fn measure(
    index: usize,
    problem: &AttentionProblem,
    variants: &[AttendVariant],
    until: Instant,
) -> Result<Measured> {
    let sample = Sample::new(problem, &Source::Random { seed: SEED })?;
    let enter_until = Instant::now() + until.saturating_duration_since(Instant::now()).mul_f64(ENTER);
    let mut entrants: Vec<Entrant> = Vec::new();
    for variant in variants {
        let fastest = Trial::fastest(entrants.iter().filter_map(|entrant| entrant.state.as_ref().ok()));
        // The first one enters in any case: nothing can be compared without the built-in choice.
        // If the first of a family is too slow, so are the others: they differ by less than the limit.
        let kin = |entrant: &&Entrant| discriminant(&entrant.variant) == discriminant(variant);
        let dropped = entrants.iter().find(kin).filter(|kin| kin.too_slow).map(|kin| kin.variant.name());
        entrants.push(match dropped {
            Some(name) => Entrant::left(*variant, format!("not run: {name} was dropped")),
            None if Instant::now() < enter_until || entrants.is_empty() => {
                Entrant::new(index, problem, *variant, &sample, fastest)
            }
            None => Entrant::left(*variant, NO_TIME.to_owned()),
        });
    }
    for round in 0..MOST_ROUNDS {
        if Instant::now() >= until {
            break;
        }
        // Rotate, so that no candidate always follows a slow one.
        let count = entrants.len();
        for place in 0..count {
            entrants[(round + place) % count].time();
        }
    }
    let timestamps = entrants
        .iter()
        .filter_map(|entrant| entrant.state.as_ref().ok())
        .all(|runner| runner.times.iter().all(|time| time.device_s.is_some()));
    let candidates = entrants.into_iter().map(|entrant| entrant.end(timestamps)).collect();
    Ok(Measured { candidates, timestamps })
}

/// A variant that entered, or was dropped.
struct Entrant {
    variant: AttendVariant,
    verdict: Option<Verdict>,
    too_slow: bool,
    state: Result<Box<Runner>, Outcome>,
}

/// A checked variant with its own device, so that an error of one variant does not affect the
/// others.
struct Runner {
    backend: WgpuBackend,
    resident: Resident<WgpuBuffer>,
    trial: Trial,
    /// Runs of a round.
    repeats: u32,
    times: Vec<Time>,
}

/// How long a candidate takes, in seconds.
#[derive(Clone, Copy)]
struct Trial {
    /// For a few tokens.
    few_s: f64,
    /// For the problem.
    run_s: f64,
}

impl Trial {
    /// The shortest times of all; infinite if there are none.
    fn fastest<'a>(runners: impl Iterator<Item = &'a Box<Runner>>) -> Self {
        runners.fold(Self { few_s: f64::INFINITY, run_s: f64::INFINITY }, |best, runner| Self {
            few_s: best.few_s.min(runner.trial.few_s),
            run_s: best.run_s.min(runner.trial.run_s),
        })
    }
}

/// One round, for each run of it.
struct Time {
    wall_s: f64,
    device_s: Option<f64>,
}

impl Entrant {
    /// Compiles, runs and checks a variant; drops it if it takes much longer than the fastest so
    /// far.
    fn new(
        index: usize,
        problem: &AttentionProblem,
        variant: AttendVariant,
        sample: &Sample,
        fastest: Trial,
    ) -> Self {
        match Runner::new(index, problem, variant, fastest) {
            Ok(Some(mut runner)) => match runner.check(sample, &variant.name()) {
                Ok(verdict) => {
                    let state = match &verdict.failure {
                        Some(failure) => Err(Outcome::Wrong(failure.clone())),
                        None => Ok(Box::new(runner)),
                    };
                    Self { variant, verdict: Some(verdict), too_slow: false, state }
                }
                Err(failure) => Self::left(variant, format!("does not run: {}", failure.text)),
            },
            Ok(None) => Self {
                too_slow: true,
                ..Self::left(variant, format!("dropped: takes more than {TOO_SLOW} x as long as the fastest"))
            },
            Err(failure) => Self::left(variant, format!("does not run: {}", failure.text)),
        }
    }

    fn left(variant: AttendVariant, why: String) -> Self {
        Self { variant, verdict: None, too_slow: false, state: Err(Outcome::Left(why)) }
    }

    fn time(&mut self) {
        let Ok(runner) = &mut self.state else { return };
        match runner.time() {
            Ok(time) => runner.times.push(time),
            Err(failure) => self.state = Err(Outcome::Left(format!("stopped running: {}", failure.text))),
        }
    }

    fn end(self, timestamps: bool) -> Candidate {
        let outcome = match self.state {
            Ok(runner) => Outcome::Right(
                runner
                    .times
                    .iter()
                    .map(|time| 1e3 * time.device_s.filter(|_| timestamps).unwrap_or(time.wall_s))
                    .collect(),
            ),
            Err(outcome) => outcome,
        };
        Candidate { variant: self.variant, outcome, verdict: self.verdict }
    }
}

impl Runner {
    /// `None` if the variant takes much longer than `fastest`.
    fn new(
        index: usize,
        problem: &AttentionProblem,
        variant: AttendVariant,
        fastest: Trial,
    ) -> Result<Option<Self>> {
        let kernel = KernelChoice::Exactly(variant);
        let options = WgpuOptions { kernel, timestamps: true, ..WgpuOptions::default() };
        let backend = WgpuBackend::with_options(index, &options)?;
        // A few tokens compile the kernel and reveal very slow ones early: a run can be cancelled only
        // between two pieces of work, and a piece of a very slow kernel is long.
        let p = problem;
        let few = [p.batch, p.q_len.min(FEW_TOKENS), p.q_heads, p.kv_heads, p.head_dim];
        let few = AttentionProblem::new(few, p.dtype, p.mask.clone())?;
        let mut resident = Resident::new(&backend, &few, SEED)?;
        resident.run(&backend, &Control::default())?;
        let Some(few_s) = shortest(&backend, &mut resident, HOPELESS * fastest.few_s)? else {
            return Ok(None);
        };
        let mut resident = Resident::new(&backend, problem, SEED)?;
        let Some(run_s) = shortest(&backend, &mut resident, TOO_SLOW * fastest.run_s)? else {
            return Ok(None);
        };
        let repeats = (1..MOST_REPEATS).find(|n| f64::from(*n) * run_s >= ROUND_S).unwrap_or(MOST_REPEATS);
        Ok(Some(Self { backend, resident, trial: Trial { few_s, run_s }, repeats, times: Vec::new() }))
    }

    /// Compares the result of one more run with the oracle.
    fn check(&mut self, sample: &Sample, name: &str) -> Result<Verdict> {
        self.resident.run(&self.backend, &Control::default())?;
        let (o, lse) = self.resident.results(&self.backend)?;
        let verdict = sample.judge_alone(&o, &lse, name)?;
        // Earlier runs are not timed.
        pollster::block_on(self.backend.device_seconds())?;
        Ok(verdict)
    }

    fn time(&mut self) -> Result<Time> {
        let started = Instant::now();
        for _ in 0..self.repeats {
            self.resident.run(&self.backend, &Control::default())?;
        }
        let runs = f64::from(self.repeats);
        let wall_s = started.elapsed().as_secs_f64() / runs;
        let device_s = pollster::block_on(self.backend.device_seconds())?.map(|seconds| seconds / runs);
        Ok(Time { wall_s, device_s })
    }
}

/// The shortest of some runs, in seconds; `None` when all took longer than `limit_s`.
fn shortest(backend: &WgpuBackend, resident: &mut Resident<WgpuBuffer>, limit_s: f64) -> Result<Option<f64>> {
    let (mut shortest_s, begun) = (f64::INFINITY, Instant::now());
    // One slow period must not decide.
    for _ in 0..TRIALS {
        match within(limit_s, |control| resident.run(backend, control))? {
            Some(run_s) => shortest_s = shortest_s.min(run_s),
            // Submitted work still runs, and must not disturb the next run.
            None => pollster::block_on(backend.wait())?,
        }
        if begun.elapsed().as_secs_f64() > TRIALS_S {
            break;
        }
    }
    Ok((shortest_s <= limit_s).then_some(shortest_s))
}

/// Seconds that `run` took; `None` when it was cancelled after `limit_s`.
fn within(limit_s: f64, run: impl FnOnce(&Control) -> Result<()>) -> Result<Option<f64>> {
    let cancel = Arc::new(AtomicBool::new(false));
    let started = Instant::now();
    let ended = thread::scope(|scope| {
        let (done, ended) = mpsc::channel::<()>();
        if let Ok(limit) = Duration::try_from_secs_f64(limit_s.max(ROUND_S)) {
            let cancel = cancel.clone();
            scope.spawn(move || {
                if ended.recv_timeout(limit) == Err(mpsc::RecvTimeoutError::Timeout) {
                    cancel.store(true, Ordering::Relaxed);
                }
            });
        }
        let ended = run(&Control::new(cancel.clone()));
        drop(done);
        ended
    });
    match ended {
        Ok(()) => Ok(Some(started.elapsed().as_secs_f64())),
        Err(_) if cancel.load(Ordering::Relaxed) => Ok(None),
        Err(failure) => Err(failure),
    }
}

/// Seed of the tensors.
const SEED: u64 = 0;
/// Seconds of a round: long compared with the clock and with jitter of the driver.
const ROUND_S: f64 = 0.005;
const MOST_REPEATS: u32 = 50;
const MOST_ROUNDS: usize = 15;
/// Tokens of the first run, which compiles the kernel.
const FEW_TOKENS: u32 = 128;
/// Factor over the fastest so far, for the first run, beyond which a candidate is dropped.
const HOPELESS: f64 = 10.0;
/// Number of runs for the first estimate, and the time limit for them.
const TRIALS: u32 = 3;
const TRIALS_S: f64 = 0.5;
/// Part of the time of a case for compiling and checks; the rest is for timing.
const ENTER: f64 = 0.5;
/// Factor over the fastest so far beyond which a candidate is not timed.
const TOO_SLOW: f64 = 3.0;
const NO_TIME: &str = "not run: the time was over; give more with --budget-s";
