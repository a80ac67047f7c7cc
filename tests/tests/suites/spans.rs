//! Tracing spans of a run, as a subscriber sees them.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use kyklos::backend::Device;
use kyklos::host::{Tensors, shard};
use kyklos::local::on_threads;
use kyklos::plan::{Plan, PlanSet, ProvedPlans, Slice, Step};
use kyklos::{
    AttentionProblem, Dtype, Mask, Mesh, NoObserver, Observer, PlacementKind, RunOptions, Session,
    SessionOptions, Split, Strategy, plan_forward,
};
use kyklos_backend_suite::attend_planned;
use kyklos_transport::{Abort, AbortCause, Group, Progress, Rank, in_process_group};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Record};
use tracing::{Event, Id, Metadata, Subscriber};

const RANKS: u32 = 3;
const REPEAT: u64 = 2;

/// The spans that one rank's thread began, in order.
#[derive(Clone, Default)]
struct Spans(Arc<Mutex<Seen>>);

#[derive(Default)]
struct Seen {
    all: Vec<Span>,
    entered: Vec<usize>,
}

#[derive(Clone)]
struct Span {
    name: &'static str,
    parent: Option<usize>,
    fields: BTreeMap<&'static str, String>,
    /// Number of holders. The span is closed when it is 0.
    holders: usize,
}

impl Span {
    fn number(&self, field: &str) -> u64 {
        self.fields[field].parse().unwrap()
    }
}

impl Visit for Span {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.fields.insert(field.name(), format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.fields.insert(field.name(), value.to_owned());
    }
}

fn place(id: &Id) -> usize {
    usize::try_from(id.into_u64()).unwrap() - 1
}

impl Subscriber for Spans {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let mut seen = self.0.lock().unwrap();
        let around = seen.entered.last().copied().filter(|_| span.is_contextual());
        let parent = span.parent().map(place).or(around);
        let name = span.metadata().name();
        let mut new = Span { name, parent, fields: BTreeMap::new(), holders: 1 };
        span.record(&mut new);
        seen.all.push(new);
        Id::from_u64(seen.all.len() as u64)
    }

    fn record(&self, id: &Id, values: &Record<'_>) {
        values.record(&mut self.0.lock().unwrap().all[place(id)]);
    }

    fn enter(&self, id: &Id) {
        self.0.lock().unwrap().entered.push(place(id));
    }

    fn exit(&self, id: &Id) {
        assert_eq!(
            self.0.lock().unwrap().entered.pop(),
            Some(place(id)),
            "spans are left as they were entered"
        );
    }

    fn clone_span(&self, id: &Id) -> Id {
        self.0.lock().unwrap().all[place(id)].holders += 1;
        id.clone()
    }

    fn try_close(&self, id: Id) -> bool {
        let mut seen = self.0.lock().unwrap();
        let holders = &mut seen.all[place(&id)].holders;
        *holders -= 1;
        *holders == 0
    }

    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {}
}

fn ring() -> PlanSet {
    let problem = AttentionProblem::new([1, 24, 2, 1, 8], Dtype::F32, Mask::full()).unwrap();
    let mesh = Mesh::new(1, RANKS).unwrap();
    plan_forward(&problem, mesh, PlacementKind::Contiguous, &Split::Even, Strategy::Ring).unwrap()
}

/// Runs `set` on threads. After all transports are dropped, returns for each rank whether it
/// succeeded, and its spans.
fn run(set: &PlanSet, group: Vec<Group>, observer: Arc<dyn Observer>) -> Vec<(bool, Vec<Span>)> {
    let problem = &set.problem;
    let zeros = |heads: u32| Bytes::from(vec![0; (problem.q_len * heads * problem.head_dim * 4) as usize]);
    let (q, kv) = (zeros(problem.q_heads), zeros(problem.kv_heads));
    let tensors = Tensors { q, k: kv.clone(), v: kv, bias: None };
    let plans = Arc::new(ProvedPlans::new(set.clone()).unwrap());
    let run = RunOptions { observer, ..RunOptions::default() };
    let options = SessionOptions { deadline: Duration::from_secs(20), run, ..SessionOptions::default() };
    let spans: Vec<Spans> = group.iter().map(|_| Spans::default()).collect();
    // Made before any rank runs: while there is only one, a span that another test enters first stays
    // off for ever.
    let subscribers: Vec<_> = spans.iter().cloned().map(tracing::Dispatch::new).collect();
    let ended = on_threads(group, |transport| {
        let part = shard(set, transport.rank(), &tensors).unwrap();
        let subscriber = &subscribers[transport.rank().0 as usize];
        let mut session = Session::with_options(transport, Device::cpu(), options.clone());
        let runs = async {
            for _ in 0..REPEAT {
                attend_planned(&mut session, &plans, &part).await?;
            }
            Ok::<(), kyklos::Error>(())
        };
        tracing::dispatcher::with_default(subscriber, || pollster::block_on(runs).is_ok())
    });
    drop(options);
    let seen = |spans: &Spans| {
        let seen = spans.0.lock().unwrap();
        assert!(seen.entered.is_empty());
        seen.all.clone()
    };
    ended.into_iter().zip(spans.iter().map(seen)).collect()
}

