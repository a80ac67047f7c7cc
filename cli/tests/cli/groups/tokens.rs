//! Groups of processes that form by a token. No file is copied from one host to another.

use std::path::PathBuf;
use std::process::{Child, Output, Stdio};
use std::time::Duration;

use crate::free_address::free_address;
use crate::support::*;

const ATTEND: &str = "attend --shape 1,256,4,2,64 --mask causal --device cpu --verify --json";

/// A host per rank. Each host has its own folder.
struct Hosts {
    root: tempfile::TempDir,
    token: String,
}

impl Hosts {
    /// Rank 0 invites two other ranks.
    fn new() -> Self {
        let address = free_address().to_string();
        let root = tempfile::tempdir().unwrap();
        (0..3).for_each(|host| std::fs::create_dir(root.path().join(host.to_string())).unwrap());
        let mut command =
            command(&["certs", "invite", "--coordinator", &address, "--world", "3", "--job", "train"]);
        let output = command.current_dir(root.path().join("0")).output().unwrap();
        succeeds(&output);
        let told = stderr(&output);
        assert!(told.contains("--invite invitation.pem") && told.contains("UTC"), "{told}");
        let token = stdout(&output);
        let [token] = token.lines().collect::<Vec<_>>()[..] else { panic!("{token}") };
        assert!(token.starts_with("kyklos1.") && token.ends_with(&format!("@{address}")), "{token}");
        Self { token: token.to_owned(), root }
    }

    fn folder(&self, host: u32) -> PathBuf {
        self.root.path().join(host.to_string())
    }

    fn start(&self, host: u32, flags: &str, token: Option<&str>) -> Child {
        let arguments = format!("{ATTEND} {flags}");
        let mut command = command(&arguments.split_whitespace().collect::<Vec<_>>());
        command.envs(token.map(|token| ("KYKLOS_JOIN", token))).current_dir(self.folder(host));
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    fn run(&self, flags: [&str; 3], tokens: [Option<&str>; 3]) -> Vec<Output> {
        let children = (0..3).map(|host| self.start(host, flags[host as usize], tokens[host as usize]));
        let children: Vec<_> = children.collect();
        children.into_iter().map(|child| finish(child, Duration::from_secs(180))).collect()
    }
}

#[track_caller]
fn is_right(outputs: &[Output]) {
    outputs.iter().for_each(succeeds);
    let json = json(&outputs[0]);
    assert_eq!(json["ranks"], 3);
    assert!(json["max_abs_error"].as_f64().unwrap() <= json["tolerance"].as_f64().unwrap());
}

#[test]
fn three_processes_join_by_a_token_and_compute_one_result() {
    let hosts = Hosts::new();
    let join = format!("--join {} --identity mine.pem --rank 2", hosts.token);
    // One rank joins by a flag that requests a rank and keeps the identity. One rank joins by the
    // variable and accepts any rank.
    let outputs = hosts.run(["--invite invitation.pem", &join, ""], [None, None, Some(&hosts.token)]);
    is_right(&outputs);
    let [zero, two, one] = [0, 1, 2].map(|host| stderr(&outputs[host]));
    assert!(zero.contains("rank 0 of 3 (invitation invitation.pem"), "{zero}");
    for word in ["gave rank 1 to 127.0.0.1, key ", "gave rank 2 to 127.0.0.1, key "] {
        assert!(zero.contains(word), "`{word}` is not in: {zero}");
    }
    assert!(two.contains("mine.pem: rank 2 of job train, until") && two.contains("rank 2 of 3"), "{two}");
    assert!(one.contains("rank 1 of 3 (by its token rank 1"), "{one}");
    // No printed line contains the secret.
    let secret = &hosts.token[73..105];
    assert!(
        outputs.iter().all(|output| !stderr(output).contains(secret) && !stdout(output).contains(secret))
    );
    // Each host has only the files of its own rank. No key was sent.
    let names = |host| {
        let mut names: Vec<_> =
            hosts.folder(host).read_dir().unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(
        (names(0), names(1), names(2)),
        (
            vec![format!("given-{}", &hosts.token[8..24]).into(), "invitation.pem".into()],
            vec!["mine.pem".into()],
            vec![]
        )
    );
    // The next run: one rank uses the identity that it has kept. One rank joins again by the same
    // token.
    let at = hosts.token.split_once('@').unwrap().1;
    let with_file = format!("--rank 2 --world 3 --coordinator {at} --identity mine.pem");
    let outputs = hosts.run(["--invite invitation.pem", &with_file, ""], [None, None, Some(&hosts.token)]);
    is_right(&outputs);
}

#[test]
fn a_launcher_says_the_rank_and_a_token_proves_it_over_tcp_too() {
    let hosts = Hosts::new();
    let children: Vec<_> = (0..3)
        .map(|host| {
            let flags = if host == 0 { "--network tcp --invite invitation.pem" } else { "--network tcp" };
            let mut command = command(&format!("{ATTEND} {flags}").split_whitespace().collect::<Vec<_>>());
            command.envs([("RANK", host.to_string()), ("WORLD_SIZE", "3".to_owned())]);
            command.envs((host > 0).then_some(("KYKLOS_JOIN", &hosts.token)));
            command
                .current_dir(hosts.folder(host))
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    let outputs: Vec<_> = children.into_iter().map(|child| finish(child, Duration::from_secs(180))).collect();
    is_right(&outputs);
    assert!(stderr(&outputs[2]).contains("rank 2 of 3"), "{}", stderr(&outputs[2]));
}

#[test]
fn who_has_a_wrong_token_is_told_and_rank_0_names_it_when_it_gives_up() {
    let hosts = Hosts::new();
    let zero = hosts.start(0, "--join-deadline 20 --invite invitation.pem", None);
    std::thread::sleep(Duration::from_millis(300));
    let digit = &hosts.token[80..81];
    let mut wrong = hosts.token.clone();
    wrong.replace_range(80..81, if digit == "0" { "1" } else { "0" });
    let output = finish(hosts.start(1, "", Some(&wrong)), Duration::from_secs(90));
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("gave no identity: its token has another secret"), "{text}");
    let zero = finish(zero, Duration::from_secs(90));
    let text = stderr(&zero);
    // Its own command is right.
    assert_eq!(zero.status.code(), Some(1), "{text}");
    assert!(text.contains("turned away: 127.0.0.1: its token has another secret"), "{text}");
}
