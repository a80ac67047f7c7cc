//! `--watch`: the live page of a running call, and clients that must not stop or slow the call.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::groups::launch::{LongJob, signal};
use crate::support::*;

const SHAPE: [&str; 6] = ["--shape", "1,300,4,2,16", "--mask", "causal", "--device", "cpu"];

/// A call with a live page, and the address of the page.
pub(crate) struct Watched {
    child: Child,
    pub(crate) address: String,
}

impl Watched {
    pub(crate) fn start(words: &[&str]) -> Self {
        let mut child = command(words).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        let address = loop {
            line.clear();
            assert!(stderr.read_line(&mut line).unwrap() > 0, "no link of a live page");
            if let Some((_, link)) = line.split_once("live page: http://") {
                break link.trim_end().trim_end_matches('/').to_owned();
            }
        };
        // Later lines must not fill the pipe.
        std::thread::spawn(move || std::io::copy(&mut stderr, &mut std::io::sink()));
        Self { child, address }
    }

    /// Its exit code and standard output.
    pub(crate) fn end(self) -> (Option<i32>, String) {
        let output = finish(self.child, Duration::from_secs(120));
        (output.status.code(), stdout(&output))
    }
}

fn connect(address: &str) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream
}

/// Sends `request` and reads the answer until the server closes the connection.
fn ask(address: &str, request: &[u8]) -> String {
    let mut stream = connect(address);
    // The server may close the connection before it has read the whole request.
    let _ = stream.write_all(request);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

fn get(address: &str, path: &str, fields: &str) -> String {
    ask(address, format!("GET {path} HTTP/1.1\r\nHost: {address}\r\n{fields}\r\n").as_bytes())
}

/// A client of the events.
pub(crate) struct Events(BufReader<TcpStream>);

impl Events {
    pub(crate) fn of(address: &str) -> Self {
        let mut stream = connect(address);
        write!(stream, "GET /events HTTP/1.1\r\nHost: {address}\r\nSec-Fetch-Site: same-origin\r\n\r\n")
            .unwrap();
        let mut reader = BufReader::new(stream);
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            assert!(reader.read_line(&mut head).unwrap() > 0, "{head}");
        }
        assert!(head.starts_with("HTTP/1.0 200 OK\r\n"), "{head}");
        assert!(head.contains("Content-Type: text/event-stream\r\n"), "{head}");
        Self(reader)
    }
}

impl Iterator for Events {
    type Item = (String, Value);

    fn next(&mut self) -> Option<Self::Item> {
        let mut name = String::new();
        loop {
            let mut line = String::new();
            if self.0.read_line(&mut line).unwrap() == 0 {
                return None;
            }
            if let Some(event) = line.strip_prefix("event: ") {
                name = event.trim_end().to_owned();
            } else if let Some(data) = line.strip_prefix("data: ") {
                return Some((name, serde_json::from_str(data).unwrap()));
            }
        }
    }
}

pub(crate) fn ranks(state: &Value) -> &Vec<Value> {
    state["ranks"].as_array().unwrap()
}

