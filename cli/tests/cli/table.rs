//! `kyklos support`, and the page that its validator prints.

use crate::holds::holds;
use crate::support::*;

const PART: [&str; 9] = [
    "support",
    "--dtype",
    "f32",
    "--placement",
    "striped",
    "--device",
    "cpu",
    "--transport",
    "in-process,quic",
];

#[test]
fn every_cell_is_told_with_the_command_that_repeats_it() {
    let inputs = tempfile::tempdir().unwrap();
    let folder = inputs.path().to_str().unwrap();
    let part = ["--strategy", "dense,pass-q", "--row", "bias for", "--row", "wire f16", "--inputs", folder];
    let all = json(&kyklos(&[&PART[..], &part, &["--json"]].concat()));
    let cells = all["cells"].as_array().unwrap();
    assert_eq!(cells.len(), 16);
    for cell in cells {
        let command: Vec<&str> = cell["command"].as_str().unwrap().split(' ').collect();
        assert_eq!(command[0], "kyklos");
        let again = kyklos(&command[1..]);
        if cell["row"] == "wire f16" {
            assert_eq!(cell["state"], "refused");
            refused(&again, &[cell["message"].as_str().unwrap()]);
        } else {
            assert_eq!(cell["state"], "correct", "{cell}");
            assert!(cell["max_abs_error"].as_f64().unwrap() <= cell["tolerance"].as_f64().unwrap());
            succeeds(&again);
            assert!(stdout(&again).contains("verified"));
        }
    }
}

#[test]
fn the_table_counts_and_quotes_and_is_quiet_in_a_pipe() {
    let output =
        kyklos(&[&PART[..], &["--strategy", "ulysses", "--row", "causal", "--row", "wire f16"]].concat());
    succeeds(&output);
    assert_eq!(stderr(&output), "");
    let text = stdout(&output);
    for words in [
        "ulysses    4x1  forward   causal ",
        "ulysses    4x1  backward  causal ",
        "1 refused [1]",
        "[1] f16 on the wire with strategy ulysses on mesh 4x1: ",
        "8 cells: 4 correct, 4 refused, 0 wrong, 0 failed",
    ] {
        assert!(text.contains(words), "`{words}` is not in:\n{text}");
    }
    refused(&kyklos(&["support", "--row", "nothing"]), &["no row is called nothing", "causal"]);
}

#[test]
fn the_page_is_what_the_validator_says() {
    let output = kyklos(&["support", "--matrix"]);
    succeeds(&output);
    holds("docs/support.md", &stdout(&output));
}
