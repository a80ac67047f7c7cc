//! Tabs as devices of ranks, with tabs that are no browsers. scripts/test-browser-page.sh has real
//! ones.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Stdio};
use std::thread::JoinHandle;
use std::time::Duration;

use kyklos_tab::native;

use crate::support::*;

const PROBLEM: [&str; 6] = ["--shape", "1,256,4,2,32", "--mask", "causal", "--verify", "--json"];

/// A command that prints links to tabs.
struct Host {
    child: Child,
    said: BufReader<std::process::ChildStderr>,
    text: String,
}

impl Host {
    fn start(arguments: &[&str]) -> Self {
        let mut child = command(&[arguments, &PROBLEM[..]].concat())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let said = BufReader::new(child.stderr.take().unwrap());
        Self { child, said, text: String::new() }
    }

    /// The next link.
    fn link(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert!(self.said.read_line(&mut line).unwrap() > 0, "no link: {}", self.text);
            self.text.push_str(&line);
            if let Some(link) = line.find("http://") {
                return line[link..].trim_end().to_owned();
            }
        }
    }

    /// The report, and what the command said. It ends with one of `exits`.
    fn end(mut self, exits: &[i32]) -> (serde_json::Value, String) {
        let reading = std::thread::spawn(move || {
            self.said.read_to_string(&mut self.text).unwrap();
            self.text
        });
        let output = finish(self.child, Duration::from_secs(240));
        let text = reading.join().unwrap();
        assert!(exits.contains(&output.status.code().unwrap()), "{text}");
        (serde_json::from_str(&stdout(&output)).unwrap(), text)
    }
}

fn tab(link: &str) -> JoinHandle<String> {
    native::tab(link, None, usize::MAX)
}

fn is_exact(report: &serde_json::Value, ranks: usize) {
    assert_eq!(report["ranks"], ranks, "{report}");
    assert!(report["max_abs_error"].as_f64().unwrap() <= report["tolerance"].as_f64().unwrap(), "{report}");
}

#[test]
fn tabs_beside_native_ranks_are_exact() {
    for transport in ["in-process", "quic"] {
        let device = ["--ranks", "4", "--device", "cpu,tab,cpu,tab", "--transport", transport];
        let mut host = Host::start(&[&["attend"], &device[..]].concat());
        let tabs = [tab(&host.link()), tab(&host.link())];
        let (report, text) = host.end(&[0]);
        is_exact(&report, 4);
        assert_eq!(report["devices"][1]["backend"], "tab");
        assert_eq!(text.matches("a tab has come: ").count(), 2, "{text}");
        for tab in tabs {
            assert_eq!(tab.join().unwrap(), "the host has ended the work");
        }
    }
}

#[test]
fn a_tab_that_ends_in_the_middle_is_a_lost_rank() {
    // While speeds are measured, and in one of many calls.
    let [early, late] = [1 << 15, 8 << 20];
    for (policy, most_bytes, exits, words) in [
        ("shrink", early, &[0][..], "without rank 1; 2 ranks start again"),
        ("shrink", late, &[0], "without rank 1; 2 ranks start again"),
    ] {
        // Rank 1 has the tab; all ranks have its options.
        let launch = ["launch", "-n", "3", "--", "attend", "--device", "cpu,tab,cpu", "--on-loss", policy];
        let page = ["--tab-page", "http://localhost:1/tab.html", "--repeat", "300"];
        let split = ["--split", if most_bytes == early { "auto" } else { "even" }];
        let mut host = Host::start(&[&launch[..], &page, &split].concat());
        let link = host.link();
        let begin = format!("http://localhost:1/tab.html#v={}&at=127.0.0.1:", kyklos_tab::VERSION);
        assert!(link.starts_with(&begin), "{link}");
        let tab = native::tab(&link, None, most_bytes);
        let (report, text) = host.end(exits);
        assert_eq!(tab.join().unwrap(), "taken enough");
        assert!(text.contains(words) && text.contains("the tab was closed"), "{policy} {most_bytes}: {text}");
        is_exact(&report, 2);
    }
}

#[test]
fn nobody_comes() {
    let output = kyklos(
        &[&["attend", "--ranks", "2", "--device", "cpu,tab", "--deadline", "1"], &PROBLEM[..]].concat(),
    );
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        text.contains("rank 1: tab: ") && text.contains("nobody has opened the link within 1 s"),
        "{text}"
    );
}
