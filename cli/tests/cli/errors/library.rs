//! Refusals for callers of the library, and errors of runs. The tests cause each of them.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use bytes::Bytes;
use kyklos::backend::cpu::CpuBackend;
use kyklos::backend::{Backend, Control, Device};
use kyklos::host::{Tensors, shard};
use kyklos::plan::{PlanSet, ProvedPlans, check};
use kyklos::{
    Attention, AttentionProblem, BiasKind, BiasTensor, Dtype, Error, Mask, Mesh, Observer, Output,
    PlacementKind, RunOptions, Session, SessionOptions, Split, Strategy, Tensor, TokenRuns, plan_forward,
    plan_rows,
};
use kyklos_transport::quic::{ClusterAuthority, Identity, JobId, QuicConfig, QuicTransport, Revoked};
use kyklos_transport::{
    Abort, AbortCause, Progress, Rank, RefusalReason, Tag, Transport, Vote, in_process_group,
};

use super::Entry;
use crate::free_address::free_address;

pub(super) fn problem() -> AttentionProblem {
    AttentionProblem::new([1, 8, 2, 1, 8], Dtype::F32, Mask::full()).unwrap()
}

fn ring() -> PlanSet {
    plan_forward(
        &problem(),
        Mesh::new(1, 2).unwrap(),
        PlacementKind::Contiguous,
        &Split::Even,
        Strategy::Ring,
    )
    .unwrap()
}

/// Ends the group at the first step of its rank, when the peer waits for a message.
#[derive(Debug)]
struct Fails(Arc<dyn Transport>);

impl Observer for Fails {
    fn step(&self, culprit: Rank, _: u64, step: usize, _: usize, _: &dyn Fn() -> String) {
        if step == 0 {
            std::thread::sleep(Duration::from_millis(500));
            let cause = AbortCause::Failed("its device was lost".to_owned());
            self.0.abort(Abort { culprit, cause, progress: Progress::default() });
        }
    }
}

/// Runs a rank of `ring` with these queries.
fn run_rank(transport: Arc<dyn Transport>, queries: usize) -> Result<Output, Error> {
    run_rank_with(transport, queries, RunOptions::default())
}

fn run_rank_with(transport: Arc<dyn Transport>, queries: usize, run: RunOptions) -> Result<Output, Error> {
    let plans = Arc::new(ProvedPlans::new(ring()).unwrap());
    let zeros =
        |tokens, heads| Tensor::new([1, tokens, heads, 8], vec![0.0_f32; tokens * heads * 8]).unwrap();
    let options = SessionOptions { deadline: Duration::from_secs(20), run, ..SessionOptions::default() };
    let mut session = Session::with_options(transport, Device::cpu(), options);
    session.attend(&Attention::planned(&plans), &zeros(queries, 2), &zeros(4, 1), &zeros(4, 1))
}

pub(super) fn entry(when: &str, sentence: impl ToString, means: &'static str) -> Entry {
    Entry { when: when.to_owned(), sentence: sentence.to_string(), means }
}

/// Refusals of constructors and of calls with tensors.
pub(super) fn refusals() -> Vec<Entry> {
    let zeros = |bytes: usize| Bytes::from(vec![0; bytes]);
    let whole = Tensors { q: zeros(8 * 2 * 8 * 4), k: zeros(8 * 8 * 4), v: zeros(8 * 8 * 4), bias: None };
    let bias = |batch, kv_len| {
        problem()
            .with_keys(kv_len)
            .unwrap()
            .with_bias(Some(BiasTensor { kind: BiasKind::Additive, batch, heads: 1, shared_rows: false }))
            .unwrap_err()
    };
    let with_bias = problem()
        .with_bias(Some(BiasTensor { kind: BiasKind::Additive, batch: 1, heads: 1, shared_rows: false }))
        .unwrap();
    let one = Mesh::new(1, 1).unwrap();
    let dense =
        plan_forward(&with_bias, one, PlacementKind::Contiguous, &Split::Even, Strategy::Dense).unwrap();
    let short = Tensors { q: zeros(8), ..whole.clone() };
    let mut group = in_process_group(2).into_iter();
    let (first, second) = (group.next().unwrap(), group.next().unwrap());
    let short_q = std::thread::scope(|scope| {
        scope.spawn(|| run_rank(second, 4));
        run_rank(first, 3).unwrap_err()
    });
    vec![
        entry(
            "AttentionProblem::with_sinks with 3 of them for 2 heads",
            problem().with_sinks(vec![0.0; 3]).unwrap_err(),
            "One logit for each query head.",
        ),
        entry(
            "AttentionProblem::with_bias, a tensor of 3 batch entries",
            bias(3, 8),
            "One for each batch entry, or one for all.",
        ),
        entry(
            "Mask::per_entry with an empty list",
            Mask::per_entry(Vec::new()).unwrap_err(),
            "A batch has at least one entry.",
        ),
        entry(
            "Mask::and of masks for 2 and for 3 batch entries",
            "causal//full".parse::<Mask>().unwrap().and(Mask::key_padding(vec![1, 2, 3])).unwrap_err(),
            "The intersection is made entry by entry.",
        ),
        entry("AttentionProblem::with_bias without keys", bias(1, 0), "Its rows would be empty."),
        entry(
            "plan_rows with row 8",
            plan_rows(&problem(), TokenRuns::contiguous(8..9)).unwrap_err(),
            "Rows count from 0.",
        ),
        entry(
            "host::shard with a short q",
            shard(&ring(), Rank(0), &short).unwrap_err(),
            "Tensors are whole, in the problem's dtype.",
        ),
        entry(
            "host::shard without the attention bias tensor that the problem has",
            shard(&dense, Rank(0), &whole).unwrap_err(),
            "The problem and the tensors must agree.",
        ),
        entry(
            "Session::attend with plans and a short q",
            short_q,
            "A rank passes the tokens that the plans give it.",
        ),
    ]
}

