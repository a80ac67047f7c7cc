//! The fake NCCL by itself: a C++ program of several ranks uses it together with the fake driver.
#![cfg(target_os = "linux")]

use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::OnceLock;

use kyklos_fake_cuda::{cxx, folder, library_path};

/// The program, compiled once.
fn probe() -> &'static PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let source = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/nccl_probe.cpp"));
        let program = folder().join(format!("probe-{}", cxx::fingerprint(std::slice::from_ref(&source))));
        if !program.exists() {
            let unfinished = program.with_extension(std::process::id().to_string());
            let mut command = cxx::command("-O1");
            command.args(["-pthread", "-Wall", "-Wextra", "-o"]).arg(&unfinished).arg(&source);
            cxx::run(command.arg("-L").arg(folder()).args(["-l:libnccl.so.2", "-l:libcuda.so.1"]));
            std::fs::rename(&unfinished, &program).expect("target can be written");
        }
        program
    })
}

fn run(case: &str, ranks: u32, nccl: &str) -> Output {
    Command::new(probe())
        .args([case, &ranks.to_string()])
        .env("LD_LIBRARY_PATH", library_path())
        .env("KYKLOS_FAKE_CUDA", format!("devices={ranks},memory_mb=64"))
        .env("KYKLOS_FAKE_NCCL", nccl)
        .output()
        .expect("the probe starts")
}

#[track_caller]
fn ends(case: &str, ranks: u32, nccl: &str, code: i32, words: &str) {
    let output = run(case, ranks, nccl);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{case}, {ranks} ranks, {nccl}: {said}");
    assert!(said.contains(words), "{case}, {ranks} ranks, {nccl}: {said}");
}

#[test]
fn a_buffer_goes_around_a_ring_of_threads_and_of_processes() {
    for ranks in [2, 3, 8] {
        ends("threads", ranks, &format!("report=1,seed={ranks}"), 0, "fake NCCL: ");
        ends("processes", ranks, &format!("seed={ranks}"), 0, "");
    }
    ends("threads", 3, "launch_ms=5,delay_us=3000", 0, "");
}

#[test]
fn a_group_that_hangs_or_fails_ends_when_every_rank_aborts() {
    for ranks in [2, 3] {
        ends("hang", ranks, "fault_rank=1,hang_at=2", 0, "");
        ends("error", ranks, "fault_rank=1,async_at=2,code=6", 0, "");
    }
}

#[test]
fn the_death_of_a_process_is_seen_where_that_is_wanted() {
    ends("death", 3, "fault_rank=1,die_at=2,sees_death=1", 0, "told to die");
}

#[test]
fn a_communicator_fails_or_hangs_while_it_is_made() {
    ends("init-fails", 3, "fault_rank=1,init_fails=1,code=2", 0, "");
    ends("init-hangs", 3, "fault_rank=1,init_hangs=1", 0, "");
    ends("one-device", 2, "", 0, "");
}

#[test]
fn calls_that_are_too_early_are_refused() {
    ends("refused", 2, "launch_ms=500", 0, "");
}

#[test]
fn misuse_ends_the_process() {
    ends("no-memory", 2, "", 86, "memory that is not on device");
    ends("other-size", 2, "", 86, "bytes on the other");
    ends("used-after-abort", 1, "", 86, "which does not exist (any more)");
    ends("left", 2, "", 87, "left behind: 2 communicators");
    ends("threads", 2, "no_such_setting=1", 86, "KYKLOS_FAKE_NCCL has `no_such_setting=1`");
}
