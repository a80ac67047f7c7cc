//! Cost of a call on a session beyond the kernels: 64 tokens, 8 query heads, 2 key/value heads of
//! dim 64, f32. The floor of a call is a vote, an exchange for each hop, and the kernels; `compute`
//! is the time in kernels, `vote` a bare vote, `call_of_many` a call of many after one vote. It is
//! measured on the CPU and on the device `nothing`, which computes nothing: its calls cost what the
//! engine costs.
//!
//! `cargo bench -p kyklos --bench calls -- [--short] [--only DEVICE,TRANSPORT,RANKS]`

use std::time::{Duration, Instant};

use kyklos::backend::Device;
use kyklos::local::on_threads;
use kyklos::{Attention, CallShapes, Session, SessionOptions, Tensor};
use kyklos_backend_suite::DoNothing;
use kyklos_transport::quic::quic_loopback_group;
use kyklos_transport::{Group, Vote, in_process_group};

const TOKENS: usize = 64;

/// Medians in microseconds over the calls of rank 0.
struct Cost {
    call_us: f64,
    compute_us: f64,
    vote_us: f64,
    /// A call of many after one vote.
    of_many_us: f64,
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let calls = if arguments.iter().any(|argument| argument == "--short") { 200 } else { 3000 };
    // One row alone, so that runs of two programs can alternate.
    let only = arguments.iter().skip_while(|argument| *argument != "--only").nth(1);
    println!("device,transport,ranks,call_us,compute_us,vote_us,beyond_kernels_us,call_of_many_us");
    for device in [Device::cpu(), Device::new(DoNothing::open().expect("it always opens"))] {
        let quic = |ranks| quic_loopback_group(ranks).expect("loopback sockets");
        let groups: [(&str, Vec<Group>); 6] = [
            ("in-process", in_process_group(1)),
            ("in-process", in_process_group(2)),
            ("in-process", in_process_group(4)),
            ("one-device", in_process_group(2)),
            ("quic", quic(2)),
            ("quic", quic(4)),
        ];
        for (name, group) in groups {
            let (ranks, on) = (group.len(), device.info().backend);
            if only.is_some_and(|only| *only != format!("{on},{name},{ranks}")) {
                continue;
            }
            let Cost { call_us, compute_us, vote_us, of_many_us } =
                cost(group, &device, name == "one-device", calls);
            let beyond_us = call_us - compute_us;
            println!(
                "{on},{name},{ranks},{call_us:.1},{compute_us:.1},{vote_us:.1},{beyond_us:.1},{of_many_us:.1}"
            );
        }
    }
}

fn cost(group: Vec<Group>, device: &Device, one_device: bool, calls: usize) -> Cost {
    let sessions = if one_device {
        Session::on_one_device(group.clone(), device, &SessionOptions::default())
    } else {
        group.iter().map(|transport| Session::new(transport.clone(), device.clone())).collect()
    };
    let sessions: std::sync::Mutex<Vec<Option<Session>>> =
        std::sync::Mutex::new(sessions.into_iter().map(Some).collect());
    let ranks = group.len();
    let costs = on_threads(group, |transport| {
        let rank = transport.rank().0 as usize;
        let mut session =
            sessions.lock().expect("no rank panics")[rank].take().expect("one thread for each rank");
        let share = TOKENS / ranks;
        let tensor = |heads: usize| {
            let values = (0..share * heads * 64).map(|index| (index as f32 * 0.13).sin()).collect();
            Tensor::new([1, share, heads, 64], values)
        };
        let (q, k, v) = (tensor(8)?, tensor(2)?, tensor(2)?);
        let call = Attention::new();
        let (mut call_us, mut compute_us) = (Vec::new(), Vec::new());
        for turn in 0..calls + calls / 10 {
            let started = Instant::now();
            let output = session.attend(&call, &q, &k, &v)?;
            // The first calls plan, start threads and warm caches.
            if turn >= calls / 10 {
                call_us.push(micros(started.elapsed()));
                compute_us.push(output.report.compute_ns as f64 / 1e3);
            }
        }
        let mut of_many_us = Vec::new();
        let count = u32::try_from(calls).expect("few calls");
        let mut many = session.prepare(&call, &CallShapes::of(&q, &k), count)?;
        while many.remaining() > 0 {
            let started = Instant::now();
            many.run(&q, &k, &v)?;
            of_many_us.push(micros(started.elapsed()));
        }
        drop(many);
        let mut vote_us = Vec::new();
        for _ in 0..calls {
            let started = Instant::now();
            pollster::block_on(session.group().agree(Vote::ready([0; 32]), Duration::from_secs(60)))?;
            vote_us.push(micros(started.elapsed()));
        }
        let [call_us, compute_us, vote_us, of_many_us] =
            [call_us, compute_us, vote_us, of_many_us].map(median);
        Ok::<_, kyklos::Error>(Cost { call_us, compute_us, vote_us, of_many_us })
    });
    costs.into_iter().next().expect("at least one rank").expect("no rank fails")
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
