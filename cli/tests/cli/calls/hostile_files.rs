//! Input and output files that are damaged, hostile or not regular files.

use crate::support::*;

#[test]
fn hostile_files_are_refused_with_a_reason() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("hostile");
    let header = |json: &str, data: usize| {
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(json.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        bytes
    };
    let tensor = |name: &str, dtype: &str, shape: &str, from: usize, to: usize| {
        format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{from},{to}]}}"#)
    };
    let three = |q: (&str, &str), k: (&str, &str), v: (&str, &str), sizes: [usize; 3]| {
        let [a, b, c] = [sizes[0], sizes[0] + sizes[1], sizes.iter().sum()];
        let json = format!(
            "{{{},{},{}}}",
            tensor("q", q.0, q.1, 0, a),
            tensor("k", k.0, k.1, a, b),
            tensor("v", v.0, v.1, b, c)
        );
        header(&json, c)
    };
    let good = ("F32", "[1,2,1,8]");
    let size = [64, 64, 64];
    let whole = three(good, good, good, size);
    let extra = |name: &str| {
        let json = format!(
            "{{{},{},{},{}}}",
            tensor("q", "F32", "[1,2,1,8]", 0, 64),
            tensor("k", "F32", "[1,2,1,8]", 64, 128),
            tensor("v", "F32", "[1,2,1,8]", 128, 192),
            tensor(name, "F32", "[2]", 192, 200)
        );
        header(&json, 200)
    };
    let cases: Vec<(Vec<u8>, &[&str])> = vec![
        (vec![], &["not a safetensors file"]),
        (vec![1, 2, 3], &["not a safetensors file"]),
        (u64::MAX.to_le_bytes().to_vec(), &["header"]),
        ((1_u64 << 40).to_le_bytes().to_vec(), &["header"]),
        (1000_u64.to_le_bytes().to_vec(), &["ends inside its header"]),
        (header("{", 0), &["not a safetensors file"]),
        (header("[]", 0), &["not a safetensors file"]),
        (header("{}", 0), &["no tensor `q`"]),
        (header(&"[".repeat(100_000), 0), &["not a safetensors file"]),
        (whole[..whole.len() - 1].to_vec(), &["truncated"]),
        ([&whole[..], &[0]].concat(), &["follow the last tensor"]),
        (three(("F64", "[1,2,1,8]"), good, good, [128, 64, 64]), &["F64", "F32, F16 or BF16"]),
        (three(("F16", "[1,2,1,8]"), good, good, [32, 64, 64]), &["one dtype"]),
        (three(("F32", "[2,8]"), good, good, size), &["[2, 8]", "four extents"]),
        (three(("F32", "[1,2,1,16]"), good, good, [128, 64, 64]), &["batch and dim"]),
        (three(good, good, ("F32", "[1,4,1,8]"), [64, 64, 128]), &["k with shape", "v with shape"]),
        (three(good, ("F32", "[1,2,2,8]"), ("F32", "[1,2,2,8]"), [64, 128, 128]), &["heads"]),
        (three(good, ("F32", "[1,4,1,8]"), good, size), &["not a safetensors file"]),
        (three(("F32", "[4294967296,0,1,8]"), good, good, [0, 64, 64]), &["four extents"]),
        (
            three(("F32", "[4294967296,4294967296,4294967296,8]"), good, good, size),
            &["not a safetensors file"],
        ),
        (
            header(
                &format!(
                    "{{{},{},{}}}",
                    tensor("q", "F32", "[1,2,1,8]", 0, 64),
                    tensor("k", "F32", "[1,2,1,8]", 0, 64),
                    tensor("v", "F32", "[1,2,1,8]", 64, 128)
                ),
                128,
            ),
            &["not a safetensors file"],
        ),
        (
            header(&format!("{{{}}}", tensor("q", "F32", "[1,2,1,8]", 64, 18_446_744_073_709_551_615)), 64),
            &["not a safetensors file"],
        ),
        (extra("mask"), &["`mask` as F32", "BOOL"]),
        (
            header(
                &format!(
                    "{{{},{},{},{}}}",
                    tensor("q", "F32", "[1,2,1,8]", 0, 64),
                    tensor("k", "F32", "[1,2,1,8]", 64, 128),
                    tensor("v", "F32", "[1,2,1,8]", 128, 192),
                    tensor("v", "F32", "[1,1,1,16]", 128, 192)
                ),
                192,
            ),
            &["not a safetensors file", "\"v\" appears twice"],
        ),
        (extra("sinks"), &["`sinks` with shape", "one sink for each query head"]),
        (extra("bias"), &["`bias` with shape [2]", "[1 or 1, 1 or 1, 2 or 1, 2]"]),
    ];
    for (bytes, words) in cases {
        std::fs::write(&path, &bytes).unwrap();
        refused(&kyklos(&["attend", "--input", path.to_str().unwrap(), "--device", "cpu"]), words);
    }
    std::fs::write(&path, whole).unwrap();
    succeeds(&kyklos(&["attend", "--input", path.to_str().unwrap(), "--device", "cpu"]));
    refused(
        &kyklos(&["attend", "--input", path.to_str().unwrap(), "--dtype", "f16"]),
        &["--dtype f16", "f32"],
    );
    refused(
        &kyklos(&["attend", "--input", path.to_str().unwrap(), "--output", path.to_str().unwrap()]),
        &["overwrite the input"],
    );
    let before = std::fs::read(&path).unwrap();
    refused(
        &kyklos(&["attend", "--input", path.to_str().unwrap(), "--trace", path.to_str().unwrap()]),
        &["--trace would overwrite the input"],
    );
    let ours = folder.path().join("part-1.safetensors");
    std::fs::write(&ours, &before).unwrap();
    let every = folder.path().join("part-{rank}.safetensors");
    refused(
        &kyklos(&[
            "attend",
            "--ranks",
            "2",
            "--input",
            ours.to_str().unwrap(),
            "--output",
            every.to_str().unwrap(),
        ]),
        &["--output would overwrite the input"],
    );
    assert_eq!(std::fs::read(&ours).unwrap(), before);
    refused(&kyklos(&["attend", "--input", folder.path().to_str().unwrap()]), &["regular file"]);
    refused(&kyklos(&["attend", "--input", "no/such/file"]), &["no/such/file"]);
}

