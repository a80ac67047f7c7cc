//! The examples, as cargo has built them beside this test.

#![expect(clippy::unwrap_used, reason = "an example that fails is a failed test")]

use std::process::Command;

/// Runs an example, without the variables of a launcher, and returns what it prints.
fn run(name: &str) -> String {
    let folder = std::env::current_exe().unwrap().parent().unwrap().parent().unwrap().join("examples");
    let output = Command::new(folder.join(name))
        .env_clear()
        .envs(std::env::vars().filter(|(name, _)| name == "PATH" || name.starts_with("XDG")))
        .output()
        .unwrap_or_else(|error| panic!("{name}: {error}: `cargo test` without --test builds the examples"));
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{name}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

#[test]
fn hello() {
    let said = run("hello");
    assert_eq!(said.lines().map(|line| &line[..7]).collect::<Vec<_>>(), ["rank 0:", "rank 1:"]);
}

#[test]
fn two_ranks_quic() {
    // Each rank sends its keys and values once: 2 tensors of 64 tokens, 8 heads of dim 64, f32.
    assert!(run("two_ranks_quic").contains("rank 1: log-sum-exp 12.8520, 262144 bytes sent"));
}

#[test]
fn forty_layers() {
    assert_eq!(run("forty_layers").matches("40 layers").count(), 2);
}

#[test]
fn unlike_devices() {
    assert!(run("unlike_devices").contains(" tokens, computed for"));
}

#[test]
fn from_launcher() {
    assert!(run("from_launcher").contains("rank 0: output of shape [1, 256, 8, 64]"));
}

#[test]
fn kv_cache() {
    // 40 + 24 tokens of the prompt, then 66 in blocks of 16 to the rank with the fewest.
    let said = run("kv_cache");
    assert!(
        said.contains("rank 0: keys and values of 72 of 130")
            && said.contains("rank 1: keys and values of 58 of 130"),
        "{said}"
    );
}