#[test]
fn the_events_of_a_run_go_on_to_its_end_and_its_report() {
    for start in [&["attend", "--mesh", "1x3"][..], &["launch", "-n", "3", "--", "attend", "--mesh", "1x3"]] {
        // It computes for some seconds, so that the client is there before the end.
        let long = ["--shape", "1,2048,8,2,64", "--mask", "causal", "--device", "cpu"];
        let watched = Watched::start(
            &[start, &long, &["--repeat", "60", "--tokens", "1024,640,384", "--watch"]].concat(),
        );
        let page = get(&watched.address, "/", "");
        assert!(
            page.starts_with("HTTP/1.0 200 OK\r\n") && page.contains("Content-Type: text/html"),
            "{page}"
        );
        assert!(page.contains("default-src 'none'; script-src 'self'; connect-src 'self'"), "{page}");
        for word in ["http://", "https://", "onclick", "eval("] {
            let body = page.split_once("\r\n\r\n").unwrap().1;
            assert!(!body.contains(word), "{word}");
        }
        assert!(get(&watched.address, "/live.mjs", "").contains("Content-Type: text/javascript"));
        let events: Vec<(String, Value)> = Events::of(&watched.address).collect();
        let (code, printed) = watched.end();
        assert_eq!(code, Some(0));
        assert!(printed.contains("wall "), "{printed}");

        let states: Vec<&Value> =
            events.iter().filter(|(name, _)| name == "state").map(|(_, state)| state).collect();
        let names: Vec<&str> = events.iter().rev().take(3).map(|(name, _)| &name[..]).collect();
        assert_eq!(names, ["end", "report", "state"]);
        let last = states.last().unwrap();
        assert_eq!((&last["state"], &last["done"]), (&"done".into(), &1.0.into()), "{last}");
        let done: Vec<f64> = states.iter().map(|state| state["done"].as_f64().unwrap()).collect();
        assert!(done.windows(2).all(|pair| pair[0] <= pair[1]), "{done:?}");
        let elapsed: Vec<f64> = states.iter().map(|state| state["elapsed_s"].as_f64().unwrap()).collect();
        assert!(elapsed.windows(2).all(|pair| pair[0] <= pair[1]), "{elapsed:?}");
        for state in states.iter().filter(|state| state["state"] == "running") {
            let tokens: Vec<u64> = ranks(state).iter().map(|rank| rank["tokens"].as_u64().unwrap()).collect();
            assert_eq!(tokens, [1024, 640, 384], "{state}");
            let health = ranks(state).iter().map(|rank| rank["health"].as_str().unwrap());
            assert!(
                health
                    .clone()
                    .all(|health| ["starting", "alive", "slow", "silent", "finished"].contains(&health)),
                "{state}"
            );
        }
        assert!(states.iter().any(|state| state["state"] == "running"), "{last}");
        for rank in ranks(last) {
            assert!(rank["device"].as_str().unwrap().starts_with("cpu"), "{rank}");
            let here = start[0] == "attend" || rank["rank"] == 0;
            assert_eq!(rank["compute_s"].as_f64().is_some_and(|seconds| seconds > 0.0), here, "{rank}");
        }
        let report = events[events.len() - 2].1.as_str().unwrap();
        for id in ["mask", "timeline", "ranks", "traffic", "memory"] {
            assert!(report.contains(&format!("<section id=\"{id}\"")), "{id}");
        }
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_rank_that_dies_is_lost_on_the_page_and_its_error_is_the_end() {
    let job = LongJob::start(&["--watch"], &[]);
    let link = job.notes.iter().find_map(|note| note.strip_prefix("[0] live page: http://"));
    let address = link.unwrap_or_else(|| panic!("{:?}", job.notes)).trim_end_matches('/').to_owned();
    let mut events = Events::of(&address);
    let all_alive = |state: &Value| ranks(state).iter().all(|rank| rank["health"] == "alive");
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let (_, state) = events.next().unwrap();
        if all_alive(&state) {
            break;
        }
        assert!(Instant::now() < until, "{state}");
    }
    signal("-KILL", job.pids[2]);
    let states: Vec<Value> = events.filter(|(name, _)| name == "state").map(|(_, state)| state).collect();
    let last = states.last().unwrap();
    assert_eq!(last["state"], "failed", "{last}");
    assert!(last["text"].as_str().unwrap().contains("rank 2 died"), "{last}");
    assert_eq!(ranks(last)[2]["health"], "lost", "{last}");
    assert_eq!(job.end().0, Some(1));
}

#[test]
#[cfg(target_os = "linux")]
fn the_page_goes_on_with_the_ranks_that_are_left() {
    let job = LongJob::start(&["--watch", "--on-loss", "rejoin"], &[]);
    let link = job.notes.iter().find_map(|note| note.strip_prefix("[0] live page: http://"));
    let address = link.unwrap_or_else(|| panic!("{:?}", job.notes)).trim_end_matches('/').to_owned();
    let mut events = Events::of(&address);
    signal("-KILL", job.pids[3]);
    // First the loss is seen, and later the rank that takes its place.
    let until = Instant::now() + Duration::from_secs(90);
    for wanted in [["lost", "silent"], ["alive", "alive"]] {
        loop {
            let (_, state) = events.next().unwrap();
            if wanted.contains(&ranks(&state)[3]["health"].as_str().unwrap()) && state["state"] == "running" {
                break;
            }
            assert!(Instant::now() < until, "{state}");
        }
    }
    signal("-INT", job.launch.id());
    assert_eq!(job.end().0, Some(130));
}

#[test]
fn a_call_that_fails_says_so_on_its_page() {
    // The folder of its output is removed once the page is there. The call takes seconds after that.
    let folder = tempfile::tempdir().unwrap();
    let inside = folder.path().join("inside");
    std::fs::create_dir(&inside).unwrap();
    let watched = Watched::start(
        &[
            &["attend", "--ranks", "2", "--shape", "1,2048,8,2,64", "--device", "cpu", "--repeat", "60"][..],
            &["--watch", "--output", inside.join("o").to_str().unwrap()],
        ]
        .concat(),
    );
    let events = Events::of(&watched.address);
    std::fs::remove_dir_all(&inside).unwrap();
    let states: Vec<Value> = events.filter(|(name, _)| name == "state").map(|(_, it)| it).collect();
    // A refusal, if the file was not there yet.
    assert!(matches!(watched.end().0, Some(1 | 2)));
    let last = states.last().unwrap();
    assert_eq!(last["state"], "failed", "{last}");
    let text = last["text"].as_str().unwrap();
    assert!(text.starts_with("The call has failed: ") && text.contains("cannot write"), "{last}");
}

#[test]
fn wrong_requests_are_refused_and_change_nothing() {
    let long = ["--ranks", "2", "--shape", "1,2048,8,2,64", "--device", "cpu", "--repeat", "60", "--json"];
    let watched = Watched::start(&[&["attend", "--watch", "127.0.0.1"][..], &long].concat());
    let address = &watched.address;
    let port = address.rsplit_once(':').unwrap().1;
    let status = |answer: &str| answer.split(' ').nth(1).unwrap_or_default().to_owned();
    let with_host = |host: &str| {
        let answer = ask(address, format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n").as_bytes());
        assert!(!answer.starts_with("HTTP/1.0 200") || answer.contains("<!DOCTYPE html>"), "{answer}");
        status(&answer)
    };
    for host in ["localhost".to_owned(), format!("localhost:{port}"), "[::1]:80".to_owned()] {
        assert_eq!(with_host(&host), "200", "{host}");
    }
    for host in ["evil.example", &format!("evil.example:{port}"), "127.0.0.1.evil.example", "10.0.0.1", ""] {
        assert_eq!(with_host(host), "421", "{host}");
    }
    assert_eq!(status(&ask(address, b"GET / HTTP/1.1\r\n\r\n")), "421");
    let two = format!("GET / HTTP/1.1\r\nHost: {address}\r\nHost: evil.example\r\n\r\n");
    assert_eq!(status(&ask(address, two.as_bytes())), "400");
    for method in ["POST", "PUT", "DELETE", "OPTIONS", "HEAD"] {
        let request = format!("{method} / HTTP/1.1\r\nHost: {address}\r\nContent-Length: 0\r\n\r\n");
        assert_eq!(status(&ask(address, request.as_bytes())), "405", "{method}");
    }
    assert_eq!(status(&get(address, "/../etc/passwd", "")), "404");
    // The page of a stranger may link to the page, and not read its events.
    assert_eq!(status(&get(address, "/", "Sec-Fetch-Site: cross-site\r\n")), "200");
    for path in ["/events", "/live.mjs"] {
        assert_eq!(status(&get(address, path, "Sec-Fetch-Site: cross-site\r\n")), "403", "{path}");
    }
    let endless = [&b"GET /"[..], &vec![b'a'; 1 << 20]].concat();
    assert!(!ask(address, &endless).contains("200 OK"));
    assert_eq!(status(&ask(address, b"\xff\x00\xfe\r\n\r\n")), "400");
    let (code, printed) = watched.end();
    assert_eq!(code, Some(0));
    assert_eq!(serde_json::from_str::<Value>(&printed).unwrap()["ranks"], 2);
}

#[test]
fn clients_that_idle_or_never_read_do_not_stop_the_call_and_have_no_more_than_their_places() {
    let long = ["--ranks", "2", "--shape", "1,2048,8,2,64", "--device", "cpu", "--repeat", "150"];
    let watched = Watched::start(&[&["attend", "--watch"][..], &long].concat());
    let address = &watched.address;
    // They ask for events and read none of them.
    let deaf: Vec<TcpStream> = (0..30)
        .map(|_| {
            let mut stream = connect(address);
            let _ = write!(stream, "GET /events HTTP/1.1\r\nHost: {address}\r\n\r\n");
            stream
        })
        .collect();
    let idle: Vec<TcpStream> = (0..40).map(|_| connect(address)).collect();
    drop(idle);
    // Only so many streams, and the page itself is still there.
    let until = Instant::now() + Duration::from_secs(60);
    while !get(address, "/", "").starts_with("HTTP/1.0 200") {
        assert!(Instant::now() < until, "idle clients keep others out");
        std::thread::sleep(Duration::from_millis(50));
    }
    let begins = |mut stream: TcpStream| {
        let mut head = [0; 12];
        stream.read_exact(&mut head).map(|()| String::from_utf8_lossy(&head).into_owned()).unwrap_or_default()
    };
    let (code, _) = watched.end();
    assert_eq!(code, Some(0));
    let served = deaf.into_iter().map(begins).filter(|head| head == "HTTP/1.0 200").count();
    assert!((1..=8).contains(&served), "{served} streams");
}

#[test]
fn an_address_that_cannot_be_served_is_an_error_of_all_ranks_before_any_work() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let here = kyklos(&[&["attend", "--ranks", "2", "--watch", &address][..], &SHAPE].concat());
    assert_eq!(here.status.code(), Some(1), "{}", stderr(&here));
    assert!(stderr(&here).contains(&format!("cannot serve the live page at {address}")), "{}", stderr(&here));
    let there = kyklos(&[&["launch", "-n", "2", "--", "attend", "--watch", &address][..], &SHAPE].concat());
    assert_eq!(there.status.code(), Some(1), "{}", stderr(&there));
    for rank in ["[0] ", "[1] "] {
        let mut lines = stderr(&there).lines().map(str::to_owned).collect::<Vec<_>>().into_iter();
        assert!(
            lines.any(|line| line.starts_with(rank) && line.contains("cannot serve the live page")),
            "{}",
            stderr(&there)
        );
    }
    let anywhere = kyklos(&[&["attend", "--watch", "0.0.0.0"][..], &SHAPE].concat());
    succeeds(&anywhere);
    assert!(stderr(&anywhere).contains("live page: http://0.0.0.0:"), "{}", stderr(&anywhere));
}

#[test]
fn wrong_addresses_are_refused_before_any_rank_starts() {
    let kyklos_launch =
        |options: &[&str]| kyklos(&[&["launch", "-n", "2", "--", "attend"][..], options, &SHAPE].concat());
    succeeds(&kyklos_launch(&["--watch"]));
    refused(
        &kyklos_launch(&["--watch", "127.0.0.1:9401", "--metrics", "127.0.0.1:9400"]),
        &["--watch 127.0.0.1:9401", "--metrics 127.0.0.1:9400", "another port"],
    );
    refused(
        &kyklos_launch(&["--watch", "localhost:80"]),
        &["`localhost:80` is no address", "127.0.0.1:8080"],
    );
}
