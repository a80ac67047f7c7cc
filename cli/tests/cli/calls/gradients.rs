//! `attend --grad`: gradients in files, and what has none.

use std::path::Path;

use serde_json::Value;

use crate::observe::watch::{Events, Watched, ranks};
use crate::support::*;

/// Tokens, heads and sizes of the tensors in these tests.
pub(crate) const B: usize = 2;
pub(crate) const S: usize = 21;
pub(crate) const HQ: usize = 4;
const HKV: usize = 2;
const D: usize = 8;

pub(crate) struct Inputs {
    pub(crate) q: Tensor,
    pub(crate) k: Tensor,
    pub(crate) v: Tensor,
    pub(crate) d_o: Tensor,
    d_lse: Tensor,
    sinks: Tensor,
}

impl Inputs {
    pub(crate) fn made() -> Self {
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

    /// dq, dk, dv and dsinks of causal attention, in f64 by their formulas: with P = exp(x − lse)
    /// and δ = do·o − dlse, dS = P (do·v − δ), dq = scale Σ dS k, dk = scale Σ dS q, dv = Σ P
    /// do, dsink = −Σ exp(sink − lse) δ.
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
pub(crate) const CAUSAL: [&str; 6] = ["--mask", "causal", "--grad", "--verify", "--device", "cpu"];

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
        let keys = integers(&path, "key_positions");
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

/// A tensor of positions.
pub(crate) fn integers(path: &Path, name: &str) -> Vec<usize> {
    let bytes = std::fs::read(path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let tensor = file.tensor(name).unwrap();
    tensor.data().as_chunks::<8>().0.iter().map(|x| i64::from_le_bytes(*x) as usize).collect()
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

/// A file of `clusters/`.
fn described(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../clusters").join(name).to_str().unwrap().to_owned()
}

#[test]
fn plans_are_chosen_by_the_time_of_both_passes() {
    let folder = tempfile::tempdir().unwrap();
    let (cluster, page) = (described("h100-infiniband.toml"), folder.path().join("plan.html"));
    let plan = ["plan", "--shape", "1,8192,8,2,128", "--dtype", "bf16", "--mask", "causal", "--ranks", "4"];
    let explain = ["--grad", "--explain", "--hardware", &cluster, "--report", page.to_str().unwrap()];
    let all = json(&kyklos(&[&plan[..], &explain, &["--json"]].concat()));
    let plans = all["plans"].as_array().unwrap();
    let number = |value: &Value| value.as_f64().unwrap();
    let mut sums = Vec::new();
    for plan in plans.iter().filter(|plan| plan["refused"].is_null()) {
        let passes = &plan["passes"];
        let (forward, backward) = (number(&passes["forward_s"]), number(&passes["backward_s"]));
        assert!(backward > forward, "{plan}");
        assert!((forward + backward - number(&plan["predicted_s"])).abs() < 1e-9, "{plan}");
        sums.push(forward + backward);
    }
    assert!(sums.len() > 10 && sums.is_sorted(), "{sums:?}");
    let text = stdout(&kyklos(&[&plan[..], &explain[..4]].concat()));
    assert!(text.contains("backward ms") && text.contains("backward by"), "{text}");
    let html = std::fs::read_to_string(page).unwrap();
    for id in ["timeline", "traffic", "memory", "ranks"] {
        for pass in ["", "backward-"] {
            assert!(html.contains(&format!("<section id=\"{pass}{id}\"")), "{pass}{id}");
        }
    }
    // What attend would run says how long each pass takes.
    let chosen = json(&kyklos(&[&plan[..], &["--grad", "--hardware", &cluster, "--json"]].concat()));
    let passes = ["forward", "backward"].map(|pass| number(&chosen[pass]["predicted_s"]));
    assert!((passes[0] + passes[1] - sums[0]).abs() < 1e-9, "{passes:?} {sums:?}");
}

#[test]
fn a_probe_with_gradients_measures_and_compares_both_passes() {
    let folder = tempfile::tempdir().unwrap();
    let saved = folder.path().join("here.toml");
    let shape = ["plan", "--shape", "1,256,2,1,32", "--ranks", "2", "--device", "cpu", "--strategy", "ring"];
    let probe =
        ["--grad", "--explain", "--probe", "--measure", "1", "--save", saved.to_str().unwrap(), "--json"];
    let all = json(&kyklos(&[&shape[..], &probe].concat()));
    assert!(all["measured"][0]["measured_s"].as_f64().unwrap() > 0.0, "{all}");
    let rate = &all["description"]["device"]["cpu"]["attention"][0];
    let products = rate["backward_products"].as_f64().unwrap();
    // Five products, and what a loaded machine adds to a measurement of milliseconds.
    assert!((1.0..100.0).contains(&products) && (products - 7.0).abs() > 1e-9, "{products}");
    assert!(std::fs::read_to_string(saved).unwrap().contains("backward_products = "));
}

#[test]
fn the_page_of_a_run_has_both_passes_from_threads_and_from_processes() {
    let folder = tempfile::tempdir().unwrap();
    let (page, cluster) = (folder.path().join("run.html"), described("loopback-2-cores.toml"));
    let shape = ["--shape", "1,300,4,2,16", "--strategy", "ring", "--json"];
    let hardware = ["--hardware", &cluster, "--report", page.to_str().unwrap(), "--repeat", "2"];
    for start in [&["attend", "--ranks", "3"][..], &["launch", "-n", "3", "--", "attend"]] {
        let run = json(&kyklos(&[start, &shape, &CAUSAL, &hardware].concat()));
        let backward = &run["backward"];
        assert!(backward["predicted_s"].as_f64().unwrap() > 0.0, "{run}");
        assert_eq!(backward["strategy"], "ring");
        let html = std::fs::read_to_string(&page).unwrap();
        for (id, pass) in [("", &run), ("backward-", backward)] {
            let of = |section: &str| {
                let id = format!("<section id=\"{id}{section}\"");
                html.split(&id).nth(1).unwrap().split("</section>").next().unwrap().to_owned()
            };
            for rank in pass["per_rank"].as_array().unwrap() {
                for figure in ["bytes_sent", "peak_bytes", "compute_s"] {
                    let value = format!("<data value=\"{}\"", rank[figure]);
                    assert!(of("ranks").contains(&value), "{id} {figure} {value}");
                }
            }
            assert!(of("timeline").matches("<details class=\"lane\"").count() == 3, "{id}");
            assert!(of("prediction").contains("predicted"), "{id}");
        }
        assert!(html.contains("Backward pass: 3 ranks finished in"), "{id}", id = start[0]);
        std::fs::remove_file(&page).unwrap();
    }
}

#[test]
fn a_ring_is_timed_in_turns_with_one_rank() {
    let bench = ["bench", "--device", "cpu", "--shape", "1,256,4,2,32", "--mask", "causal", "--dtype", "f32"];
    let turns = ["--backward", "--ranks", "2", "--rounds", "2", "--repeat", "2"];
    let lines = json(&kyklos(&[&bench[..], &turns, &["--json"]].concat()));
    let line = &lines[0];
    for pass in ["forward", "backward"] {
        for side in ["one_rank", "ring"] {
            let of = |name: &str| line[pass][side][name].as_f64().unwrap();
            assert!(0.0 < of("min_ms") && of("min_ms") <= of("median_ms") && of("median_ms") <= of("max_ms"));
            assert_eq!(of("runs"), 4.0);
        }
        let median = |side: &str| line[pass][side]["median_ms"].as_f64().unwrap();
        let ratio = line[pass]["ratio"].as_f64().unwrap();
        assert!((ratio - median("ring") / median("one_rank")).abs() < 1e-9, "{line}");
    }
    assert!(line["max_abs_error"].as_f64().unwrap() <= line["tolerance"].as_f64().unwrap(), "{line}");
    let text = stdout(&kyklos(&[&bench[..], &turns].concat()));
    assert!(text.contains("ring / 1 rank"), "{text}");
}

#[test]
fn both_passes_of_a_run_with_gradients_are_shown() {
    for start in [&["attend", "--ranks", "2"][..], &["launch", "-n", "2", "--", "attend"]] {
        let long = ["--shape", "1,2048,4,2,64", "--mask", "causal", "--device", "cpu", "--strategy", "ring"];
        let watched = Watched::start(&[start, &long, &["--grad", "--repeat", "30", "--watch"]].concat());
        let events: Vec<(String, Value)> = Events::of(&watched.address).collect();
        assert_eq!(watched.end().0, Some(0));
        let states: Vec<&Value> =
            events.iter().filter(|(name, _)| name == "state").map(|(_, state)| state).collect();
        let texts: Vec<&str> = states.iter().map(|state| state["text"].as_str().unwrap()).collect();
        assert!(texts.iter().any(|text| text.contains("of 30, backward pass.")), "{texts:?}");
        let doing: Vec<&str> = states
            .iter()
            .flat_map(|state| ranks(state))
            .map(|rank| rank["doing"].as_str().unwrap())
            .collect();
        assert!(doing.iter().any(|doing| doing.starts_with("computing gradients")), "{doing:?}");
        let done: Vec<f64> = states.iter().map(|state| state["done"].as_f64().unwrap()).collect();
        assert!(done.is_sorted() && done.last() == Some(&1.0), "{done:?}");
        let report = events[events.len() - 2].1.as_str().unwrap();
        for id in ["timeline", "backward-timeline", "backward-traffic"] {
            assert!(report.contains(&format!("<section id=\"{id}\"")), "{id}");
        }
    }
}
