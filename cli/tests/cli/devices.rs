//! `kyklos devices`, and the program without a command.

use crate::support::*;

#[test]
fn without_a_command_the_program_lists_its_commands_and_ends_with_exit_code_2() {
    let output = kyklos(&[]);
    assert_eq!(output.status.code(), Some(2));
    let text = stderr(&output);
    for command in ["devices", "attend", "plan", "bench", "tune", "launch", "doctor", "certs"] {
        assert!(text.contains(&format!("  {command} ")), "`{command}` is not in:\n{text}");
    }
}

#[test]
fn devices_are_listed_with_their_speed() {
    let devices = json(&kyklos(&["devices", "--json"]));
    let cpu = devices.as_array().unwrap().iter().find(|device| device["id"] == "cpu").unwrap();
    // However slow: other programs may have the cores.
    assert!(cpu["gflops"].as_f64().unwrap() > 0.0, "{cpu}");
    for field in ["name", "class", "driver", "kernel"] {
        assert!(cpu[field].is_string(), "{cpu}");
    }
    let table = kyklos(&["devices"]);
    succeeds(&table);
    assert!(stdout(&table).contains("GFLOP/s"));
}
