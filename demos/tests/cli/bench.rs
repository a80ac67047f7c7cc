//! `kyklos bench`.

use crate::support::*;

#[test]
fn every_combination_is_timed_and_checked() {
    let output = kyklos(&[
        "bench",
        "--device",
        "cpu",
        "--shape",
        "1,96,4,2,32",
        "--shape",
        "2,33,2,1,64",
        "--mask",
        "causal",
        "--mask",
        "window:8,0",
        "--dtype",
        "f32",
        "--dtype",
        "bf16",
        "--repeat",
        "2",
        "--json",
    ]);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let lines: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let lines = lines.as_array().unwrap();
    assert_eq!(lines.len(), 8);
    for line in lines {
        let number = |name: &str| line[name].as_f64().unwrap_or_else(|| panic!("{name} in {line}"));
        assert!(0.0 < number("min_ms") && number("min_ms") <= number("median_ms"));
        assert!(number("median_ms") <= number("max_ms") && number("gflop_per_s") > 0.0);
        assert!(number("max_abs_error") <= number("tolerance") && number("tolerance") < 0.1);
        assert!(line["error"].is_null());
    }
}

#[test]
fn the_last_tokens_alone_are_queries() {
    let output = kyklos(&[
        "bench",
        "--device",
        "cpu",
        "--shape",
        "1,300,4,1,64",
        "--mask",
        "causal",
        "--dtype",
        "f16",
        "--queries",
        "1",
        "--repeat",
        "1",
    ]);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text.lines().count(), 2, "{text}");
    assert!(text.contains("1,300,4,1,64") && text.contains("tolerance"), "{text}");
}

#[test]
fn a_kernel_that_a_device_has_not_is_told_once_and_fails() {
    let output = kyklos(&[
        "bench",
        "--device",
        "cpu",
        "--kernel",
        "auto,portable",
        "--shape",
        "1,16,2,2,8",
        "--dtype",
        "f32",
        "--repeat",
        "1",
    ]);
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text.matches("use --kernel auto").count(), 1, "{text}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("2 of 4 combinations"));
}
