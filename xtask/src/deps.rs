//! What a feature brings in is absent without it, and the library compiles no C.

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
        (&["-p", "kyklos-plan", "--all-features"][..], &["wgpu", "tokio", "rayon", "pollster"][..]),
    ] {
        let tree = match tree(root, "normal", "none", arguments) {
            Ok(tree) => tree,
            Err(fault) => {
                faults.push(fault);
                continue;
            }
        };
        for name in absent {
            if tree.lines().any(|line| line.split(' ').next() == Some(name)) {
                faults.push(format!("cargo tree {}: {name} must be absent", arguments.join(" ")));
            }
        }
    }
    // The default features on every target: a user of the library needs no C compiler.
    match tree(root, "normal,build", "depth", &["-p", "kyklos", "--target", "all"]) {
        Ok(tree) => faults.extend(compilers_of_c(&tree).into_iter().map(|package| {
            format!("kyklos needs {package}, which compiles C: a user of the library needs no C compiler")
        })),
        Err(fault) => faults.push(fault),
    }
    faults
}

/// The lines `package version features` of `cargo tree`, the package first.
fn tree(root: &Path, edges: &str, prefix: &str, arguments: &[&str]) -> Result<String, String> {
    let output = Command::new(env!("CARGO"))
        .current_dir(root)
        .args(["tree", "--quiet", "--edges", edges, "--prefix", prefix, "--format", " {p} {f}"])
        .args(arguments)
        .output()
        .map_err(|error| format!("cargo tree does not start: {error}"))?;
    if !output.status.success() {
        return Err(format!("cargo tree {arguments:?}: {}", String::from_utf8_lossy(&output.stderr)));
    }
    Ok(String::from_utf8_lossy(&output.stdout)
        .lines()
        .map(|line| line.trim_start().to_owned() + "\n")
        .collect())
}

/// The packages of a tree with depths whose build scripts run a C compiler.
fn compilers_of_c(tree: &str) -> Vec<String> {
    // Package and features from the root of the tree to the current line.
    let mut way: Vec<(&str, &str)> = Vec::new();
    let mut found = Vec::new();
    for line in tree.lines() {
        let mut words = line.split_whitespace();
        let (Some(depth), Some(name)) = (words.next().and_then(|depth| depth.parse().ok()), words.next())
        else {
            continue;
        };
        way.truncate(depth);
        if C_TOOLS.contains(&name)
            && let Some(&(parent, features)) = way.last()
            && !WITHOUT_C
                .iter()
                .any(|&(package, feature)| package == parent && features.split(',').any(|one| one == feature))
        {
            found.push(parent.to_owned());
        }
        let features = words.find(|word| !word.starts_with('v') && !word.starts_with('('));
        way.push((name, features.unwrap_or_default()));
    }
    found.sort();
    found.dedup();
    found
}

/// Crates with which build scripts compile C, assembler or C++.
const C_TOOLS: [&str; 5] = ["cc", "cmake", "bindgen", "nasm-rs", "cxx-build"];

/// Packages that do not use such a crate when they have this feature.
const WITHOUT_C: [(&str, &str); 1] = [("blake3", "pure")];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_package_that_compiles_c_is_found_at_any_depth() {
        let blake3 = |features| {
            format!("0 kyklos v0.1.0 (/a/runtime) cpu\n1 blake3 v1.8.2 {features}\n2 cc v1.2.0 \n")
        };
        assert_eq!(compilers_of_c(&blake3("")), ["blake3"]);
        assert_eq!(compilers_of_c(&blake3("neon")), ["blake3"]);
        assert!(compilers_of_c(&blake3("pure,std")).is_empty());
        let deep = "0 kyklos v0.1.0 \n1 a v1.0.0 pure\n2 aws-lc-sys v0.30.0 \n3 cmake v0.1.5 \n2 b v1.0.0 \n";
        assert_eq!(compilers_of_c(deep), ["aws-lc-sys"]);
    }
}
