//! Exit codes: the table in `docs/errors.md` is what happens. Errors for programs that read JSON.

use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use crate::refusals::Place;
use crate::support::*;

/// Every example of the table ends with the code of its row. Files are those of `made.rs`.
#[test]
fn the_table_of_exit_codes_is_what_happens() {
    let page =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/errors.md")).unwrap();
    let (_, table) = page.split_once("| exit code | when | example |\n").unwrap();
    let rows = table.lines().skip(1).take_while(|line| line.starts_with('|'));
    let rows: Vec<(i32, &str)> = rows
        .filter_map(|row| {
            let (code, _) = row.trim_start_matches("| ").split_once(' ').unwrap();
            let (_, example) = row.split_once("`kyklos ")?;
            Some((code.parse().unwrap(), example.split_once('`').unwrap().0))
        })
        .collect();
    assert!([0, 1, 2].iter().all(|code| rows.iter().filter(|row| row.0 == *code).count() >= 3), "{rows:?}");
    let place = Place::new();
    for (code, line) in rows {
        let output = finish(place.start(line), Duration::from_secs(120));
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(code), "{line}: {text}");
        // An error is one line. A refusal has done nothing.
        let errors = text.lines().filter(|line| line.contains("error: ")).count();
        assert_eq!(errors, usize::from(code != 0), "{line}: {text}");
        assert!(code != 2 || stdout(&output).is_empty(), "{line}: {}", stdout(&output));
    }
}

#[test]
fn with_json_an_error_is_one_object_on_standard_output_too() {
    let place = Place::new();
    for (line, code, words) in [
        ("ATTEND --mask casual --json", 2, "mask `casual` is not known"),
        ("ATTEND --json --nonsense", 2, "unexpected argument '--nonsense'"),
        ("attend --input none --json", 2, "cannot open none"),
        ("plan --shape 1,64,8,3,64 --json", 2, "kv heads"),
        ("doctor folder --json", 2, "no records"),
        ("bench --device wgpu:99 --json", 2, "wgpu"),
        ("KYKLOS_TUNE=no devices --json", 2, "KYKLOS_TUNE"),
        ("launch -n 2 -- ATTEND --json --world 2", 2, "--world 2"),
        ("launch -n 2 -- ATTEND --json --device cpu,wgpu:99", 2, "rank 1: "),
        (
            "ATTEND --device cpu --rank 0 --world 2 --coordinator 127.0.0.1:PORT --identity ids/rank-0.pem --join-deadline 1 --json",
            1,
            "rank 1 did not come",
        ),
    ] {
        let output = finish(place.start(line), Duration::from_secs(120));
        let (out, text) = (stdout(&output), stderr(&output));
        assert_eq!(output.status.code(), Some(code), "{line}: {text}");
        let answer: Value =
            serde_json::from_str(&out).unwrap_or_else(|error| panic!("{line}: {error}: {out}"));
        assert_eq!(answer["exit_code"], code, "{line}");
        let error = answer["error"].as_str().unwrap();
        assert!(error.contains(words), "{line}: {error}");
        assert!(text.contains(&format!("error: {error}")), "{line}: {text}");
    }
    // Of a group only rank 0 answers.
    let line = "ATTEND --device cpu --rank 1 --world 2 --coordinator 127.0.0.1:PORT --identity ids/rank-0.pem --json";
    let output = finish(place.start(line), Duration::from_secs(120));
    assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(2), ""));
    // Also before they know of the group: here the parser refuses all.
    for (rank, answers) in [(0, true), (1, false)] {
        for group in [
            format!("RANK={rank} WORLD_SIZE=2 ATTEND"),
            format!("SLURM_PROCID={rank} MASTER_PORT=x ATTEND"),
            format!("ATTEND --rank {rank} --world 2"),
        ] {
            let output = finish(place.start(&format!("{group} --json --nonsense")), Duration::from_secs(120));
            assert_eq!((output.status.code(), !stdout(&output).is_empty()), (Some(2), answers), "{group}");
        }
    }
    for (process, answers) in [
        ("RANK=1 ATTEND", true),
        ("RANK=1 WORLD_SIZE=2 ATTEND --ranks 2", true),
        ("RANK=1 WORLD_SIZE=2 plan", true),
        ("ATTEND --invite invitation.pem", true),
        ("ATTEND --join token", false),
        ("KYKLOS_JOIN=token ATTEND", false),
    ] {
        let output = finish(place.start(&format!("{process} --json --nonsense")), Duration::from_secs(120));
        assert_eq!((output.status.code(), !stdout(&output).is_empty()), (Some(2), answers), "{process}");
    }
    // What has printed its result adds no error to it.
    let line = "attend --shape 1,64,4,2,8 --scale 3e38 --verify --json --device cpu";
    let output = finish(place.start(line), Duration::from_secs(120));
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let answer: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert!(answer["error"].is_null() && answer["ranks"] == 1, "{answer}");
}
