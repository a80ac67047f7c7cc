//! `--report`: pages of runs, plans and diagnoses.

use std::path::Path;

use crate::support::*;

const SHAPE: [&str; 4] = ["--shape", "1,300,4,2,16", "--mask", "causal"];

fn page(path: &Path) -> String {
    let page = std::fs::read_to_string(path).unwrap();
    assert!(page.starts_with("<!DOCTYPE html>") && page.ends_with("</html>"), "{}", page.len());
    for word in ["<script", "src=", "http://", "https://", "@import"] {
        assert!(!page.contains(word), "the page is to need nothing else: {word}");
    }
    page
}

/// The exact numbers of the table of ranks, row by row.
fn rows(page: &str) -> Vec<Vec<String>> {
    rows_of(page, "ranks")
}

/// A section up to the end of its first table.
fn section<'a>(page: &'a str, id: &str) -> &'a str {
    page.split(&format!("<section id=\"{id}\"")).nth(1).unwrap().split("</table>").next().unwrap()
}

fn rows_of(page: &str, id: &str) -> Vec<Vec<String>> {
    let table = section(page, id);
    let body = table.split("<tbody>").nth(1).unwrap();
    let values = |row: &str| {
        row.split("<data value=\"").skip(1).map(|at| at.split('"').next().unwrap().to_owned()).collect()
    };
    body.split("<tr>").skip(1).map(values).collect()
}

fn left_in(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn the_page_of_a_run_has_the_numbers_of_its_json_from_threads_and_from_processes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.html");
    let cluster = Path::new(env!("CARGO_MANIFEST_DIR")).join("../clusters/loopback-2-cores.toml");
    let options = [
        "--device",
        "cpu",
        "--json",
        "--repeat",
        "2",
        "--hardware",
        cluster.to_str().unwrap(),
        "--report",
        path.to_str().unwrap(),
    ];
    let mesh = ["--mesh", "1x3"];
    let mut seen = Vec::new();
    for start in [&["attend"][..], &["launch", "-n", "3", "--", "attend"]] {
        let json = json(&kyklos(&[start, &SHAPE, &mesh, &options].concat()));
        let page = page(&path);
        let rows = rows(&page);
        assert_eq!(rows.len(), 3);
        for (row, rank) in rows.iter().zip(json["per_rank"].as_array().unwrap()) {
            let expected = ["tokens", "compute_s", "wait_s", "copy_s"].map(|field| rank[field].to_string());
            assert_eq!(numbers(&row[..4]), numbers(&expected));
            let expected = ["bytes_sent", "messages_sent", "peak_bytes"].map(|field| rank[field].to_string());
            assert_eq!(row[5..], expected);
        }
        for id in ["mask", "timeline", "traffic", "memory", "prediction"] {
            assert!(page.contains(&format!("<section id=\"{id}\"")), "{id}");
        }
        seen.push(page.contains("Clocks of ranks agree within"));
    }
    assert_eq!(seen, [false, true], "threads share a clock, processes do not");
    assert_eq!(left_in(folder.path()), ["run.html"], "no temporary file is left");
}

fn numbers(texts: &[String]) -> Vec<f64> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

#[test]
fn the_page_of_a_plan_is_predicted_and_without_times_where_no_device_is_described() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("plan.html");
    let plan = [&["plan", "--mesh", "1x2", "--report", path.to_str().unwrap()], &SHAPE[..]].concat();
    succeeds(&kyklos(&plan));
    let bare = page(&path);
    assert!(bare.contains("Name a description of devices and links with --hardware"));
    let cluster = Path::new(env!("CARGO_MANIFEST_DIR")).join("../clusters/two-hosts-1gbe.toml");
    let hardware = [&plan[..], &["--hardware", cluster.to_str().unwrap()]].concat();
    succeeds(&kyklos(&hardware));
    let priced = page(&path);
    assert!(priced.contains("are predicted to finish in") && priced.contains("Load of the described links"));
    let planned = json(&kyklos(&[&plan[..3], &SHAPE, &["--json"]].concat()));
    let peaks: Vec<String> = rows(&bare).iter().map(|row| row.last().unwrap().clone()).collect();
    let plans = planned["plans"].as_array().unwrap().iter();
    let checked = plans.map(|plan| plan["check"]["peak_bytes"].to_string());
    assert_eq!(peaks, checked.collect::<Vec<_>>());
}