/// Errors that can end an accepted call. Exit code 1.
pub(super) fn of_runs() -> Vec<Entry> {
    let pair = || {
        let mut group = in_process_group(2).into_iter();
        (group.next().unwrap(), group.next().unwrap())
    };
    let tag = Tag { op: 0, message: 0 };
    let receive = |transport: &dyn Transport, from, within| {
        Error::from(pollster::block_on(transport.post_recv(Rank(from), tag, &[64], within)).unwrap_err())
    };
    let agree = |first: Vote, second: Vote| {
        let (a, b) = pair();
        let deadline = Duration::from_secs(20);
        let others = b.agree(second, deadline);
        let mine = pollster::block_on(a.agree(first, deadline)).unwrap_err();
        let _ = pollster::block_on(others);
        Error::from(mine)
    };
    let ready = |byte| Vote::ready([byte; 32]);

    let (waits, silent) = pair();
    let late = receive(&*waits, 1, Duration::from_millis(50));
    let to_itself = receive(&*waits, 0, Duration::from_millis(50));
    let again = receive(&*waits, 1, Duration::from_millis(50));
    let (left, dies) = pair();
    drop(dies);
    let died = receive(&*left, 1, Duration::from_secs(20));
    drop(silent);

    let (stays, goes) = pair();
    let in_a_run = std::thread::scope(|scope| {
        let observer = Arc::new(Fails(goes.clone()));
        scope.spawn(move || run_rank_with(goes, 4, RunOptions { observer, ..RunOptions::default() }));
        run_rank(stays, 4).unwrap_err()
    });
    let mut tampered = ring();
    tampered.plans[0].steps.pop();
    let backend = CpuBackend::new();
    let memory = backend.alloc("kv", usize::MAX / 4).map(|_| ()).unwrap_err();
    vec![
        entry(
            "a rank's process is gone",
            died,
            "See that rank's own last lines, and `kyklos doctor` with --record.",
        ),
        entry(
            "the same inside a run",
            // The error names one of the pending messages. The choice depends on timing.
            in_a_run.to_string().split("; ").next().unwrap_or_default(),
            "A pending message follows, with the bytes that were transferred.",
        ),
        entry(
            "a message does not come in time",
            late,
            "The peer runs, but is slower than --deadline or waits itself: `kyklos doctor` names the rank.",
        ),
        entry(
            "a rank cannot run what the others can",
            agree(
                ready(1),
                Vote::Refuse {
                    reason: RefusalReason::WrongRequest,
                    text: "rank 1: the refusal's own words".to_owned(),
                },
            ),
            "All ranks report the message and exit code of the lowest rank that refused.",
        ),
        entry(
            "ranks were started with different options or files",
            agree(ready(1), ready(2)),
            "Give every rank the same command line and the same input.",
        ),
        entry("a transport is used wrongly", to_itself, "A bug of the caller of the library."),
        entry("a message is received twice", again, "A bug of the caller of the library."),
        entry(
            "a plan was tampered with",
            check(&tampered).unwrap_err(),
            "A bug of a strategy: please report it.",
        ),
        entry(
            "a device has no such memory to give",
            memory,
            "Fewer tokens a rank (more ranks), or another strategy: `kyklos plan` says what each needs.",
        ),
        entry("the call's cancel token rose", cancelled(), "The caller cancelled; the group ends."),
    ]
}

