//! `--split auto`: tokens by the speed of devices.
#![cfg(target_os = "linux")]

use crate::groups::clusters::{ATTEND, BY_FLAGS, Cluster};
use crate::support::*;

fn line(arguments: &str) -> std::process::Output {
    kyklos(&arguments.split_whitespace().collect::<Vec<_>>())
}

fn tokens(report: &serde_json::Value) -> Vec<u64> {
    report["per_rank"].as_array().unwrap().iter().map(|rank| rank["tokens"].as_u64().unwrap()).collect()
}

/// The result of three ranks is right, and no token is lost.
fn is_right(report: &serde_json::Value) {
    assert!(report["max_abs_error"].as_f64().unwrap() <= report["tolerance"].as_f64().unwrap(), "{report}");
    assert_eq!(tokens(report).iter().sum::<u64>(), 256);
}

#[test]
fn ranks_with_unlike_devices_measure_them_and_ranks_with_equal_ones_do_not() {
    let cluster = Cluster::new();
    cluster.certs("issue -n 3");
    let attend = format!("{ATTEND} {BY_FLAGS}");
    // Other numbers of threads make other devices: 1, 2 and 3.
    let threads: [&dyn Fn(u32) -> String; 2] =
        [&|rank| format!("RAYON_NUM_THREADS={}", rank + 1), &|_| "RAYON_NUM_THREADS=2".to_owned()];
    for (threads, differ) in threads.into_iter().zip([true, false]) {
        let children: Vec<_> = (0..3).map(|rank| cluster.start(rank, &attend, &threads(rank))).collect();
        let outputs: Vec<_> =
            children.into_iter().map(|child| finish(child, std::time::Duration::from_secs(180))).collect();
        outputs.iter().for_each(succeeds);
        let words = "queries are shared by the measured speed of the devices";
        assert!(!stderr(&outputs[1]).contains(words), "only rank 0 tells");
        is_right(&json(&outputs[0]));
        // Measured speeds may be alike; then shares are even, and nothing is told.
        if !differ {
            assert!(!stderr(&outputs[0]).contains(words), "{}", stderr(&outputs[0]));
            assert_eq!(tokens(&json(&outputs[0])), [86, 85, 85]);
        }
    }
}

#[test]
fn one_process_measures_equal_devices_only_when_asked() {
    let attend = "attend --shape 1,2048,4,2,64 --mask causal --ranks 2 --device cpu --verify --json";
    for split in ["", "--split auto"] {
        let output = line(&format!("{attend} {split}"));
        succeeds(&output);
        let report = json(&output);
        assert!(report["max_abs_error"].as_f64().unwrap() <= report["tolerance"].as_f64().unwrap());
        assert_eq!(tokens(&report).iter().sum::<u64>(), 2048);
        if split.is_empty() {
            assert_eq!(tokens(&report), [1024, 1024]);
        }
    }
}

#[test]
fn described_devices_of_unlike_speed_get_unlike_shares() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("two.toml");
    let device = |name: &str, gflop_per_s: u32| {
        format!(
            "[device.{name}]\nattention = [{{ dtype = \"f32\", head_dim = 64, gflop_per_s = {gflop_per_s}, share_of_it = 1.0 }}]\n\
             tile_rows = 16\ntile_keys = 16\nattend_step_us = 10\ncopy_gb_per_s = 20\nmemory = \"unified\"\n"
        )
    };
    let text = format!(
        "name = \"two\"\nabout = \"for a test\"\nbetween_hosts = \"line\"\n[link.line]\ngb_per_s = 1.0\nlatency_us = 50\n{}{}\
         [[host]]\nname = \"a\"\ndevices = [{{ kind = \"fast\", count = 1 }}]\n\
         [[host]]\nname = \"b\"\ndevices = [{{ kind = \"slow\", count = 1 }}]\n",
        device("fast", 900),
        device("slow", 300)
    );
    std::fs::write(&file, text).unwrap();
    let plan = format!("plan --shape 1,8000,4,2,64 --ranks 2 --hardware {} --json", file.display());
    let of = |options: &str| {
        let output = line(&format!("{plan} {options}"));
        succeeds(&output);
        json(&output)
    };
    let (auto, even) = (of(""), of("--split 1,1 --mesh 1x2"));
    let predicted = |plan: &serde_json::Value| plan["predicted_s"].as_f64().unwrap();
    assert!(predicted(&auto) < predicted(&even) * 0.7, "{} {}", predicted(&auto), predicted(&even));
    assert_eq!(predicted(&auto), predicted(&of("--split auto")));
}

#[test]
fn a_rank_that_leaves_the_shares_to_measurements_and_one_that_does_not_get_an_error_that_names_the_option() {
    let cluster = Cluster::new();
    cluster.certs("issue -n 3");
    for (one, others) in [("--split auto", ""), ("--fixed-order", ""), ("--split 1,1,1", "--split auto")] {
        let start = |rank| {
            let more = if rank == 1 { one } else { others };
            cluster.start(rank, &format!("{ATTEND} {BY_FLAGS} {more}"), "")
        };
        let children: Vec<_> = (0..3).map(start).collect();
        for child in children {
            let output = finish(child, std::time::Duration::from_secs(60));
            let option = one.split(' ').next().unwrap();
            assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
            assert!(
                stderr(&output).contains(option) && stderr(&output).contains("rank 1 has"),
                "{}",
                stderr(&output)
            );
        }
    }
}