#[test]
#[cfg(unix)]
fn no_file_that_an_option_names_is_waited_for_or_read_without_end() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let rank = ["attend", "--shape", "1,64,8,2,64", "--device", "cpu", "--rank", "0"];
    let of_two = [&rank[..], &["--world", "2", "--coordinator", "127.0.0.1:9"]].concat();
    let explain = ["plan", "--explain", "--shape", "1,64,8,2,64", "--ranks", "2"];
    for path in [pipe.to_str().unwrap(), "/dev/zero"] {
        for (before, option) in [
            (&explain[..], "--hardware"),
            (&rank[..5], "--hardware"),
            (&rank[..], "--cluster"),
            (&of_two[..], "--identity"),
            (&rank[..5], "--invite"),
            (&["doctor"][..], ""),
            (&["certs", "show"][..], ""),
        ] {
            let words: Vec<&str> =
                before.iter().copied().chain([option, path]).filter(|word| !word.is_empty()).collect();
            let output = kyklos(&words);
            assert_eq!(output.status.code(), Some(2), "{words:?}: {}", stderr(&output));
            assert!(stderr(&output).contains("it is not a regular file"), "{words:?}: {}", stderr(&output));
        }
    }
}

#[test]
#[cfg(unix)]
fn what_is_no_regular_file_is_refused_and_left_alone() {
    use std::os::unix::fs::FileTypeExt;
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let folder_name = folder.path().to_str().unwrap();
    // To open the pipe would block until another process writes to it.
    for input in [pipe.to_str().unwrap(), "/dev/zero", folder_name] {
        for command in ["attend", "plan"] {
            refused(&kyklos(&[command, "--input", input]), &[input, "not a regular file"]);
        }
    }
    // A finished result replaces any file of its name. With enough rights this includes /dev/null
    // itself, so the test uses a link.
    let (null, pipe1) = (folder.path().join("null"), folder.path().join("pipe1"));
    std::os::unix::fs::symlink("/dev/null", &null).unwrap();
    std::fs::rename(&pipe, &pipe1).unwrap();
    for output in ["null", "pipe{rank}"] {
        let output = folder.path().join(output);
        let attend = ["attend", "--shape", "1,64,8,2,64", "--ranks", "2", "--device", "cpu", "--output"];
        refused(&kyklos(&[&attend[..], &[output.to_str().unwrap()]].concat()), &["not a regular file"]);
    }
    assert!(null.is_symlink() && std::fs::metadata(pipe1).unwrap().file_type().is_fifo());
}