#[test]
fn the_page_of_explain_has_every_plan_with_the_numbers_of_its_json() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("explain.html");
    let cluster = Path::new(env!("CARGO_MANIFEST_DIR")).join("../clusters/loopback-2-cores.toml");
    let options = [
        "--ranks",
        "4",
        "--hardware",
        cluster.to_str().unwrap(),
        "--json",
        "--report",
        path.to_str().unwrap(),
    ];
    let json = json(&kyklos(&[&["plan", "--explain"], &SHAPE[..], &options].concat()));
    let page = page(&path);
    let shown: Vec<f64> = rows_of(&page, "choice").iter().flat_map(|row| numbers(row)).collect();
    let plans = json["plans"].as_array().unwrap();
    let fitting = plans.iter().filter(|plan| plan["refused"].is_null());
    let fields = ["predicted_s", "idle", "bytes_sent", "peak_bytes"];
    let expected: Vec<f64> =
        fitting.flat_map(|plan| fields.map(|field| plan[field].as_f64().unwrap())).collect();
    assert!(expected.len() > 8, "several plans fit");
    // The parser of JSON may round the last digit otherwise.
    let same = |(shown, expected): (&f64, &f64)| (shown - expected).abs() <= 1e-12 * expected.abs();
    assert_eq!(shown.len(), expected.len());
    assert!(shown.iter().zip(&expected).all(same), "{shown:?} is not {expected:?}");
    let table = section(&page, "choice").split("<tbody>").nth(1).unwrap();
    assert_eq!(table.matches("<tr>").count(), plans.len());
    assert_eq!(table.matches("refused: ").count(), plans.len() - expected.len() / fields.len());
    // The pictures are of the fastest plan.
    assert!(page.contains(&format!("are predicted to finish in {}", table_time(&page))), "{}", page.len());
    let output = kyklos(&[&["plan", "--explain"], &SHAPE[..], &options[..4], &["--report", "/"]].concat());
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
}

/// The first predicted time in the table of plans.
fn table_time(page: &str) -> &str {
    let first = section(page, "choice").split("<tbody>").nth(1).unwrap().split("</data>").next().unwrap();
    first.rsplit('>').next().unwrap()
}

#[test]
fn a_page_that_cannot_be_written_is_refused_before_any_work() {
    let folder = tempfile::tempdir().unwrap();
    let inside = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let here = [&["attend", "--ranks", "2", "--device", "cpu"], &SHAPE[..]].concat();
    let there = [&["launch", "-n", "2", "--", "attend", "--device", "cpu"], &SHAPE[..]].concat();
    let plan = [&["plan", "--ranks", "2"], &SHAPE[..]].concat();
    for call in [&here, &there, &plan] {
        let output = kyklos(&[&call[..], &["--report", &inside("no/such/folder.html")]].concat());
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        assert!(
            stderr(&output).contains("cannot write") && stdout(&output).is_empty(),
            "{}",
            stderr(&output)
        );
        for (name, word) in [("", "is no file name"), ("of-{rank}.html", "one page is about all ranks")] {
            let output = kyklos(&[&call[..], &["--report", &inside(name)]].concat());
            assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
            assert!(stderr(&output).contains(word), "{}", stderr(&output));
        }
    }
    let (page, trace) = (inside("both"), inside("both"));
    let output = kyklos(&[&here[..], &["--report", &page, "--trace", &trace]].concat());
    assert!(stderr(&output).contains("--report would overwrite the trace"), "{}", stderr(&output));
    assert!(left_in(folder.path()).is_empty(), "{:?}", left_in(folder.path()));
}

#[test]
fn the_page_of_a_diagnosis_names_the_cause() {
    let folder = tempfile::tempdir().unwrap();
    let (records, path) = (folder.path().join("records"), folder.path().join("doctor.html"));
    std::fs::create_dir(&records).unwrap();
    let records = records.to_str().unwrap();
    let attend = [&["attend", "--ranks", "2", "--device", "cpu", "--record", records], &SHAPE[..]].concat();
    succeeds(&kyklos(&attend));
    let report = ["doctor", records, "--report", path.to_str().unwrap()];
    succeeds(&kyklos(&report));
    let well = page(&path);
    assert!(well.contains("2 records; no problem found.") && well.contains("rank 1: "), "{}", well.len());
    std::fs::remove_file(Path::new(records).join("rank-1.jsonl")).unwrap();
    assert_eq!(kyklos(&report).status.code(), Some(1));
    let bad = page(&path);
    assert!(bad.contains("Likely cause: ") && bad.contains("rank 1"), "{bad}");
}
