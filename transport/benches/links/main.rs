//! Cost of a byte between two processes: raw TCP, TLS over TCP and this transport, in turns, as
//! CSV.
//!
//! `cargo bench -p kyklos-transport --features quic --bench links -- [--rounds N] [--mib N]
//! [--modes M,M,…]` `  [--here ADDRESS --there ADDRESS --there-by COMMAND] [--peer COMMAND]`
//!
//! A mode is `tcp`, `tls`, or `quic` with what is said of the link: `quic` (nothing), `quic:1500`,
//! `quic:9000`, `quic:1500:3000000` (a fixed window), `quic:tcp` (the same packets in TCP),
//! `shared` (through memory that both processes share). `x4` after it has four lanes. `-hop` after
//! that sends as much the other way at the same time, as two neighbours of a ring do; `-ping` runs
//! agreements beside it and times them. The receiving end is a process of its own, started by
//! `COMMAND`, such as `ip netns exec b`; `--peer` is a program that prints rows of the same kind
//! for itself. CPU seconds are user and system time of both processes while the bytes move, in
//! ticks of 10 ms.

mod ends;
mod streams;

use std::io::{BufRead, BufReader, Write};
use std::net::IpAddr;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use ends::Ended;
use kyklos_transport::quic::{Carrier, Congestion, LinkSettings};

/// The arguments of the command line.
#[derive(Clone, Debug)]
struct Args {
    rounds: usize,
    mib: usize,
    modes: Vec<Mode>,
    here: IpAddr,
    there: IpAddr,
    there_by: Vec<String>,
    peer: Option<String>,
}

/// One way to move bytes.
#[derive(Clone, Debug)]
pub(crate) struct Mode {
    name: String,
    kind: Kind,
    /// Sends as much the other way at the same time.
    hop: bool,
    /// Runs agreements beside the transfer.
    ping: bool,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    Tcp,
    Tls,
    Quic(LinkSettings),
}

