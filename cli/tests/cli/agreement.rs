//! Ranks that do not run the same call on the same inputs: one error on all ranks, which says what differs.

use crate::clusters::{BY_FLAGS, Cluster};
use crate::support::*;

fn cluster() -> Cluster {
    let cluster = Cluster::new();
    cluster.certs("issue -n 3 --job train");
    cluster
}

/// Checks that all three ranks end with exit code 2, without a report, and with one error that contains `words`.
#[track_caller]
fn refuse(cluster: &Cluster, call: &str, words: &[&str]) {
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
    for word in words {
        assert!(errors[0].contains(word), "{call}: `{word}` is not in: {}", errors[0]);
    }
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
    for (name, tensor) in all {
        // One number is different, in the copy of one rank.
        for (rank, at) in [(1, 0), (2, tensor.data.len() - 1)] {
            for other in 0..3 {
                copy(other, &all);
            }
            let mut changed = tensor.clone();
            changed.data[at] += 0.5;
            copy(rank, &all.map(|(other, tensor)| (other, if other == name { &changed } else { tensor })));
            let who = format!("rank {rank}");
            refuse(&cluster, "--input {dir}/input-{rank}", &[name, &who, "rank 0"]);
        }
    }
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
    let shape = "--shape 1,96,4,2,8";
    for (call, words) in [
        // {rank} in the values makes them differ.
        ("--shape 1,9{rank},4,2,8", &["tokens", "90", "91"][..]),
        (&format!("{shape} --seed {{rank}}"), &["--seed", "seed 0", "seed 1"]),
        (&format!("{shape} --mask window:{{rank}},0"), &["--mask", "window:0,0", "window:1,0"]),
        (&format!("{shape} --scale 0.{{rank}}5"), &["--scale", "0.05", "0.15"]),
        (&format!("{shape} --softcap 1{{rank}}"), &["--softcap", "10", "11"]),
        (&format!("{shape} --q-offset {{rank}}"), &["--q-offset"]),
        (&format!("{shape} --replicated 0..{{rank}}"), &["--replicated", "0..1"]),
        (&format!("{shape} --split 1,1,1{{rank}}"), &["share"]),
        (&format!("{shape} --repeat 1{{rank}}"), &["--repeat", "10", "11"]),
        (&format!("{shape} --trace {{dir}}/trace-{{rank}}"), &[]),
        (&format!("{shape} --report {{dir}}/page"), &[]),
    ] {
        if words.is_empty() {
            let outputs = cluster.run_command(&format!("attend --device cpu {call} {BY_FLAGS}"), "");
            outputs.iter().for_each(succeeds);
        } else {
            refuse(&cluster, call, &[words, &["rank 1", "rank 0"]].concat());
        }
    }
}
