//! The page of `--report` for a call that was run: what rank 0 has of all ranks.

use kyklos::plan::ProvedPlans;
use kyklos::simulate::simulate;

use super::report::{Figures, RankNote, Summary, facts};
use crate::failure::Result;
use crate::job::call::Job;
use crate::observe::page::model::{Budget, Origin, Page, RankFigures, Timeline, TimelineRow, Times};
use crate::observe::page::target::PageFile;
use crate::observe::page::units::seconds;
use crate::observe::page::{html, number, page_of_plans};

/// What rank 0 needs for the page.
#[derive(Debug)]
pub(in crate::job) struct PageParts {
    /// With `--report`.
    pub(in crate::job) file: Option<PageFile>,
    /// By rank, of the last run.
    pub(in crate::job) rows: Vec<TimelineRow>,
    /// Of its backward pass, with `--grad`.
    pub(in crate::job) backward_rows: Option<Vec<TimelineRow>>,
}

impl Job {
    /// Shows the page on the live page, and writes it and gives it its name.
    pub(in crate::job) fn write_page(&self, parts: PageParts, summary: &Summary) -> Result<()> {
        let PageParts { file, rows, backward_rows } = parts;
        let html = html(&self.page(rows, backward_rows, summary)?);
        if let Some(live) = &self.outputs.live {
            live.reported(&html);
        }
        file.map_or(Ok(()), |file| file.write(&html))
    }

    fn page(
        &self,
        rows: Vec<TimelineRow>,
        backward_rows: Option<Vec<TimelineRow>>,
        summary: &Summary,
    ) -> Result<Page> {
        let Self { request, plans, backward, .. } = self;
        let notes = || summary.ranks.iter();
        let forward = notes().map(|note| Some((note, &note.figures, note.wall_s)));
        let page = self.of_pass(plans, forward, rows);
        let backward = backward.as_ref().zip(backward_rows).map(|(plans, rows)| {
            let passes = notes().map(|note| {
                let pass = note.backward.as_ref()?;
                Some((note, &pass.figures, pass.wall_s))
            });
            let wall_s = summary.backward().map(|(wall_s, _)| wall_s);
            let page = self.of_pass(plans, passes, rows);
            Box::new(Page { wall_s, predicted_s: request.predicted_backward_s, ..page })
        });
        Ok(Page {
            title: self.title(),
            alerts: alerts(summary),
            facts: facts(request),
            wall_s: Some(summary.wall_s),
            predicted_s: request.predicted_s,
            json: summary.json(request)?,
            backward,
            ..page
        })
    }

    /// What the page shows of a pass: of each rank its note, its figures and its seconds, and its
    /// timeline.
    fn of_pass<'a>(
        &self,
        plans: &ProvedPlans,
        notes: impl Iterator<Item = Option<(&'a RankNote, &'a Figures, f64)>>,
        rows: Vec<TimelineRow>,
    ) -> Page {
        let members = &self.members;
        let mut page = page_of_plans(plans, members);
        for (rank, note) in page.ranks.iter_mut().zip(notes) {
            if let Some((note, figures, wall_s)) = note {
                self.measured(rank, note, figures, wall_s);
            }
        }
        self.predict(plans, &mut page);
        let in_first_group = |row: TimelineRow| TimelineRow {
            waited_for: row.waited_for.iter().map(|(rank, ns)| (number(members, *rank), *ns)).collect(),
            ..row
        };
        Page {
            origin: Origin::Measured,
            timeline: Some(Timeline { rows: rows.into_iter().map(in_first_group).collect() }),
            ..page
        }
    }

    fn measured(&self, rank: &mut RankFigures, note: &RankNote, figures: &Figures, wall_s: f64) {
        rank.device = note.device.label();
        rank.times = Some(Times {
            compute_s: figures.compute_s,
            wait_s: figures.wait_s,
            copy_s: figures.copy_s,
            wall_s,
        });
        rank.bytes_sent = figures.bytes_sent;
        rank.messages_sent = figures.messages_sent;
        rank.peak_bytes = figures.peak_bytes;
        let all_here = self.settings.ranks_here >= self.set().mesh.size();
        if all_here && matches!(&note.device.class[..], "cpu" | "software-gpu") {
            let shared_by = self.set().mesh.size();
            rank.budget = self.settings.memory_bytes().map(|bytes| Budget { bytes, shared_by });
        }
    }

    /// Adds what the description of the devices predicts, if there is one.
    fn predict(&self, plans: &ProvedPlans, page: &mut Page) {
        let Some(cluster) = &self.request.cluster else { return };
        let prediction = match simulate(plans.set(), cluster) {
            Ok(prediction) if prediction.ranks.len() == page.ranks.len() => prediction,
            _ => return,
        };
        for (rank, predicted) in page.ranks.iter_mut().zip(&prediction.ranks) {
            rank.predicted = Some(Times {
                compute_s: seconds(predicted.compute_ns),
                wait_s: seconds(predicted.wait_ns),
                copy_s: seconds(predicted.copy_ns),
                wall_s: seconds(predicted.finish_ns),
            });
            let described = cluster.kind_and_memory(predicted.device).and_then(|(_, memory)| memory);
            if let (None, Some(bytes)) = (rank.budget, described) {
                rank.budget = Some(Budget { bytes, shared_by: 1 });
            }
        }
    }
}

fn alerts(summary: &Summary) -> Vec<String> {
    let mut alerts = Vec::new();
    if let Some(failure) = summary.verdict.as_ref().and_then(|verdict| verdict.failure.as_ref()) {
        alerts.push(format!("the result is wrong: {failure}"));
    }
    if let Some(failure) = summary.gradients.as_ref().and_then(|verdict| verdict.failure.as_ref()) {
        alerts.push(format!("the gradients are wrong: {failure}"));
    }
    alerts
}
