//! A job: one attention call of a group of ranks. Each part has its own readers.

use std::sync::Arc;

use kyklos::plan::{PlanSet, ProvedPlans};
use kyklos::{RunOptions, SystemClock};
use kyklos_transport::{Group, Rank};

use crate::failure::{Failure, Result};
use crate::job::results::report::facts;
use crate::job::settings::{Outputs, Settings};
use crate::job::terms::Terms;
use crate::observe::live::Call;
use crate::observe::progress::Watch;
use crate::observe::record::{About, Flight, ListedFlight};
use crate::request::Request;
use crate::verify::Sample;

/// One attention call of a group of ranks.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) request: Request,
    /// What ranks compare in their first vote.
    pub(crate) terms: Terms,
    pub(crate) plans: Arc<ProvedPlans>,
    /// Of the backward pass, with `--grad`.
    pub(crate) backward: Option<Arc<ProvedPlans>>,
    /// Rows to verify, if any.
    pub(crate) sample: Option<Sample>,
    /// By rank, its number in the first group.
    pub(crate) members: Vec<Rank>,
    pub(crate) settings: Settings,
    pub(crate) options: RunOptions,
    pub(crate) outputs: Outputs,
    /// What observers of this process see.
    pub(crate) watch: Arc<Watch>,
}

impl Job {
    /// Plans the call and proves the plans. `members` are the numbers of its ranks in the first
    /// group.
    pub(crate) fn new(
        request: Request,
        settings: Settings,
        outputs: Outputs,
        members: Vec<Rank>,
    ) -> Result<Self> {
        let Settings { verify, progress, .. } = settings;
        let sample = match verify {
            true => Some(Sample::of(&request)?),
            false => None,
        };
        let terms = Terms::of(&request, settings, &outputs);
        let plans = request.plan()?;
        let ranks = plans.set().mesh.size();
        let backward = request.plan_backward()?;
        if let (Some(sample), Some(_)) = (&sample, &backward) {
            sample.can_judge_gradients()?;
        }
        let clock = Arc::new(SystemClock::new());
        let watch = Arc::new(Watch::new(progress, clock.clone(), ranks));
        let trace = outputs.trace.is_some() || outputs.has_page();
        let options = RunOptions { clock, observer: watch.clone(), trace, poison: false };
        Ok(Self {
            request,
            terms,
            plans: Arc::new(plans),
            backward: backward.map(Arc::new),
            sample,
            members,
            settings,
            options,
            outputs,
            watch,
        })
    }

    /// Operations of a rank: the forward and the backward pass of each run.
    pub(super) fn operations(&self) -> u64 {
        self.settings.repeat * if self.backward.is_some() { 2 } else { 1 }
    }

    pub(crate) fn set(&self) -> &PlanSet {
        self.plans.set()
    }

    /// Lists a rank that starts, for records, metrics and the live page.
    pub(super) fn list(&self, transport: &Group) -> ListedFlight {
        let Self { request, plans, .. } = self;
        let backward = self.backward.as_deref().map(ProvedPlans::set);
        self.watch.joins(transport.rank(), plans.set(), backward, self.settings.repeat);
        let about = About {
            plans: Arc::clone(plans),
            backward: self.backward.clone(),
            strategy: request.strategy.to_string(),
            watch: Arc::clone(&self.watch),
            folder: self.outputs.record.clone(),
        };
        let listed = Flight::list(transport, about);
        if let Some(live) = &self.outputs.live {
            live.joined(&listed.0, || Call {
                title: self.title(),
                facts: facts(request),
                repeat: self.settings.repeat,
                members: self.members.clone(),
                plans: Arc::clone(plans),
                backward: self.backward.clone(),
                watch: Arc::clone(&self.watch),
            });
        }
        listed
    }

    /// The title of its pages.
    pub(super) fn title(&self) -> String {
        format!("Attention by {} on {} ranks", self.request.strategy, self.set().mesh.size())
    }

    /// A wrong request is wrong on all ranks; any other failure, and what this machine does not
    /// have, names this rank.
    pub(super) fn named(&self, rank: Rank, failure: Failure) -> Failure {
        if (failure.exit == 2 && !failure.of_place) || self.set().mesh.size() == 1 {
            return failure;
        }
        Failure { text: format!("rank {rank}: {}", failure.text), ..failure }
    }
}
