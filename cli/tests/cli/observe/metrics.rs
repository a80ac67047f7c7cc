//! The metrics of a running job, with valid and invalid requests.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::groups::launch::{LongJob, signal};
use crate::support::*;

/// Sends `request` and reads the answer until the server closes the connection.
fn ask(address: &str, request: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    // The server may close the connection before it has read the whole request.
    let _ = stream.write_all(request);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8(answer).unwrap()
}

fn get(address: &str, path: &str) -> String {
    ask(address, format!("GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n").as_bytes())
}

/// The value of the one line that begins with `start`.
fn value(metrics: &str, start: &str) -> f64 {
    let mut lines = metrics.lines().filter_map(|line| line.strip_prefix(start));
    let value = lines.next().unwrap_or_else(|| panic!("no {start} in: {metrics}"));
    assert_eq!(lines.next(), None);
    value.trim().parse().unwrap()
}

#[test]
#[cfg(target_os = "linux")]
fn metrics_of_a_running_job_move_whoever_else_asks() {
    let job = LongJob::start(&["--metrics", "127.0.0.1:0", "--link-mtu", "9000"], &[]);
    let address = |rank: usize| {
        let start = format!("[{rank}] rank {rank}: metrics at http://");
        let note = job.notes.iter().find_map(|note| note.strip_prefix(&start));
        note.unwrap_or_else(|| panic!("{:?}", job.notes)).strip_suffix("/metrics").unwrap().to_owned()
    };
    let first = address(0);
    let until = Instant::now() + Duration::from_secs(60);
    let metrics = loop {
        let metrics = get(&first, "/metrics");
        assert!(metrics.starts_with("HTTP/1.0 200 OK\r\n"), "{metrics}");
        if value(&metrics, "kyklos_operations_total{rank=\"0\"}") >= 1.0 {
            break metrics;
        }
        assert!(Instant::now() < until, "{metrics}");
        std::thread::sleep(Duration::from_millis(50));
    };
    for metric in [
        // Mesh 2x2: ranks 0 and 1 exchange heads, 0 and 2 are neighbours on the ring.
        "kyklos_bytes_sent_total{rank=\"0\",peer=\"1\"}",
        "kyklos_messages_received_total{rank=\"0\",peer=\"2\"}",
        "kyklos_seconds_total{rank=\"0\",kind=\"compute\"}",
        "kyklos_seconds_total{rank=\"0\",kind=\"receive-wait\"}",
        "kyklos_resident_bytes",
        "kyklos_peer_round_trip_seconds{rank=\"0\",peer=\"1\"}",
        "kyklos_peer_window_bytes{rank=\"0\",peer=\"1\"}",
        "kyklos_peer_packets_sent_total{rank=\"0\",peer=\"1\"}",
        "kyklos_peer_wire_bytes_sent_total{rank=\"0\",peer=\"2\"}",
        "kyklos_peer_wire_bytes_received_total{rank=\"0\",peer=\"2\"}",
    ] {
        assert!(value(&metrics, metric) > 0.0, "{metric} in: {metrics}");
    }
    for kind in ["credit-blocked", "send-blocked", "device-copy"] {
        assert!(value(&metrics, &format!("kyklos_seconds_total{{rank=\"0\",kind=\"{kind}\"}}")) >= 0.0);
    }
    assert_eq!(value(&metrics, "kyklos_aborts_total{rank=\"0\"}"), 0.0);
    assert_eq!(value(&metrics, "kyklos_peer_packet_bytes{rank=\"0\",peer=\"1\"}"), 8952.0);
    assert_eq!(value(&metrics, "kyklos_peer_black_holes_total{rank=\"0\",peer=\"1\"}"), 0.0);
    assert!(value(&metrics, "kyklos_peer_silence_seconds{rank=\"0\",peer=\"3\"}") < 15.0, "{metrics}");
    assert!(get(&address(3), "/metrics").contains("kyklos_info{rank=\"3\",world=\"4\""));
    assert!(get(&first, "/healthz").ends_with("\r\n\r\nalive\n"));
    assert!(get(&first, "/readyz").starts_with("HTTP/1.0 200"));
    assert!(get(&first, "/no").starts_with("HTTP/1.0 404"));
    // The page of a stranger, which has given its own name this address, reads nothing.
    for path in ["/metrics", "/healthz", "/readyz", "/no"] {
        for host in ["evil.example:9400", "evil.example", ""] {
            let answer = ask(&first, format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n").as_bytes());
            assert!(
                answer.starts_with("HTTP/1.0 421") && !answer.contains("kyklos_"),
                "{path} {host}: {answer}"
            );
        }
    }
    // Prometheus asks by the name of the machine, and simple probes by none.
    assert!(ask(&first, b"GET /healthz HTTP/1.0\r\n\r\n").starts_with("HTTP/1.0 200"));
    if let Some(name) = kyklos::machine::host_name() {
        let asked = format!("GET /metrics HTTP/1.1\r\nHost: {name}:9400\r\n\r\n");
        assert!(ask(&first, asked.as_bytes()).contains("kyklos_info"), "{name}");
    }
    assert!(ask(&first, b"GET /healthz HTTP/1.1\r\nHost: localhost:1\r\n\r\n").starts_with("HTTP/1.0 200"));
    assert!(ask(&first, b"POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.0 405"));
    assert!(ask(&first, b"\xff\x00\xfe\r\n\r\n").starts_with("HTTP/1.0 400"));
    let endless = [&b"GET /"[..], &vec![b'a'; 1 << 20]].concat();
    assert!(!ask(&first, &endless).contains("200 OK"));

    // There are more clients than threads, and each client sends nothing or one byte. They delay only
    // each other.
    let idle: Vec<TcpStream> = (0..40)
        .map(|index| {
            let mut stream = TcpStream::connect(&first).unwrap();
            if index % 2 == 0 {
                let _ = stream.write_all(b"G");
            }
            stream
        })
        .collect();
    assert!(get(&address(1), "/healthz").ends_with("alive\n"));
    // A supervisor would end a process that does not say at once that it lives.
    for path in ["/healthz", "/readyz"] {
        assert!(get(&first, path).starts_with("HTTP/1.0 200"), "slow clients keep others out of {path}");
    }
    drop(idle);
    let until = Instant::now() + Duration::from_secs(30);
    while !get(&first, "/metrics").starts_with("HTTP/1.0 200") {
        assert!(Instant::now() < until, "slow clients keep others out");
        std::thread::sleep(Duration::from_millis(50));
    }
    let before = value(&get(&first, "/metrics"), "kyklos_operations_total{rank=\"0\"}");
    let until = Instant::now() + Duration::from_secs(60);
    while value(&get(&first, "/metrics"), "kyklos_operations_total{rank=\"0\"}") <= before {
        assert!(Instant::now() < until, "the job has stopped");
        std::thread::sleep(Duration::from_millis(50));
    }
    signal("-INT", job.launch.id());
    assert_eq!(job.end().0, Some(130));
}

#[test]
fn an_address_that_others_reach_is_refused_unless_it_is_wanted() {
    let attend = ["attend", "--shape", "1,64,8,2,64", "--device", "cpu", "--metrics", "0.0.0.0:0"];
    refused(&kyklos(&attend), &["0.0.0.0", "without a password", "127.0.0.1:0", "--metrics-anywhere"]);
    refused(&kyklos(&[&["launch", "-n", "2", "--"], &attend[..]].concat()), &["--metrics-anywhere"]);
    let output = kyklos(&[&attend[..], &["--metrics-anywhere"]].concat());
    succeeds(&output);
    assert!(stderr(&output).contains("metrics at http://0.0.0.0:"), "{}", stderr(&output));
    refused(&kyklos(&[&attend[..5], &["--metrics-anywhere"]].concat()), &["--metrics"]);
}