/// The error that a backend gets between two pieces of a cancelled call.
fn cancelled() -> Error {
    Control::new(Arc::new(AtomicBool::new(true))).piece_done().unwrap_err()
}

/// The error of a rank that finds its own key in the list of revoked keys.
fn revoked(job: JobId, coordinator: SocketAddr, identity: Identity) -> String {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("revoked");
    std::fs::write(&path, identity.key_hash().unwrap().to_string()).unwrap();
    let revoked = Some(Revoked::read_file(&path).unwrap());
    let config = QuicConfig::new(Rank(1), 2, job, coordinator, identity);
    let connect_deadline = Duration::from_secs(1);
    kyklos_cli::printed(
        QuicTransport::connect(QuicConfig { revoked, connect_deadline, ..config }).unwrap_err(),
    )
}

fn unreadable_list() -> String {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("revoked");
    std::fs::write(&path, "rank 1").unwrap();
    let error = kyklos_cli::printed(Revoked::read_file(&path).unwrap_err());
    error.replace(folder.path().to_str().unwrap(), "DIR")
}

/// Groups that do not form. Exit code 1.
pub(super) fn of_groups() -> Vec<Entry> {
    let job = JobId::from_name("train");
    let (ours, theirs) = (ClusterAuthority::new(job).unwrap(), ClusterAuthority::new(job).unwrap());
    let busy = free_address();
    let join = |rank, job, coordinator: SocketAddr, identity| {
        // A long deadline if a peer answers.
        let patience = match (coordinator == busy, rank) {
            (true, 0) => 3,
            (true, _) => 20,
            _ => 1,
        };
        let connect_deadline = Duration::from_secs(patience);
        let config =
            QuicConfig { connect_deadline, ..QuicConfig::new(Rank(rank), 2, job, coordinator, identity) };
        let error = kyklos_cli::printed(QuicTransport::connect(config).unwrap_err());
        error.replace(&coordinator.to_string(), "HOST:PORT")
    };
    let issue = |authority: &ClusterAuthority, rank| authority.issue(Rank(rank)).unwrap();
    let join = &join;
    let (stranger, no_zero, no_one) = std::thread::scope(|scope| {
        let spawn = |rank, coordinator, identity| scope.spawn(move || join(rank, job, coordinator, identity));
        let _refused = spawn(0, busy, issue(&ours, 0));
        let all = [
            spawn(1, busy, issue(&theirs, 1)),
            spawn(1, free_address(), issue(&ours, 1)),
            spawn(0, free_address(), issue(&ours, 0)),
        ];
        let [stranger, no_zero, no_one] = all.map(|thread| thread.join().unwrap());
        (stranger, no_zero, no_one)
    });
    // The message names authorities by the hash of their keys. The keys are new in each run.
    let (says, rest) = stranger.split_once(" trusts ").unwrap_or((&stranger, ":"));
    let stranger = format!("{says} trusts …:{}", rest.split_once(':').unwrap_or_default().1);
    vec![
        entry(
            "an identity of another authority",
            stranger,
            "`kyklos certs show` prints the subject of a file and the authorities that it trusts; issue all files from one authority.",
        ),
        entry(
            "the identity of another rank",
            join(1, job, free_address(), issue(&ours, 0)),
            "`{rank}` in --identity stands for the number of the rank.",
        ),
        entry(
            "the identity of another job",
            join(1, JobId::from_name("other"), free_address(), issue(&ours, 1)),
            "--job of `kyklos certs issue` sets the job.",
        ),
        entry(
            "rank 0 is not there",
            no_zero,
            "Start rank 0, and open its UDP port; --join-deadline is how long the others wait.",
        ),
        entry(
            "no rank but 0 comes",
            no_one,
            "Start the others with the address of this rank; read their errors.",
        ),
        entry(
            "an identity that has been revoked",
            revoked(job, free_address(), issue(&ours, 1)),
            "Its key is in the list of --revoked; a new identity has another key.",
        ),
        entry(
            "a list of revoked keys of which a line cannot be read",
            unreadable_list(),
            "A list with errors is not used: correct the line, or start it with #.",
        ),
        entry(
            "an identity's file is not there",
            Identity::read_file(Path::new("/nowhere/rank-0.pem")).unwrap_err(),
            "--identity or KYKLOS_IDENTITY names another file.",
        ),
    ]
}
