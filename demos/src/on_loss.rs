//! What a launched rank does when its group has lost one: it ends with it, or goes on in the next group.

use std::sync::Arc;
use std::time::Duration;

use clap::ValueEnum;
use kyklos_transport::{Abort, AbortCause, Rank, Reformed, Regroup, Transport, TransportError, Vote};

use crate::args::AttendArgs;
use crate::failure::{Failure, Result, note};
use crate::interrupt;
use crate::rank::Job;

/// The value of `--on-loss`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnLoss {
    /// Every rank ends, and names the one that is to blame.
    Stop,
    /// Those who are left plan anew for their number, and begin again.
    Shrink,
    /// The same, but a rank that is started anew within half of `--join-deadline` comes along.
    Rejoin,
}

/// What became of a group.
pub(crate) struct Lost {
    abort: Abort,
    members: Vec<Rank>,
}

impl Lost {
    /// Why the group of a rank that failed was aborted, if it is that and not this rank's own doing.
    pub(crate) fn of(group: &Reformed, failure: &Failure) -> Option<Self> {
        if !failure.of_group {
            return None;
        }
        // A deadline of this rank becomes everyone's abort, which may be under way.
        let vote = Vote::Refuse { exit: failure.exit, text: failure.text.clone() };
        match pollster::block_on(group.transport.agree(vote, ABORT_UNDER_WAY)) {
            Err(TransportError::Aborted { abort, .. }) => {
                let own =
                    abort.culprit == group.transport.rank() && matches!(abort.cause, AbortCause::Failed(_));
                (!own).then(|| Self { abort, members: group.members.clone() })
            }
            _ => None,
        }
    }

    /// Forms the next group, as `--on-loss` says.
    pub(crate) fn go_on(&self, args: &AttendArgs, transport: &dyn Transport) -> Result<Reformed> {
        let patience = Duration::from_secs(u64::from(args.group.join_deadline.get()));
        let who = match args.on_loss {
            OnLoss::Rejoin => Regroup::Everyone { within: patience / 2 },
            OnLoss::Stop | OnLoss::Shrink => Regroup::Survivors,
        };
        pollster::block_on(transport.reform(who, patience))
            .map_err(|error| Failure { text: format!("{}; {error}", self.abort), ..error.into() })
    }

    /// Says on standard error what has happened, and how it goes on.
    pub(crate) fn tell(&self, next: &Reformed, job: &Job) {
        let Abort { culprit, cause, .. } = &self.abort;
        let culprit = self.members.get(culprit.0 as usize).copied().unwrap_or(*culprit);
        let gone = list(self.members.iter().filter(|rank| !next.members.contains(rank)));
        let gone = if gone.is_empty() { "nobody is lost".to_owned() } else { format!("without {gone}") };
        note(&format!("rank {culprit} {cause}; {gone}; {}", in_words(next, job)));
    }
}

/// Ends this process when the others have given it up for stuck and it stays so: they have gone on, and wait for nothing of
/// it, but whoever started it does.
pub(crate) fn end_if_stuck(group: &Reformed) {
    let (transport, recorder, me) =
        (Arc::downgrade(&group.transport), group.transport.recorder(), group.transport.rank());
    std::thread::spawn(move || {
        while transport.strong_count() > 0 {
            std::thread::sleep(LOOK);
            let is_stuck = || {
                let abort = recorder.look().abort.map(|(_, abort)| abort);
                abort.is_some_and(|abort| abort.culprit == me && matches!(abort.cause, AbortCause::Stuck(_)))
            };
            if recorder.is_aborted() && is_stuck() {
                std::thread::sleep(STUCK_FOR_GOOD);
                if transport.strong_count() > 0 {
                    note("this rank is stuck, the others do without it: ended");
                    interrupt::end(1);
                }
            }
        }
    });
}

/// A rank that was started anew says where it is.
pub(crate) fn tell_rejoined(next: &Reformed, job: &Job) {
    note(&format!("joined again; {}", in_words(next, job)));
}

fn in_words(next: &Reformed, job: &Job) -> String {
    let request = &job.request;
    format!(
        "{} ranks begin again (epoch {}: {}), mesh {}, strategy {}",
        next.members.len(),
        next.epoch,
        list(next.members.iter()),
        request.mesh,
        request.strategy
    )
}

fn list<'a>(ranks: impl Iterator<Item = &'a Rank>) -> String {
    let ranks: Vec<String> = ranks.map(Rank::to_string).collect();
    match ranks.len() {
        0 => String::new(),
        1 => format!("rank {}", ranks[0]),
        _ => format!("ranks {}", ranks.join(", ")),
    }
}

/// A request that does not fit the smaller world.
pub(crate) fn does_not_fit(world: u32, failure: &Failure) -> Failure {
    Failure::run(format!(
        "the group goes on with {world} ranks, and the request does not fit them ({}): leave mesh and shares to the planner \
         for --on-loss shrink, or use --on-loss stop",
        failure.text
    ))
}

/// How often to look whether this rank has been given up.
const LOOK: Duration = Duration::from_secs(1);

/// After which a rank that was given up will not come back.
const STUCK_FOR_GOOD: Duration = Duration::from_secs(10);

/// For a request of this rank to become everyone's abort.
const ABORT_UNDER_WAY: Duration = Duration::from_secs(10);
