//! Groups that do not form and runs that end: settings of the network, identities, ranks that are
//! not there or fail. What is no refusal has exit code 1, on every process that has started.

use std::net::{TcpListener, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use kyklos::backend::cpu::CpuBackend;
use kyklos::backend::{Backend, Control, Device};
use kyklos::plan::{ProvedPlans, check};
use kyklos::{
    Attention, Error, Mesh, Observer, PlacementKind, RunOptions, Session, SessionOptions, Split, Strategy,
    plan_forward,
};
use kyklos_transport::{
    Abort, AbortCause, Group, Progress, Rank, RefusalReason, Tag, Transport, Vote, in_process_group,
};

use super::{Place, of_calls, of_program, problem, tensor, without};
use crate::groups::on_loss::killed;
use crate::support::transcript_holds;

const COMMANDS: &[&str] = &[
    "ATTEND --ranks 2 --link-mtu 9000",
    "ATTEND --ranks 2 --transport quic --link-mtu 1200",
    "ATTEND --ranks 2 --transport quic --network tcp --link-mtu 9000",
    "ATTEND --ranks 2 --transport quic --congestion bbr",
    "ATTEND --ranks 2 --transport quic --congestion fixed:9MB",
    "ATTEND --ranks 2 --transport quic --link-mtu 9000 --congestion fixed:64KiB",
    "launch -n 2 -- ATTEND --congestion fixed:5GiB",
    "ATTEND --ranks 4 --transport quic --net-memory 20MiB",
    "ATTEND --ranks 2 --lanes 2",
    "ATTEND --ranks 2 --shared-memory off",
    "launch -n 2 -- ATTEND --lanes 17",
    "ATTEND --device cpu --rank 1 --world 2 --coordinator 127.0.0.1:PORT --identity DIR/none.pem",
    "ATTEND --device cpu --rank 1 --world 2 --coordinator 127.0.0.1:PORT --identity DIR/ids/rank-0.pem",
    "KYKLOS_JOB_ID=other ATTEND --device cpu --rank 1 --world 2 --coordinator 127.0.0.1:PORT --identity DIR/ids/rank-1.pem",
    "ATTEND --device cpu --rank 1 --world 2 --coordinator 127.0.0.1:PORT --identity DIR/expired.pem",
    "ATTEND --device cpu --rank 1 --world 2 --coordinator 127.0.0.1:PORT --identity DIR/ids/rank-1.pem --revoked DIR/revoked",
    "ATTEND --device cpu --rank 1 --world 2 --coordinator 127.0.0.1:PORT --identity DIR/ids/rank-1.pem --revoked DIR/revoked-wrong",
    "ATTEND --device cpu --rank 1 --world 2 --coordinator 127.0.0.1:PORT --identity DIR/ids/rank-1.pem --join-deadline 1",
    "ATTEND --device cpu --rank 0 --world 2 --coordinator 127.0.0.1:PORT --identity DIR/ids/rank-0.pem --join-deadline 1",
    "ATTEND --transport tcp",
    "ATTEND --device cpu --rank 1 --world 2 --coordinator 127.0.0.1:PORT --identity DIR/ids/rank-1.pem --bind 192.0.2.1",
    "ATTEND --device cpu --join kyklos1.0000000000000000000000000000000000000000000000000000000000000000.00000000000000000000000000000000@127.0.0.1:PORT --identity DIR/none/own.pem",
    "KYKLOS_LAUNCH=1 RANK=0 WORLD_SIZE=1 ATTEND",
];

#[test]
fn helpers() {
    transcript_holds("helpers", &of_program(HELPERS));
}

#[test]
fn groups() {
    transcript_holds("groups", &(of_program(COMMANDS) + &of_neighbours()));
}

/// Beside another process: its port is taken, or it is a rank 0 with an identity of another
/// authority.
fn of_neighbours() -> String {
    let place = Place::new();
    let at = "--world 2 --coordinator 127.0.0.1:PORT";
    let (udp, tcp) =
        (UdpSocket::bind(("127.0.0.1", place.port)), TcpListener::bind(("127.0.0.1", place.port)));
    let mut transcript =
        place.says(&format!("ATTEND --device cpu --rank 0 {at} --identity DIR/ids/rank-0.pem"));
    transcript += &place.says("ATTEND --device cpu --metrics 127.0.0.1:PORT");
    drop((udp.unwrap(), tcp.unwrap()));
    let mut zero = place.start(&format!("ATTEND --device cpu --rank 0 {at} --identity DIR/ids/rank-0.pem"));
    transcript += &place.says(&format!("ATTEND --device cpu --rank 1 {at} --identity DIR/other/rank-1.pem"));
    zero.kill().unwrap();
    zero.wait().unwrap();
    transcript
}

#[test]
fn runs() {
    transcript_holds("runs", &(of_a_killed_rank() + &of_calls(of_transports()) + &of_calls(of_backends())));
}

fn of_a_killed_rank() -> String {
    let folder = tempfile::tempdir().unwrap();
    let ended =
        killed("2", &[1], Duration::from_millis(50), &["--repeat", "1000000"], &folder.path().join("output"));
    assert_eq!(ended.code, Some(1), "{}", ended.said);
    let error = ended.lines.iter().find_map(|line| Some(&line[line.find("rank 1 died: ")?..]));
    let error = without(error.unwrap_or(&ended.said), "nothing heard of it for ", " s (");
    // How far the rank was, and for what the others waited, depends on timing.
    let error = error.split(" (operation").next().unwrap_or_default();
    format!(
        "$ kyklos launch -n 2 -- attend …, whose rank 1 is killed\n[0] error: …{error} (…\nexit code 1\n\n"
    )
}

fn pair() -> [Group; 2] {
    in_process_group(2).try_into().unwrap()
}

fn of_transports() -> Vec<(&'static str, Error)> {
    let tag = Tag { op: 0, message: 0 };
    let receive = |transport: &dyn Transport, from, within| {
        Error::from(pollster::block_on(transport.post_recv(Rank(from), tag, &[64], within)).unwrap_err())
    };
    let (soon, later) = (Duration::from_millis(50), Duration::from_secs(20));
    let agree = |second: Vote| {
        let [a, b] = pair();
        let others = b.agree(second, later);
        let mine = pollster::block_on(a.agree(Vote::ready([1; 32]), later)).unwrap_err();
        let _ = pollster::block_on(others);
        Error::from(mine)
    };
    let [waits, silent] = pair();
    let late = receive(&*waits, 1, soon);
    let to_itself = receive(&*waits, 0, soon);
    let again = receive(&*waits, 1, soon);
    drop(silent);
    let [left, dies] = pair();
    drop(dies);
    let text = "rank 1: the refusal's own words".to_owned();
    vec![
        ("Transport::post_recv from a rank whose endpoint is gone", receive(&*left, 1, later)),
        ("Transport::post_recv of a message that does not come in time", late),
        ("Transport::post_recv from the rank itself", to_itself),
        ("Transport::post_recv of a message for the second time", again),
        (
            "Transport::agree, where rank 1 cannot run the call",
            agree(Vote::Refuse { reason: RefusalReason::WrongRequest, text }),
        ),
        ("Transport::agree, where rank 1 has another plan", agree(Vote::ready([2; 32]))),
    ]
}

fn of_backends() -> Vec<(&'static str, String)> {
    let placement = PlacementKind::Contiguous;
    let ring =
        plan_forward(&problem(), Mesh::new(1, 2).unwrap(), placement, &Split::Even, Strategy::Ring).unwrap();
    let mut tampered = ring.clone();
    tampered.plans[0].steps.pop();
    let cancelled = Control::new(Arc::new(AtomicBool::new(true))).piece_done();
    let memory = CpuBackend::new().alloc("kv", usize::MAX / 4).map(drop);
    let call = Attention::planned(&Arc::new(ProvedPlans::new(ring).unwrap()));
    let run = |transport, run| {
        let options = SessionOptions { deadline: Duration::from_secs(20), run, ..SessionOptions::default() };
        let mut session = Session::with_options(transport, Device::cpu(), options);
        session.attend(&call, &tensor(4, 2), &tensor(4, 1), &tensor(4, 1))
    };
    let [stays, goes] = pair();
    let lost = std::thread::scope(|scope| {
        let observer = Arc::new(Fails(goes.clone()));
        scope.spawn(move || run(goes, RunOptions { observer, ..RunOptions::default() }));
        run(stays, RunOptions::default()).unwrap_err().to_string()
    });
    vec![
        // The error names one of the pending messages behind this. The choice depends on timing.
        (
            "Session::attend, where rank 1 loses its device",
            lost.split("; ").next().unwrap_or_default().to_owned(),
        ),
        ("plan::check of a plan without its last step", check(&tampered).unwrap_err().to_string()),
        ("Backend::alloc of more memory than there is", memory.unwrap_err().to_string()),
        ("Control::piece_done after the call was cancelled", cancelled.unwrap_err().to_string()),
    ]
}

/// Ends the group at the first step of its rank, when the peer waits for a message.
#[derive(Debug)]
struct Fails(Group);

impl Observer for Fails {
    fn step(&self, culprit: Rank, _: u64, step: usize, _: usize, _: &dyn Fn() -> String) {
        if step == 0 {
            std::thread::sleep(Duration::from_millis(500));
            let cause = AbortCause::Failed("its device was lost".to_owned());
            self.0.abort(Abort { culprit, cause, progress: Progress::default() });
        }
    }
}

/// Of helpers and of their invitations.
const HELPERS: &[&str] = &[
    "help-out kyklos1.nothing",
    "help-out TOKEN --device tpu",
    "help-out TOKEN --memory much",
    "KYKLOS_JOIN=x help-out --device cpu",
    "helpers invite ../x --address studio",
    "helpers invite kitchen --address studio:29700",
    "helpers invite kitchen --port 0",
    "helpers remove kitchen",
    "KYKLOS_ANNOUNCE=no help-out",
    "helpers forecast --device tab",
    "helpers forecast --helper-speed 0",
    "helpers forecast --pairs-per-s many",
    "helpers forecast --link wifi",
    "helpers forecast --wire f4",
];
