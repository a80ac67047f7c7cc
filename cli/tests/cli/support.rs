//! Running the program with a time limit, and small tensors to run it on.

use std::collections::HashMap;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use safetensors::{Dtype, SafeTensors, tensor::TensorView};

/// Whether a launcher or an operator sets this variable for a run. No such variable may enter a
/// test from outside.
fn is_of_a_run(name: &str) -> bool {
    use kyklos_launch::variables::{COORDINATOR, IDENTITY, JOB_ID, JOIN, LAUNCH, WORLD};
    let own = ["KYKLOS_RECORD_DIR", COORDINATOR, IDENTITY, JOB_ID, JOIN, LAUNCH, WORLD];
    let launchers = kyklos_launch::LAUNCHERS.iter().flat_map(|launcher| launcher.variables);
    own.iter().chain(launchers).any(|start| name.starts_with(start))
}

pub(crate) fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kyklos"));
    command.args(arguments).stdin(Stdio::null());
    for (name, _) in std::env::vars_os() {
        if is_of_a_run(&name.to_string_lossy()) {
            command.env_remove(name);
        }
    }
    command
}

/// Runs the program to its end. It must end within four minutes.
pub(crate) fn kyklos(arguments: &[&str]) -> Output {
    finish(
        command(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap(),
        Duration::from_secs(240),
    )
}

/// Waits for a process. If the process exceeds the limit, kills it, and the test fails.
pub(crate) fn finish(mut child: Child, limit: Duration) -> Output {
    let pid = child.id();
    let (mut stdout, mut stderr) = (child.stdout.take(), child.stderr.take());
    let read = |stream: Option<Box<dyn std::io::Read + Send>>| {
        thread::spawn(move || {
            let mut all = Vec::new();
            if let Some(mut stream) = stream {
                let _ = stream.read_to_end(&mut all);
            }
            all
        })
    };
    let out = read(stdout.take().map(|s| Box::new(s) as Box<dyn std::io::Read + Send>));
    let err = read(stderr.take().map(|s| Box::new(s) as Box<dyn std::io::Read + Send>));
    let until = Instant::now() + limit;
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if Instant::now() > until {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("process {pid} did not end within {limit:?}");
        }
        thread::sleep(Duration::from_millis(5));
    };
    Output { status, stdout: out.join().unwrap(), stderr: err.join().unwrap() }
}

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[track_caller]
pub(crate) fn succeeds(output: &Output) {
    assert_eq!(output.status.code(), Some(0), "{}{}", stdout(output), stderr(output));
}

/// Checks for exit code 2, no standard output, and one line on standard error that contains all of
/// `words`.
#[track_caller]
pub(crate) fn refused(output: &Output, words: &[&str]) {
    let text = stderr(output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert_eq!(stdout(output), "");
    assert_eq!(text.lines().count(), 1, "{text}");
    for word in words {
        assert!(text.contains(word), "`{word}` is not in: {text}");
    }
}

/// Compares what programs or calls have said with `refusals/snapshots/<concept>.snap`.
pub(crate) fn transcript_holds(concept: &str, transcript: &str) {
    // It is the same on every machine.
    let transcript = transcript.replace(&kyklos::machine::processor_name(), "…");
    let mut settings = insta::Settings::new();
    settings.set_snapshot_path("refusals/snapshots");
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    settings.bind(|| insta::assert_snapshot!(concept, transcript));
}

pub(crate) fn json(output: &Output) -> serde_json::Value {
    succeeds(output);
    serde_json::from_str(&stdout(output)).unwrap()
}

/// A tensor of the tests.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Tensor {
    pub(crate) shape: Vec<usize>,
    pub(crate) data: Vec<f32>,
}

impl Tensor {
    /// Numbers without a pattern. A pattern could hide errors of attention.
    pub(crate) fn made(shape: &[usize], seed: u32) -> Self {
        let mut state = u64::from(seed) * 0x9E37_79B9_7F4A_7C15 + 1;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * 2.0
        };
        Self { shape: shape.to_vec(), data: (0..shape.iter().product()).map(|_| next()).collect() }
    }
}

