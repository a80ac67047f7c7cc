//! Helpers as processes: they join by a token, are killed, and outlive their owner.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kyklos::backend::Device;
use kyklos::{Attention, Session, Tensor, in_process_group};
use kyklos_helpers::{Call, Door, HelperState, Invitations, Owner, OwnerOptions};
use kyklos_tab::native;

use crate::free_address::free_address;
use crate::support::{command, finish, refused, stderr, stdout, succeeds};

const PATIENCE: Duration = Duration::from_secs(180);

/// Runs the program with the settings in `folder`.
fn with_settings(folder: &Path, line: &str) -> Command {
    let mut command = command(&line.split_whitespace().collect::<Vec<_>>());
    command.env("KYKLOS_SETTINGS_DIR", folder).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn says(folder: &Path, line: &str) -> std::process::Output {
    finish(with_settings(folder, line).spawn().unwrap(), PATIENCE)
}

/// Makes an invitation on this machine; its token.
fn invite(folder: &Path, name: &str) -> String {
    let output = says(folder, &format!("helpers invite {name} --address 127.0.0.1 --port {}", free_port()));
    succeeds(&output);
    let token = stdout(&output).trim().to_owned();
    assert!(token.starts_with("kyklos1.") && !stderr(&output).contains(&token), "{output:?}");
    token
}

fn free_port() -> u16 {
    free_address().port()
}

/// `kyklos help-out`, and the lines that it has written up to now.
struct Helper {
    child: Child,
    lines: Arc<Mutex<Vec<String>>>,
}

impl Helper {
    fn start(folder: &Path, token: &str) -> Self {
        Self::on("cpu", folder, token)
    }

    fn on(device: &str, folder: &Path, token: &str) -> Self {
        let line = format!("help-out {token} --device {device} --memory 1GiB");
        let mut child = with_settings(folder, &line).spawn().unwrap();
        let lines = Arc::new(Mutex::new(Vec::new()));
        let (stream, written) = (child.stderr.take().unwrap(), Arc::clone(&lines));
        std::thread::spawn(move || {
            for line in BufReader::new(stream).lines().map_while(Result::ok) {
                written.lock().unwrap().push(line);
            }
        });
        Self { child, lines }
    }

    /// The last line with these words.
    fn line(&self, words: &str) -> String {
        let lines = self.lines.lock().unwrap();
        lines.iter().rfind(|line| line.contains(words)).unwrap().clone()
    }

    fn count(&self, words: &str) -> usize {
        self.lines.lock().unwrap().iter().filter(|line| line.contains(words)).count()
    }

    fn wait_for(&mut self, words: &str) {
        self.wait_for_several(words, 1);
    }

    fn wait_for_several(&mut self, words: &str, count: usize) {
        let until = Instant::now() + PATIENCE;
        while self.count(words) < count {
            assert!(Instant::now() < until && self.child.try_wait().unwrap().is_none(), "{:?}", self.lines);
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The owner of this process, with a call.
struct Place {
    owner: Owner,
    _door: Door,
    session: Session,
    x: Tensor,
    wanted: Vec<f32>,
    tolerance: f32,
}

impl Place {
    fn open(folder: &Path) -> Self {
        let mut options = OwnerOptions::default();
        options.always = true;
        let owner = Owner::new(options);
        let invitation = Invitations::in_folder(&folder.join("helpers")).read("kitchen").unwrap();
        let door = Door::open("kitchen", invitation, owner.joining());
        let mut session = Session::new(in_process_group(1).remove(0), Device::cpu());
        let values = (0..300 * 4 * 32).map(|i| ((i * 37) % 101) as f32 * 0.02 - 1.0).collect();
        let x = Tensor::new([1, 300, 4, 32], values).unwrap();
        let wanted = session.attend(&Attention::new(), &x, &x, &x).unwrap().o.to_vec::<f32>().unwrap();
        Self { owner, _door: door, session, x, wanted, tolerance: 0.0 }
    }

    /// Whether the helper is there or not, results are those of one device.
    fn call(&mut self) {
        let o = self.owner.attend(&mut self.session, &Call::default(), &self.x, &self.x, &self.x).unwrap();
        let o = o.to_vec::<f32>().unwrap();
        // A tab may add up in another order.
        let far = o.iter().zip(&self.wanted).any(|(o, wanted)| (o - wanted).abs() > self.tolerance);
        assert!(!far && o.len() == self.wanted.len());
        self.owner.settle(PATIENCE);
    }

    /// Until the helper has had a share of so many calls.
    fn calls(&mut self, count: u64) {
        let until = Instant::now() + PATIENCE;
        while self.owner.helpers().first().is_none_or(|helper| helper.calls < count) {
            assert!(Instant::now() < until, "{:?}", self.owner.helpers());
            self.call();
        }
    }

    fn wait_for(&mut self, state: HelperState) {
        let until = Instant::now() + PATIENCE;
        while self.owner.helpers().first().is_none_or(|helper| helper.state != state) {
            assert!(Instant::now() < until, "{:?}", self.owner.helpers());
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

#[test]
fn a_helper_is_killed_and_comes_again_and_outlives_its_owner() {
    let folder = tempfile::tempdir().unwrap();
    let token = invite(folder.path(), "kitchen");
    // The helper is there first, and waits.
    let mut helper = Helper::start(folder.path(), &token);
    helper.wait_for("waiting for the owner at 127.0.0.1:");
    let mut place = Place::open(folder.path());
    place.calls(3);
    helper.child.kill().unwrap();
    helper.child.wait().unwrap();
    // The owner does not know yet.
    place.call();
    place.wait_for(HelperState::Lost);
    let mut helper = Helper::start(folder.path(), &token);
    place.calls(6);
    // Another owner in its place.
    drop(place);
    helper.wait_for("needs no help now");
    let mut place = Place::open(folder.path());
    place.calls(3);
    helper.wait_for_several("joined", 2);
    // Once each time, not at each attempt; a loaded machine may lose a group or two.
    let [joined, waiting] = ["joined", "waiting for the owner"].map(|words| helper.count(words));
    assert!(waiting <= joined + 2, "{:?}", helper.lines);
}

#[cfg(unix)]
#[test]
fn a_helper_that_is_asked_to_leave_leaves_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let token = invite(folder.path(), "kitchen");
    let mut place = Place::open(folder.path());
    let mut helper = Helper::start(folder.path(), &token);
    place.calls(1);
    let pid = helper.child.id().to_string();
    succeeds(&Command::new("kill").args(["-TERM", &pid]).output().unwrap());
    let until = Instant::now() + PATIENCE;
    let status = loop {
        if let Some(status) = helper.child.try_wait().unwrap() {
            break status;
        }
        assert!(Instant::now() < until);
        std::thread::sleep(Duration::from_millis(10));
    };
    assert_eq!(status.code(), Some(0), "{:?}", helper.lines);
    place.wait_for(HelperState::Lost);
    place.call();
}

#[test]
fn a_tab_helps_and_another_one_comes_when_it_is_closed() {
    let folder = tempfile::tempdir().unwrap();
    let token = invite(folder.path(), "kitchen");
    let mut place = Place { tolerance: 1e-5, ..Place::open(folder.path()) };
    let mut helper = Helper::on("tab", folder.path(), &token);
    for (round, most_bytes) in [(1, 32 << 20), (2, usize::MAX)] {
        helper.wait_for_several("http://", round);
        let link = helper.line("http://");
        let tab = native::tab(&link, None, most_bytes);
        let before = place.owner.helpers().first().map_or(0, |helper| helper.calls);
        place.calls(before + 1);
        if most_bytes < usize::MAX {
            let until = Instant::now() + PATIENCE;
            while helper.count("device has failed") == 0 {
                assert!(Instant::now() < until, "{:?}", helper.lines);
                place.call();
            }
            assert_eq!(tab.join().unwrap(), "taken enough");
        }
    }
}

/// The owner of the test below, in a process of its own. It ends when it is killed.
#[test]
fn an_owner_in_a_process_of_its_own() {
    let Some(folder) = std::env::var_os(OWNER) else { return };
    let mut place = Place::open(Path::new(&folder));
    loop {
        place.call();
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A process that ends with the test.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_helper_waits_for_an_owner_that_was_killed() {
    let folder = tempfile::tempdir().unwrap();
    let token = invite(folder.path(), "kitchen");
    let mut helper = Helper::start(folder.path(), &token);
    for round in 1..=2 {
        let mut owner = Command::new(std::env::current_exe().unwrap());
        owner.args(["--exact", "groups::helpers::an_owner_in_a_process_of_its_own"]);
        let owner = owner.env(OWNER, folder.path()).stdout(Stdio::null()).spawn().unwrap();
        let mut owner = Ended(owner);
        let until = Instant::now() + PATIENCE;
        while helper.count("joined") < round {
            assert!(Instant::now() < until, "{:?}", helper.lines);
            std::thread::sleep(Duration::from_millis(10));
        }
        owner.0.kill().unwrap();
        owner.0.wait().unwrap();
    }
    helper.wait_for("is gone: ");
}

fn port_of(token: &str) -> &str {
    token.trim().rsplit_once(':').expect("a token ends with a port").1
}

#[test]
fn invitations_are_listed_and_removed() {
    let folder = tempfile::tempdir().unwrap();
    let empty = says(folder.path(), "helpers list");
    succeeds(&empty);
    assert!(stdout(&empty).is_empty() && stderr(&empty).contains("kyklos helpers invite NAME"));
    let token = invite(folder.path(), "kitchen");
    // Whoever has lost the token gets it again.
    assert_eq!(stdout(&says(folder.path(), "helpers invite kitchen")).trim(), token);
    // Without a port: the first that is free, another one for each.
    for name in ["one", "two"] {
        succeeds(&says(folder.path(), &format!("helpers invite {name} --address studio.local")));
    }
    let listed = stdout(&says(folder.path(), "helpers list"));
    let ports: Vec<&str> = listed.lines().filter_map(|line| line.split("studio.local:").nth(1)).collect();
    assert!(ports.len() == 2 && ports[0] != ports[1], "{listed}");
    assert!(listed.contains("kitchen") && !listed.contains(&token), "{listed}");
    // At another address, with the same secret.
    let moved = stdout(&says(folder.path(), "helpers invite kitchen --address studio.local"));
    assert_eq!(moved.split('@').next(), token.split('@').next());
    assert!(moved.contains("@studio.local:"), "{moved}");
    let line = format!("helpers invite one --port {}", port_of(&token));
    refused(&says(folder.path(), &line), &["kitchen", "another port"]);
    succeeds(&says(folder.path(), "helpers remove one"));
    refused(&says(folder.path(), "helpers remove one"), &["there is no invitation"]);
}

#[test]
fn a_token_that_the_owner_does_not_take_ends_with_exit_code_2() {
    let folder = tempfile::tempdir().unwrap();
    let token = invite(folder.path(), "kitchen");
    let _place = Place::open(folder.path());
    // The secret is between the last dot and the @.
    let (secrets, at) = token.split_once('@').unwrap();
    let (authority, secret) = secrets.rsplit_once('.').unwrap();
    let digit = if secret.starts_with('0') { '1' } else { '0' };
    let wrong = format!("{authority}.{digit}{}@{at}", &secret[1..]);
    let output = says(folder.path(), &format!("help-out {wrong} --device cpu"));
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    let text = stderr(&output);
    assert!(text.contains("kyklos helpers invite") && !text.contains(secret), "{text}");
    // The invitation of another owner, at the same address.
    let other = tempfile::tempdir().unwrap();
    let port = port_of(&token);
    let line = format!("helpers invite kitchen --address 127.0.0.1 --port {port}");
    let of_another = stdout(&says(other.path(), &line));
    let output = says(folder.path(), &format!("help-out {} --device cpu", of_another.trim()));
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
}

#[test]
fn a_forecast_needs_no_second_machine() {
    let folder = tempfile::tempdir().unwrap();
    let output = says(folder.path(), "helpers forecast --pairs-per-s 8e10 --json");
    succeeds(&output);
    let report: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
    let rows = report["rows"].as_array().unwrap();
    assert!(rows.len() >= 10 && rows.iter().all(|row| row["helped"].as_array().unwrap().len() == 4));
    let output = says(folder.path(), "helpers forecast --pairs-per-s 8e10 --link 2.5gbe --helper-speed 0.5");
    succeeds(&output);
    assert!(stdout(&output).contains("not worth it") && stdout(&output).contains("2.5 GbE"));
    // The processor of this machine, for a moment.
    succeeds(&says(folder.path(), "helpers forecast --device cpu --link pcie"));
}

const OWNER: &str = "KYKLOS_TEST_OWNER_SETTINGS";
