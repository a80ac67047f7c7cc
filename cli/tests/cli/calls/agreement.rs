//! Ranks that do not run the same call on the same inputs: one error on all ranks, which says what
//! differs.

use std::time::Duration;

use kyklos_transport::quic::{Identity, JobId, QuicConfig, QuicTransport};
use kyklos_transport::{Rank, Vote};

use crate::free_address::free_address;
use crate::groups::clusters::{BY_FLAGS, Cluster};
use crate::support::*;

fn cluster() -> Cluster {
    let cluster = Cluster::new();
    cluster.certs("issue -n 3 --job train");
    cluster
}

/// What all three ranks say, with exit code 2 and without a report: one error.
fn says(cluster: &Cluster, call: &str) -> String {
    let outputs = cluster.run_command(&format!("attend --device cpu {call} {BY_FLAGS}"), "");
    let errors: Vec<String> = outputs
        .iter()
        .map(|output| {
            let text = stderr(output);
            assert_eq!(output.status.code(), Some(2), "{call}: {text}");
            assert_eq!(stdout(output), "", "{call}");
            text.lines().filter(|line| line.starts_with("error: ")).collect::<Vec<_>>().join("\n")
        })
        .collect();
    assert!(errors.iter().all(|error| *error == errors[0]), "{call}: {errors:#?}");
    assert_eq!(errors[0].lines().count(), 1, "{call}: {}", errors[0]);
    format!("$ kyklos attend --device cpu {call}\n{}\n\n", errors[0])
}

#[test]
fn ranks_whose_input_files_differ_end_with_one_error() {
    let cluster = cluster();
    let q = Tensor::made(&[1, 48, 4, 8], 1);
    let (k, v) = (Tensor::made(&[1, 48, 2, 8], 2), Tensor::made(&[1, 48, 2, 8], 3));
    let bias = Tensor::made(&[1, 1, 48, 48], 4);
    let sinks = Tensor::made(&[4], 5);
    let copy = |rank: u32, tensors: &[(&str, &Tensor)]| {
        write(&cluster.path(&format!("input-{rank}")), tensors);
    };
    let all = [("q", &q), ("k", &k), ("v", &v), ("bias", &bias), ("sinks", &sinks)];
    let mut transcript = String::new();
    for (name, tensor) in all {
        // One number is different, in the copy of one rank.
        for (rank, at) in [(1, 0), (2, tensor.data.len() - 1)] {
            for other in 0..3 {
                copy(other, &all);
            }
            let mut changed = tensor.clone();
            changed.data[at] += 0.5;
            copy(rank, &all.map(|(other, tensor)| (other, if other == name { &changed } else { tensor })));
            transcript += &format!("# rank {rank} has another number in {name}\n");
            transcript += &says(&cluster, "--input {dir}/input-{rank}");
        }
    }
    transcript_holds("unlike_inputs", &transcript);
}

#[test]
fn copies_of_one_input_are_one_input() {
    let cluster = cluster();
    let q = Tensor::made(&[1, 48, 4, 8], 1);
    let (k, v) = (Tensor::made(&[1, 48, 2, 8], 2), Tensor::made(&[1, 48, 2, 8], 3));
    for rank in 0..3 {
        // A tensor that is not used may differ.
        let extra = Tensor::made(&[7], rank);
        write(&cluster.path(&format!("input-{rank}")), &[("q", &q), ("k", &k), ("v", &v), ("extra", &extra)]);
    }
    // Ranks 0 and 1 share a file.
    std::fs::remove_file(cluster.path("input-1")).unwrap();
    std::fs::hard_link(cluster.path("input-0"), cluster.path("input-1")).unwrap();
    let call = "attend --device cpu --verify --mask causal --input {dir}/input-{rank} --output {dir}/output";
    for output in cluster.run_command(&format!("{call} {BY_FLAGS}"), "") {
        succeeds(&output);
    }
    let whole = std::fs::read(cluster.path("output")).unwrap();
    let here = [
        "attend",
        "--device",
        "cpu",
        "--ranks",
        "3",
        "--mask",
        "causal",
        "--input",
        cluster.path("input-2").to_str().unwrap(),
        "--output",
        cluster.path("here").to_str().unwrap(),
    ]
    .map(str::to_owned);
    succeeds(&kyklos(&here.each_ref().map(String::as_str)));
    assert!(whole == std::fs::read(cluster.path("here")).unwrap());
}

#[test]
fn ranks_whose_options_differ_end_with_one_error_that_names_the_option() {
    let cluster = cluster();
    // {rank} in the values makes them differ.
    let transcript: String = [
        "--shape 1,9{rank},4,2,8",
        "--shape 1,96,4,2,8 --seed {rank}",
        "--shape 1,96,4,2,8 --mask window:{rank},0",
        "--shape 1,96,4,2,8 --scale 0.{rank}5",
        "--shape 1,96,4,2,8 --softcap 1{rank}",
        "--shape 1,96,4,2,8 --q-offset {rank}",
        "--shape 1,96,4,2,8 --replicated 0..{rank}",
        "--shape 1,96,4,2,8 --split 1,1,1{rank}",
        "--shape 1,96,4,2,8 --repeat 1{rank}",
    ]
    .iter()
    .map(|call| says(&cluster, call))
    .collect();
    transcript_holds("unlike_options", &(transcript + &of_another_release(&cluster)));
    for may_differ in ["--trace {dir}/trace-{rank}", "--report {dir}/page"] {
        let call = format!("attend --device cpu --shape 1,96,4,2,8 {may_differ} {BY_FLAGS}");
        cluster.run_command(&call, "").iter().for_each(succeeds);
    }
}

/// What rank 0 says to a rank 1 of another release.
fn of_another_release(cluster: &Cluster) -> String {
    let address = free_address();
    let own = format!("--rank 0 --world 2 --coordinator {address} --identity {{dir}}/rank-0.pem");
    let zero = cluster.start(0, &format!("attend --device cpu --shape 1,96,4,2,8 {own}"), "");
    let identity = Identity::read_file(&cluster.path("rank-1.pem")).unwrap();
    let config = QuicConfig::new(Rank(1), 2, JobId::from_name("train"), address, identity);
    let transport = QuicTransport::connect(config).unwrap();
    // No copy of an input, and the first value with its length: the release is compared before all
    // others.
    let release = "kyklos 0.1.0";
    let note = [&[0; 16], &[release.len() as u8][..], release.as_bytes()].concat().into();
    let vote = Vote::Ready { plan_hash: *b"kyklos attend: terms, release 1.", note };
    pollster::block_on(transport.agree(vote, Duration::from_secs(60))).unwrap();
    let output = finish(zero, Duration::from_secs(60));
    let text = stderr(&output).replace(env!("CARGO_PKG_VERSION"), "…");
    assert_eq!(output.status.code(), Some(2), "{text}");
    format!("# rank 1 is of release 0.1.0\n{}\n", text.lines().last().unwrap_or_default())
}
