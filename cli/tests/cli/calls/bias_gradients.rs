//! `attend --grad-bias`: the gradient of a bias in files.

use std::path::Path;
use std::process::Output;

use crate::calls::gradients::{B, CAUSAL, HQ, Inputs, S, integers};
use crate::support::*;

#[test]
fn the_gradient_of_a_bias_is_verified_and_written_in_the_shape_of_the_bias() {
    let folder = tempfile::tempdir().unwrap();
    let [input, whole, parts] = ["in", "whole", "part-{rank}"].map(|name| folder.path().join(name));
    let Inputs { q, k, v, d_o, .. } = Inputs::made();
    for shape in [[B, HQ, S, S], [1, 1, S, S], [B, 1, S, S], [1, HQ, 1, S], [1, 1, 1, S]] {
        let bias = Tensor::made(&shape, 9);
        write(&input, &[("q", &q), ("k", &k), ("v", &v), ("do", &d_o), ("bias", &bias)]);
        let files = |output: &Path| {
            ["--input", input.to_str().unwrap(), "--output", output.to_str().unwrap(), "--grad-bias"]
                .map(str::to_owned)
        };
        let mut first = None;
        for shared in [
            &["attend", "--mesh", "1x1"][..],
            &["attend", "--mesh", "1x3", "--tokens", "2,0,19", "--placement", "striped"],
            &["attend", "--mesh", "2x2"],
            // Where queries would travel, the program takes another strategy for the way back.
            &["attend", "--ranks", "3", "--strategy", "pass-q"],
            &["launch", "-n", "2", "--", "attend"],
        ] {
            let files = files(&whole);
            let files: Vec<&str> = files.iter().map(String::as_str).collect();
            succeeds(&kyklos(&[shared, &files, &CAUSAL].concat()));
            let found = read(&whole, "dbias");
            assert_eq!(found.shape, shape);
            assert_close(&found, first.get_or_insert_with(|| read(&whole, "dbias")));
            std::fs::remove_file(&whole).unwrap();
        }
        let first = first.unwrap();
        // A row of weights times (dP − δ) adds up to 0 where a row of the output depends on nothing else.
        let rows = first.data.chunks_exact(S).map(|row| row.iter().map(|x| f64::from(*x)).sum::<f64>());
        assert!(rows.map(f64::abs).fold(0.0, f64::max) < 1e-3);
        assert!(first.data.iter().any(|x| x.abs() > 0.1));
        let files = files(&parts);
        let files: Vec<&str> = files.iter().map(String::as_str).collect();
        let shared = ["attend", "--mesh", "1x3", "--tokens", "5,9,7"];
        succeeds(&kyklos(&[&shared, &files[..], &CAUSAL].concat()));
        let mut sum = vec![0.0; first.data.len()];
        for (rank, tokens) in [5, 9, 7].into_iter().enumerate() {
            let path = folder.path().join(format!("part-{rank}"));
            if shape[2] == 1 {
                let part = read(&path, "dbias_part");
                sum.iter_mut().zip(part.data).for_each(|(sum, part)| *sum += part);
                continue;
            }
            let part = read(&path, "dbias");
            assert_eq!(part.shape, [shape[0], shape[1], tokens, S]);
            let positions = integers(&path, "positions");
            for (index, value) in part.data.into_iter().enumerate() {
                let (head, row) = (index / S / tokens, index / S % tokens);
                sum[(head * S + positions[row]) * S + index % S] = value;
            }
        }
        assert_close(&Tensor { shape: first.shape.clone(), data: sum }, &first);
    }
    let mask = Tensor::made(&[1, 1, S, S], 3);
    for tensors in [&[][..], &[("mask", &mask)]] {
        write(&input, &[&[("q", &q), ("k", &k), ("v", &v), ("do", &d_o)], tensors].concat());
        let attend =
            ["attend", "--input", input.to_str().unwrap(), "--grad", "--grad-bias", "--device", "cpu"];
        refused(&kyklos(&attend), &["--grad-bias", "`bias`"]);
    }
}

/// Skipped where there is no driver, unless KYKLOS_REQUIRE_GPU says that there is one.
#[test]
fn the_gradient_of_a_bias_on_a_wgpu_device_is_verified() {
    let required = std::env::var_os("KYKLOS_REQUIRE_GPU").is_some_and(|value| value == "1");
    if ::kyklos::backend::wgpu::WgpuBackend::enumerate().is_empty() && !required {
        eprintln!("no wgpu device here: the gradient of a bias on wgpu is not tested");
        return;
    }
    verified("wgpu", kyklos);
}

/// Of biases with rows of their own and with one row for all, on two ranks whose device is
/// `device`.
pub(crate) fn verified(device: &str, kyklos: impl Fn(&[&str]) -> Output) {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in");
    let Inputs { q, k, v, d_o, .. } = Inputs::made();
    for shape in [[1, HQ, S, S], [B, 1, 1, S]] {
        let bias = Tensor::made(&shape, 9);
        write(&input, &[("q", &q), ("k", &k), ("v", &v), ("do", &d_o), ("bias", &bias)]);
        let attend = ["attend", "--input", input.to_str().unwrap(), "--mesh", "1x2", "--mask", "causal"];
        let asked = ["--grad", "--grad-bias", "--verify", "--device", device];
        succeeds(&kyklos(&[&attend[..], &asked].concat()));
    }
}
