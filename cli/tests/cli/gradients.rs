//! `attend --grad`: gradients in files, and what has none.

use std::path::Path;

use crate::support::*;

/// Tokens, heads and sizes of the tensors in these tests.
const B: usize = 2;
const S: usize = 21;
const HQ: usize = 4;
const HKV: usize = 2;
const D: usize = 8;

struct Inputs {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_o: Tensor,
    d_lse: Tensor,
    sinks: Tensor,
}

impl Inputs {
    fn made() -> Self {
        let [of_q, of_kv] = [HQ, HKV].map(|heads| [B, S, heads, D]);
        Self {
            q: Tensor::made(&of_q, 1),
            k: Tensor::made(&of_kv, 2),
            v: Tensor::made(&of_kv, 3),
            d_o: Tensor::made(&of_q, 4),
            d_lse: Tensor::made(&[B, HQ, S], 5),
            sinks: Tensor { shape: vec![HQ], data: vec![0.5, -3.0, 2.0, 1.0] },
        }
    }

    fn write(&self, path: &Path) {
        let Self { q, k, v, d_o, d_lse, sinks } = self;
        write(path, &[("q", q), ("k", k), ("v", v), ("do", d_o), ("dlse", d_lse), ("sinks", sinks)]);
    }

    /// dq, dk, dv and dsinks of causal attention, in f64 by their formulas: with P = exp(x − lse) and
    /// δ = do·o − dlse, dS = P (do·v − δ), dq = scale Σ dS k, dk = scale Σ dS q, dv = Σ P do, dsink = −Σ exp(sink − lse) δ.
    fn gradients(&self) -> [Tensor; 4] {
        let at = |tensor: &Tensor, heads: usize, b: usize, token: usize, h: usize| -> Vec<f64> {
            let first = ((b * S + token) * heads + h) * D;
            tensor.data[first..first + D].iter().copied().map(f64::from).collect()
        };
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let scale = 1.0 / (D as f64).sqrt();
        let mut sums = [B * S * HQ * D, B * S * HKV * D, B * S * HKV * D, HQ].map(|len| vec![0.0_f64; len]);
        for (b, h, i) in (0..B).flat_map(|b| (0..HQ).flat_map(move |h| (0..S).map(move |i| (b, h, i)))) {
            let kv = h / (HQ / HKV);
            let (q, d_o) = (at(&self.q, HQ, b, i, h), at(&self.d_o, HQ, b, i, h));
            let scores: Vec<f64> = (0..=i).map(|j| scale * dot(&q, &at(&self.k, HKV, b, j, kv))).collect();
            let sink = f64::from(self.sinks.data[h]);
            let lse = scores.iter().chain([&sink]).map(|x| x.exp()).sum::<f64>().ln();
            let weights: Vec<f64> = scores.iter().map(|x| (x - lse).exp()).collect();
            let of_v: Vec<f64> = (0..=i).map(|j| dot(&d_o, &at(&self.v, HKV, b, j, kv))).collect();
            let delta = dot(&weights, &of_v) - f64::from(self.d_lse.data[(b * HQ + h) * S + i]);
            sums[3][h] -= (sink - lse).exp() * delta;
            for j in 0..=i {
                let (k, d_s) = (at(&self.k, HKV, b, j, kv), weights[j] * (of_v[j] - delta));
                for d in 0..D {
                    sums[0][((b * S + i) * HQ + h) * D + d] += scale * d_s * k[d];
                    sums[1][((b * S + j) * HKV + kv) * D + d] += scale * d_s * q[d];
                    sums[2][((b * S + j) * HKV + kv) * D + d] += weights[j] * d_o[d];
                }
            }
        }
        let shapes = [vec![B, S, HQ, D], vec![B, S, HKV, D], vec![B, S, HKV, D], vec![HQ]];
        let mut all = sums
            .into_iter()
            .zip(shapes)
            .map(|(sums, shape)| Tensor { shape, data: sums.into_iter().map(|sum| sum as f32).collect() });
        std::array::from_fn(|_| all.next().unwrap())
    }
}

const NAMES: [&str; 4] = ["dq", "dk", "dv", "dsinks"];
const CAUSAL: [&str; 6] = ["--mask", "causal", "--grad", "--verify", "--device", "cpu"];

#[test]
fn gradients_of_a_file_are_right_on_every_mesh() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (folder.path().join("in"), folder.path().join("out"));
    let inputs = Inputs::made();
    inputs.write(&input);
    let right = inputs.gradients();
    let files = ["--input", input.to_str().unwrap(), "--output", output.to_str().unwrap()];
    for shared in [
        &["attend", "--mesh", "1x1"][..],
        &["attend", "--mesh", "1x3", "--tokens", "2,0,19", "--placement", "striped"],
        &["attend", "--mesh", "2x2", "--placement", "zigzag"],
        &["attend", "--mesh", "1x3", "--replicated", "3..9"],
        &["attend", "--mesh", "2x2", "--replicated", "0..2"],
        // They send queries.
        &["attend", "--ranks", "3", "--strategy", "pass-q"],
        &["attend", "--ranks", "4", "--strategy", "tree"],
        &["launch", "-n", "2", "--", "attend", "--repeat", "2"],
    ] {
        succeeds(&kyklos(&[shared, &files, &CAUSAL].concat()));
        for (name, right) in NAMES.into_iter().zip(&right) {
            assert_close(&read(&output, name), right);
        }
        std::fs::remove_file(&output).unwrap();
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing but the input is left");
}

