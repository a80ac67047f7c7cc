//! The program without arguments.

use std::time::Instant;

use crate::support::*;

#[test]
fn the_demonstration_says_who_did_what_and_how_it_compares() {
    let started = Instant::now();
    let output = kyklos(&[]);
    succeeds(&output);
    let text = stdout(&output);
    for word in [
        "rank 0", "rank 1", "GFLOP/s", "computed", "waited", "copied", "verified", "oracle", "together",
        "alone",
    ] {
        assert!(text.contains(word), "`{word}` is not in:\n{text}");
    }
    // A few seconds on an idle machine; tests share theirs.
    assert!(started.elapsed().as_secs() < 60, "{:?}", started.elapsed());
}

#[test]
fn devices_are_listed_with_their_speed() {
    let devices = json(&kyklos(&["devices", "--json"]));
    let cpu = devices.as_array().unwrap().iter().find(|device| device["id"] == "cpu").unwrap();
    assert!(cpu["gflops"].as_f64().unwrap() > 0.1, "{cpu}");
    for field in ["name", "class", "driver", "kernel"] {
        assert!(cpu[field].is_string(), "{cpu}");
    }
    let table = kyklos(&["devices"]);
    succeeds(&table);
    assert!(stdout(&table).contains("GFLOP/s"));
}
