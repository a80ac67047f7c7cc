//! What a feature brings in is absent without it.

use std::path::Path;
use std::process::Command;

pub(crate) fn check(root: &Path) -> Vec<String> {
    let mut faults = Vec::new();
    for (arguments, absent) in [
        (
            &["-p", "kyklos", "--no-default-features", "--features", "cpu,wgpu"][..],
            &["quinn", "tokio", "rustls"][..],
        ),
        (&["-p", "kyklos", "--no-default-features"][..], &["wgpu", "rayon", "kyklos-shaders"][..]),
        (
            &["-p", "kyklos-transport", "--no-default-features"][..],
            &["quinn", "tokio", "rustls", "rcgen"][..],
        ),
        (&["-p", "kyklos-shaders"][..], &["wgpu", "naga"][..]),
    ] {
        let output = Command::new(env!("CARGO"))
            .current_dir(root)
            .args(["tree", "--quiet", "--edges", "normal", "--prefix", "none", "--format", "{p}"])
            .args(arguments)
            .output();
        let Ok(output) = output else {
            faults.push("cargo tree does not start".to_owned());
            continue;
        };
        if !output.status.success() {
            faults.push(format!("cargo tree {arguments:?}: {}", String::from_utf8_lossy(&output.stderr)));
        }
        let tree = String::from_utf8_lossy(&output.stdout).into_owned();
        for name in absent {
            if tree.lines().any(|line| line.split(' ').next() == Some(name)) {
                faults.push(format!("cargo tree {}: {name} must be absent", arguments.join(" ")));
            }
        }
    }
    faults
}