#[test]
fn each_rank_writes_the_gradients_of_its_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let (input, parts) = (folder.path().join("in"), folder.path().join("part-{rank}"));
    let inputs = Inputs::made();
    inputs.write(&input);
    let files = ["--input", input.to_str().unwrap(), "--output", parts.to_str().unwrap()];
    let shared = ["attend", "--mesh", "1x3", "--tokens", "5,9,7"];
    succeeds(&kyklos(&[&shared, &files[..], &CAUSAL].concat()));
    let [_, right_k, _, right_sinks] = inputs.gradients();
    let mut sinks = Tensor { shape: vec![HQ], data: vec![0.0; HQ] };
    for rank in 0..3 {
        let path = folder.path().join(format!("part-{rank}"));
        let bytes = std::fs::read(&path).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let keys = file.tensor("key_positions").unwrap();
        let keys: Vec<usize> =
            keys.data().as_chunks::<8>().0.iter().map(|x| i64::from_le_bytes(*x) as usize).collect();
        assert_eq!(keys.len(), [5, 9, 7][rank]);
        let dk = read(&path, "dk");
        assert_eq!(dk.shape, [B, keys.len(), HKV, D]);
        let row = HKV * D;
        let rows = (0..B).flat_map(|b| keys.iter().map(move |key| (b * S + key) * row));
        let data = rows.flat_map(|at| right_k.data[at..at + row].to_vec()).collect();
        assert_close(&dk, &Tensor { shape: dk.shape.clone(), data });
        let part = read(&path, "dsinks_part");
        sinks.data.iter_mut().zip(part.data).for_each(|(sum, part)| *sum += part);
    }
    assert_close(&sinks, &right_sinks);
}

#[test]
fn a_bias_and_other_types_are_verified() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in");
    let Inputs { q, k, v, d_o, .. } = Inputs::made();
    // Of all heads, and of one head for all queries.
    for shape in [&[B, HQ, S, S][..], &[1, 1, 1, S]] {
        let bias = Tensor::made(shape, 9);
        write(&input, &[("q", &q), ("k", &k), ("v", &v), ("do", &d_o), ("bias", &bias)]);
        let files = ["attend", "--ranks", "3", "--json", "--input", input.to_str().unwrap()];
        within(&kyklos(&[&files, &CAUSAL[..]].concat()));
    }
    for more in [
        &["--dtype", "bf16", "--sinks"][..],
        &["--dtype", "f16", "--softcap", "5"],
        &["--wire", "f16"],
        &["--mask", "window:20,-1"],
    ] {
        let shape = ["attend", "--shape", "2,90,4,2,64", "--grad", "--verify", "--json", "--ranks", "3"];
        within(&kyklos(&[&shape, &["--device", "cpu"][..], more].concat()));
    }
}

/// The gradients were compared, and none is wrong.
fn within(output: &std::process::Output) {
    let json = json(output);
    let of = |name: &str| json["backward"][name].as_f64().unwrap();
    assert!(0.0 < of("max_abs_error") && of("max_abs_error") <= of("tolerance"), "{json}");
    assert_eq!(json["backward"]["per_rank"].as_array().unwrap().len(), 3);
}

#[test]
fn wrong_gradients_get_no_name() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in");
    let Inputs { q, k, v, mut d_o, .. } = Inputs::made();
    // Products with such gradients are beyond the largest f32; the oracle has them in f64.
    d_o.data.iter_mut().for_each(|x| *x *= 1e38);
    write(&input, &[("q", &q), ("k", &k), ("v", &v), ("do", &d_o)]);
    for (command, name) in [
        (&["attend", "--ranks", "3"][..], "whole"),
        (&["attend", "--ranks", "3"], "part-{rank}"),
        (&["launch", "-n", "3", "--", "attend"], "whole"),
    ] {
        let target = folder.path().join(name);
        let files = ["--input", input.to_str().unwrap(), "--output", target.to_str().unwrap()];
        let result = kyklos(&[command, &files, &CAUSAL].concat());
        let text = stderr(&result);
        assert_eq!(result.status.code(), Some(1), "{text}");
        assert!(text.contains("verification failed: wrong gradient"), "{text}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "{command:?} leaves {name}");
    }
}

#[test]
fn files_without_fitting_gradients_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in");
    let Inputs { q, k, v, d_o, .. } = Inputs::made();
    let attend = ["attend", "--input", input.to_str().unwrap(), "--grad", "--device", "cpu"];
    let short = Tensor::made(&[B, S - 1, HQ, D], 4);
    let turned = Tensor::made(&[B, S, HQ], 5);
    for (tensors, words) in [
        (&[][..], &["`do`", "--grad"][..]),
        (&[("do", &short)], &["`do`", "[2, 20, 4, 8]", "[2, 21, 4, 8]"]),
        (&[("do", &d_o), ("dlse", &turned)], &["`dlse`", "[2, 21, 4]", "[2, 4, 21]"]),
    ] {
        write(&input, &[&[("q", &q), ("k", &k), ("v", &v)], tensors].concat());
        refused(&kyklos(&attend), words);
    }
    // Without --grad they are tensors that are not used.
    let output = kyklos(&["attend", "--input", input.to_str().unwrap(), "--device", "cpu"]);
    succeeds(&output);
    assert!(stderr(&output).contains("dlse, do"), "{}", stderr(&output));
}

#[test]
fn a_plan_of_both_passes_is_printed() {
    let plan = ["plan", "--shape", "1,64,4,2,8", "--ranks", "2", "--grad"];
    let output = kyklos(&plan);
    succeeds(&output);
    let (forward, backward) =
        stdout(&output).split_once("backward pass").map(|(a, b)| (a.to_owned(), b.to_owned())).unwrap();
    assert!(!forward.contains("gradients q") && backward.contains("gradients q"), "{forward}{backward}");
    let both = json(&kyklos(&[&plan[..], &["--json"]].concat()));
    for pass in ["forward", "backward"] {
        assert_eq!(both[pass]["plans"].as_array().map(Vec::len), Some(2), "{both}");
    }
}