/// The child spans of `parent`, with their positions.
fn inside(spans: &[Span], parent: Option<usize>) -> Vec<(usize, &Span)> {
    spans.iter().enumerate().filter(|(_, span)| span.parent == parent).collect()
}

/// (name, peer, bytes) of the messages that a step posts, receives first.
fn messages(set: &PlanSet, plan: &Plan, step: &Step) -> Vec<(&'static str, u64, u64)> {
    let Step::Exchange { sends, recvs, .. } = step else { return Vec::new() };
    let slices = |parts: &[Slice]| parts.iter().map(|part| plan.slice_bytes(&set.problem, part)).sum();
    let buffers = |parts: &[_]| parts.iter().map(|id| plan.buffer(*id).bytes(&set.problem)).sum();
    (recvs.iter().map(|recv| ("receive", u64::from(recv.from), buffers(&recv.parts))))
        .chain(sends.iter().map(|send| ("send", u64::from(send.to), slices(&send.parts))))
        .collect()
}

#[test]
fn an_operation_has_its_steps_and_a_step_its_messages() {
    let set = ring();
    let ranks = run(&set, in_process_group(RANKS), Arc::new(NoObserver));
    for (rank, (well, spans)) in (0..).map(Rank).zip(&ranks) {
        assert!(well);
        let plan = set.plan(rank);
        let operations = inside(spans, None);
        assert_eq!(operations.len() as u64, REPEAT);
        for (op, (at, operation)) in (0..).zip(operations) {
            assert_eq!(operation.name, "operation");
            let fields = ["rank", "op", "steps"].map(|field| operation.number(field));
            assert_eq!(fields, [u64::from(rank.0), op, plan.steps.len() as u64]);

            let steps = inside(spans, Some(at));
            assert_eq!(steps.len(), plan.steps.len());
            for ((index, step), (at, span)) in (0..).zip(&plan.steps).zip(steps) {
                assert_eq!((span.name, span.number("index")), ("step", u64::from(index)));
                assert_eq!(span.fields["doing"], set.step_in_words(rank, index).unwrap());

                let posted = inside(spans, Some(at));
                let found: Vec<_> = posted
                    .iter()
                    .map(|(_, span)| (span.name, span.number("peer"), span.number("bytes")))
                    .collect();
                assert_eq!(found, messages(&set, plan, step), "{}", span.fields["doing"]);
                for (at, message) in posted {
                    assert_eq!([message.number("rank"), message.number("op")], [u64::from(rank.0), op]);
                    assert!(inside(spans, Some(at)).is_empty());
                }
            }
        }
        let sent = spans.iter().filter(|span| span.name == "send").count() as u64;
        assert_eq!(sent, REPEAT * u64::from(RANKS - 1), "a ring's hops");
        assert!(spans.iter().all(|span| span.holders == 0), "all are closed");
    }
}

/// Aborts the operation when rank 1 reaches a step.
#[derive(Debug)]
struct Fails {
    at: usize,
    transport: Group,
}

impl Observer for Fails {
    fn step(&self, rank: Rank, _: u64, step: usize, _: usize, _: &dyn Fn() -> String) {
        if (rank, step) == (Rank(1), self.at) {
            let cause = AbortCause::Failed("on purpose".to_owned());
            self.transport.abort(Abort { culprit: rank, cause, progress: Progress::default() });
        }
    }
}

#[test]
fn spans_of_an_operation_that_failed_are_closed() {
    let set = ring();
    let steps = &set.plan(Rank(1)).steps;
    let exchanges: Vec<usize> =
        (0..steps.len()).filter(|step| matches!(steps[*step], Step::Exchange { .. })).collect();
    // The abort is before rank 1 posts anything, or before its second exchange, when other ranks have
    // messages for it.
    for &at in &exchanges {
        let group = in_process_group(RANKS);
        let transport = group[1].clone();
        let ranks = run(&set, group, Arc::new(Fails { at, transport }));
        for (rank, (well, spans)) in ranks.iter().enumerate() {
            assert!(!well, "rank {rank}");
            let names = |name| spans.iter().filter(|span| span.name == name).count();
            assert_eq!(names("operation"), 1, "rank {rank}");
            assert!(names("step") < steps.len(), "rank {rank}");
            let open: Vec<&str> =
                spans.iter().filter(|span| span.holders > 0).map(|span| span.name).collect();
            assert_eq!(open, [""; 0], "rank {rank} failed at step {at}");
        }
        let last = ranks[1].1.iter().rfind(|span| span.name == "step").unwrap();
        // Rank 1 continues until it needs the group.
        assert!(last.number("index") >= at as u64);
    }
}