/// All tensors as F32, but `mask` as BOOL.
pub(crate) fn write(path: &Path, tensors: &[(&str, &Tensor)]) {
    let bytes: HashMap<&str, Vec<u8>> = tensors
        .iter()
        .map(|(name, tensor)| match *name {
            "mask" => (*name, tensor.data.iter().map(|x| u8::from(*x != 0.0)).collect()),
            _ => (*name, tensor.data.iter().flat_map(|x| x.to_le_bytes()).collect()),
        })
        .collect();
    let views: Vec<(&str, TensorView<'_>)> = tensors
        .iter()
        .map(|(name, tensor)| {
            let dtype = if *name == "mask" { Dtype::BOOL } else { Dtype::F32 };
            (*name, TensorView::new(dtype, tensor.shape.clone(), &bytes[name]).unwrap())
        })
        .collect();
    std::fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

pub(crate) fn read(path: &Path, name: &str) -> Tensor {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let view = file.tensor(name).unwrap();
    assert_eq!(view.dtype(), Dtype::F32);
    Tensor {
        shape: view.shape().to_vec(),
        data: view.data().chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().unwrap())).collect(),
    }
}

pub(crate) fn positions(path: &Path) -> Vec<i64> {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let view = file.tensor("positions").unwrap();
    assert_eq!(view.dtype(), Dtype::I64);
    view.data().chunks_exact(8).map(|x| i64::from_le_bytes(x.try_into().unwrap())).collect()
}

/// Attention by its definition, in f64; o `[batch, seq, heads, dim]` and lse `[batch, heads, seq]`.
pub(crate) fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    sees: impl Fn(usize, usize, usize) -> bool,
) -> (Tensor, Tensor) {
    attention_with(q, k, v, |b, _, i, j| sees(b, i, j).then_some(0.0))
}

/// The same with a function that returns the term to add to the logit of a key. `None` hides the
/// key.
pub(crate) fn attention_with(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    term: impl Fn(usize, usize, usize, usize) -> Option<f32>,
) -> (Tensor, Tensor) {
    let [batch, q_len, q_heads, dim] = q.shape[..] else { panic!() };
    let [_, kv_len, kv_heads, _] = k.shape[..] else { panic!() };
    let mut o = vec![0.0; q.data.len()];
    let mut lse = vec![f32::NEG_INFINITY; batch * q_heads * q_len];
    for b in 0..batch {
        for i in 0..q_len {
            for h in 0..q_heads {
                let q_at = ((b * q_len + i) * q_heads + h) * dim;
                let kv_at = |j: usize| ((b * kv_len + j) * kv_heads + h / (q_heads / kv_heads)) * dim;
                let weights: Vec<(usize, f64)> = (0..kv_len)
                    .filter_map(|j| Some((j, term(b, h, i, j)?)))
                    .map(|(j, term)| {
                        let dot: f64 = (0..dim)
                            .map(|d| f64::from(q.data[q_at + d]) * f64::from(k.data[kv_at(j) + d]))
                            .sum();
                        (j, (dot / (dim as f64).sqrt() + f64::from(term)).exp())
                    })
                    .collect();
                let sum: f64 = weights.iter().map(|(_, w)| w).sum();
                if weights.is_empty() {
                    continue;
                }
                lse[(b * q_heads + h) * q_len + i] = sum.ln() as f32;
                for d in 0..dim {
                    let x: f64 = weights.iter().map(|(j, w)| w * f64::from(v.data[kv_at(*j) + d])).sum();
                    o[q_at + d] = (x / sum) as f32;
                }
            }
        }
    }
    (Tensor { shape: q.shape.clone(), data: o }, Tensor { shape: vec![batch, q_heads, q_len], data: lse })
}

/// Checks that the shapes are equal. Values may differ by the rounding error of f32 sums of so few
/// terms.
#[track_caller]
pub(crate) fn assert_close(actual: &Tensor, expected: &Tensor) {
    assert_eq!(actual.shape, expected.shape);
    for (index, (a, e)) in actual.data.iter().zip(&expected.data).enumerate() {
        assert!(a == e || (a - e).abs() < 4e-6, "element {index}: {a}, expected {e}");
    }
}
