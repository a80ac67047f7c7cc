//! A rank process. It reads orders from standard input and takes part in many groups.

use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kyklos::backend::Device;
use kyklos::plan::ProvedPlans;
use kyklos::{Error, Observer, RunOptions, Session, SessionOptions};
use kyklos_backend_suite::{RankOutput, attend_planned};
use kyklos_transport::quic::{Carrier, Identity, LinkProfile, LinkSettings, QuicConfig, QuicTransport};
use kyklos_transport::{Group, Rank, TransportError};

use crate::work::Work;

/// The variable that makes a copy of this test program a rank. Its value is the folder of the
/// group.
pub(crate) const FOLDER: &str = "KYKLOS_TEST_FOLDER";

/// Marks the lines for the ordering test: the test harness prints lines too.
pub(crate) const MARK: &str = "> ";

/// Number of times that a rank runs its plan. The failure is in the first run. If a rank has
/// already finished its part, it learns of the failure in the agreement of the second run.
const RUNS: u64 = 2;

/// How long survivors may take to form a group again.
const PATIENCE: Duration = Duration::from_secs(60);

/// The address of a rank's group, and the rank's work in it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Order {
    pub(crate) epoch: u32,
    pub(crate) rank: u32,
    pub(crate) coordinator: SocketAddr,
    /// The rank's own address.
    pub(crate) bind: IpAddr,
    /// The rank pauses before this step of the first run, until the test orders it to continue.
    pub(crate) pause: Option<usize>,
    pub(crate) link: Link,
    pub(crate) work: Work,
}

/// What the packets of a group travel in, and how patient its ranks are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Link {
    Lan,
    /// TCP streams, with the times of a data centre.
    Tcp,
    Wan,
}

impl Link {
    pub(crate) const ALL: [Self; 3] = [Self::Lan, Self::Tcp, Self::Wan];

    fn settings(self) -> LinkSettings {
        match self {
            Self::Lan => LinkSettings::default(),
            Self::Tcp => LinkSettings { carrier: Carrier::Tcp, ..LinkSettings::default() },
            Self::Wan => LinkSettings { profile: LinkProfile::Wan, ..LinkSettings::default() },
        }
    }
}

impl Order {
    pub(crate) fn line(&self) -> String {
        let Self { epoch, rank, coordinator, bind, pause, link, work: Work { ulysses, ring, seed } } = self;
        let pause = pause.map_or("-".to_owned(), |step| step.to_string());
        format!("{epoch} {rank} {coordinator} {bind} {pause} {link:?} {ulysses} {ring} {seed}")
    }

    fn parse(line: &str) -> Self {
        let [epoch, rank, coordinator, bind, pause, link, ulysses, ring, seed] =
            line.split_whitespace().collect::<Vec<_>>()[..]
        else {
            panic!("{line:?} is no order")
        };
        Self {
            epoch: epoch.parse().unwrap(),
            rank: rank.parse().unwrap(),
            coordinator: coordinator.parse().unwrap(),
            bind: bind.parse().unwrap(),
            pause: pause.parse().ok(),
            link: Link::ALL.into_iter().find(|one| format!("{one:?}") == link).unwrap(),
            work: Work {
                ulysses: ulysses.parse().unwrap(),
                ring: ring.parse().unwrap(),
                seed: seed.parse().unwrap(),
            },
        }
    }
}

/// The file of a rank's part of the result: its outputs, then its log-sum-exps.
pub(crate) fn result_file(folder: &Path, rank: u32) -> PathBuf {
    folder.join(format!("{rank}.result"))
}

pub(crate) fn identity_file(folder: &Path, rank: u32) -> PathBuf {
    folder.join(format!("{rank}.pem"))
}

/// Runs as a rank when another test started it; does nothing otherwise.
#[test]
#[ignore = "a rank of the other tests"]
fn runs_as_a_rank() {
    let Ok(folder) = std::env::var(FOLDER) else { return };
    let (folder, device) = (Path::new(&folder), Device::cpu());
    say("ready");
    while let Some(line) = heard() {
        obey(folder, &device, &Order::parse(&line));
        say("idle");
    }
}

fn obey(folder: &Path, device: &Device, order: &Order) {
    let identity = Identity::read_file(&identity_file(folder, order.rank)).unwrap();
    let job = identity.claims().unwrap().job;
    let (rank, ranks) = (Rank(order.rank), order.work.ranks());
    let config = QuicConfig {
        epoch: order.epoch,
        bind: order.bind,
        connect_deadline: PATIENCE,
        link: order.link.settings(),
        ..QuicConfig::new(rank, ranks, job, order.coordinator, identity)
    };
    let transport = match QuicTransport::connect(config) {
        Ok(transport) => transport,
        Err(error) => return say(&format!("failed - {error}")),
    };
    match run(device, order, &transport) {
        Ok(result) => {
            std::fs::write(result_file(folder, order.rank), result).unwrap();
            say("done");
        }
        Err(error) => say(&format!("failed {} {error}", culprit(&error))),
    }
    let _ = pollster::block_on(transport.close(Duration::from_secs(5)));
}

fn run(device: &Device, order: &Order, transport: &Group) -> kyklos::Result<Vec<u8>> {
    let plans = Arc::new(ProvedPlans::new(order.work.set())?);
    let tensors = order.work.tensors_of(plans.set(), Rank(order.rank));
    let options = SessionOptions {
        run: RunOptions {
            observer: Arc::new(Pause { before: order.pause }),
            poison: true,
            ..RunOptions::default()
        },
        ..SessionOptions::default()
    };
    let mut session = Session::with_options(transport.clone(), device.clone(), options);
    let bytes = |output: &RankOutput| [&output.o[..], &output.lse[..]].concat();
    pollster::block_on(async {
        let mut result = Ok(Vec::new());
        for _ in 0..RUNS {
            result = attend_planned(&mut session, &plans, &tensors).await.map(|output| bytes(&output));
            if result.is_err() {
                break;
            }
        }
        result
    })
}

/// Pauses before a step, until the test orders it to continue.
#[derive(Debug)]
struct Pause {
    before: Option<usize>,
}

impl Observer for Pause {
    fn step(&self, _: Rank, op: u64, step: usize, _: usize, _: &dyn Fn() -> String) {
        if op == 0 && self.before == Some(step) {
            say("here");
            heard();
        }
    }
}

/// The rank that the error names, or `-`.
fn culprit(error: &Error) -> String {
    match error {
        Error::Group { source: TransportError::Aborted { abort, .. }, .. }
        | Error::Transport(TransportError::Aborted { abort, .. }) => abort.culprit.to_string(),
        _ => "-".to_owned(),
    }
}

fn say(line: &str) {
    // The harness does not end its own line.
    let text = format!("\n{MARK}{}\n", line.replace('\n', " "));
    std::io::stdout().lock().write_all(text.as_bytes()).unwrap();
}

fn heard() -> Option<String> {
    let mut line = String::new();
    // The ordering test may have ended.
    let read = std::io::stdin().read_line(&mut line).unwrap_or(0);
    (read > 0).then_some(line)
}