impl Mode {
    fn parse(name: &str) -> Self {
        let (plain, ping) = name.strip_suffix("-ping").map_or((name, false), |plain| (plain, true));
        let (plain, hop) = plain.strip_suffix("-hop").map_or((plain, false), |plain| (plain, true));
        let (plain, lanes) = match plain.rsplit_once('x') {
            Some((plain, lanes)) => (plain, lanes.parse().expect("a number of lanes")),
            None => (plain, 1),
        };
        let words: Vec<&str> = plain.split(':').collect();
        let link = LinkSettings { lanes, shared_memory: false, ..LinkSettings::default() };
        let kind = match words[..] {
            ["tcp"] => Kind::Tcp,
            ["tls"] => Kind::Tls,
            ["quic"] => Kind::Quic(link),
            ["shared"] => Kind::Quic(LinkSettings { shared_memory: true, ..link }),
            ["quic", "tcp"] => Kind::Quic(LinkSettings { carrier: Carrier::Tcp, ..link }),
            ["quic", mtu] => Kind::Quic(LinkSettings { mtu: mtu.parse().ok(), ..link }),
            ["quic", mtu, window] => {
                let window_bytes = window.parse().expect("a number of bytes");
                let congestion = Congestion::Fixed { window_bytes };
                Kind::Quic(LinkSettings { mtu: mtu.parse().ok(), congestion, ..link })
            }
            _ => panic!("there is no mode {name}"),
        };
        assert!(matches!(kind, Kind::Quic(_)) || !(hop || ping), "{name}: streams of TCP go one way");
        Self { name: name.to_owned(), kind, hop, ping }
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    if let [serve, rest @ ..] = &arguments[..]
        && serve == "--serve"
    {
        return ends::serve(rest);
    }
    let args = parse(&arguments);
    println!(
        "round,mode,mib,seconds,mib_per_s,cpu_s_per_gib,of_it_sending,ping_p50_ms,ping_p99_ms,packets_lost"
    );
    let mut rows: Vec<(String, Ended)> = Vec::new();
    for round in 0..args.rounds {
        for (index, mode) in args.modes.iter().enumerate() {
            let port = 29_700 + u16::try_from((round * args.modes.len() + index) % 1000).unwrap_or(0);
            tell(&mut rows, round, &mode.name, run(&args, mode, port));
        }
        for (mode, ended) in args.peer.iter().flat_map(|peer| ask_peer(peer, args.mib)) {
            tell(&mut rows, round, &mode, ended);
        }
    }
    summarise(&rows);
}

fn parse(arguments: &[String]) -> Args {
    let mut args = Args {
        rounds: 5,
        mib: 1024,
        modes: ["tcp", "tls", "quic:1500", "quic:9000", "quic"].map(Mode::parse).to_vec(),
        here: IpAddr::from([127, 0, 0, 1]),
        there: IpAddr::from([127, 0, 0, 1]),
        there_by: Vec::new(),
        peer: None,
    };
    for pair in arguments.chunks(2) {
        let [name, value] = pair else { panic!("{pair:?} has no value") };
        match name.as_str() {
            "--rounds" => args.rounds = value.parse().expect("a number"),
            "--mib" => args.mib = value.parse().expect("a number"),
            "--modes" => args.modes = value.split(',').map(Mode::parse).collect(),
            "--here" => args.here = value.parse().expect("an address"),
            "--there" => args.there = value.parse().expect("an address"),
            "--there-by" => args.there_by = value.split_whitespace().map(str::to_owned).collect(),
            "--peer" => args.peer = Some(value.clone()),
            _ => panic!("there is no {name}"),
        }
    }
    args
}

/// One transfer in one mode.
fn run(args: &Args, mode: &Mode, port: u16) -> Ended {
    let folder = tempfile::tempdir().expect("a folder for identities");
    let identity = ends::issue(folder.path());
    let own = std::env::current_exe().expect("this program");
    let mut command: Vec<String> = args.there_by.clone();
    command.push(own.to_string_lossy().into_owned());
    let mut server = Command::new(&command[0])
        .args(&command[1..])
        .args(["--serve", &mode.name, &format!("{}:{port}", args.there), &args.mib.to_string()])
        .arg(folder.path().join("rank-0.pem"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the other end");
    let mut lines = BufReader::new(server.stdout.take().expect("its words")).lines();
    let mut next = || lines.next().and_then(Result::ok).expect("a word of the other end");
    let certificate = next();
    let mut ended = ends::dial(mode, (args.here, args.there, port), args.mib, &certificate, &identity);
    ended.cpu_receiving_s = next().parse().expect("CPU seconds");
    wait(&mut server);
    ended
}

fn wait(server: &mut Child) {
    drop(server.stdin.take());
    for _ in 0..200 {
        match server.try_wait() {
            Ok(Some(status)) => return assert!(status.success(), "the other end failed"),
            _ => std::thread::sleep(Duration::from_millis(50)),
        }
    }
    let _ = server.kill();
    panic!("the other end does not end");
}

/// Rows of another program: mode, seconds, CPU seconds of the sender, CPU seconds of the receiver,
/// MiB, whether both ways.
fn ask_peer(command: &str, mib: usize) -> Vec<(String, Ended)> {
    let output =
        Command::new("sh").args(["-c", &format!("{command} {mib}")]).stderr(Stdio::inherit()).output();
    let output = output.expect("the peer");
    assert!(output.status.success(), "{command} failed");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let row = |line: &str| {
        let words: Vec<&str> = line.split(',').collect();
        let number = |at: usize| words[at].parse::<f64>().expect("a number");
        let ended = Ended {
            mib: number(4),
            seconds: number(1),
            cpu_sending_s: number(2),
            cpu_receiving_s: number(3),
            ..Ended::default()
        };
        (words[0].to_owned(), ended)
    };
    text.lines().map(row).collect()
}

fn tell(rows: &mut Vec<(String, Ended)>, round: usize, mode: &str, ended: Ended) {
    let ping = |share| ended.ping_ms(share).map_or_else(String::new, |ms| format!("{ms:.2}"));
    println!(
        "{round},{mode},{:.0},{:.3},{:.0},{:.3},{:.3},{},{},{}",
        ended.mib,
        ended.seconds,
        ended.mib_per_s(),
        ended.cpu_s_per_gib(),
        ended.cpu_sending_s * 1024.0 / ended.mib,
        ping(0.5),
        ping(0.99),
        ended.packets_lost.map_or_else(String::new, |lost| lost.to_string()),
    );
    let _ = std::io::stdout().flush();
    rows.push((mode.to_owned(), ended));
}

/// Medians over the rounds, with minimum and maximum.
fn summarise(rows: &[(String, Ended)]) {
    let mut modes: Vec<&str> = Vec::new();
    for (mode, _) in rows {
        if !modes.contains(&mode.as_str()) {
            modes.push(mode);
        }
    }
    let of = |mode: &str, value: &dyn Fn(&Ended) -> f64| {
        let mut values: Vec<f64> =
            rows.iter().filter(|(of, _)| of == mode).map(|(_, ended)| value(ended)).collect();
        values.sort_by(f64::total_cmp);
        (values[values.len() / 2], values[0], values[values.len() - 1])
    };
    let tls = modes.contains(&"tls").then(|| of("tls", &Ended::cpu_s_per_gib).0);
    for mode in modes {
        let (cpu, least, most) = of(mode, &Ended::cpu_s_per_gib);
        let (rate, slowest, fastest) = of(mode, &Ended::mib_per_s);
        let beside = tls.map_or_else(String::new, |tls| format!(", {:.2} x tls", cpu / tls));
        println!(
            "# {mode}: {cpu:.3} CPU s per GiB ({least:.3} to {most:.3}){beside}; {rate:.0} MiB/s ({slowest:.0} to {fastest:.0})"
        );
    }
}
