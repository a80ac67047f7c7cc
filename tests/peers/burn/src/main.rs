//! Burn's attention on wgpu: timed with its data resident, checked against the definition in f64, reported as JSON.
//!
//!     burn-attention BATCH,TOKENS,HEADS,DIM,full|causal,f32|f16 [REPEAT]
//!
//! The first call compiles and tunes and is told apart; two more warm up; REPEAT (default 7) are timed.
//! `QUERIES:TOKENS` in place of TOKENS is for fewer queries than keys, mask `full` only.

use std::process::ExitCode;
use std::time::Instant;

use burn_tensor::module::attention;
use burn_tensor::ops::AttentionModuleOptions;
use burn_tensor::{DType, Device, DeviceKind, Tensor, TensorData};
use serde::Serialize;

#[derive(Serialize)]
struct Report {
    case: String,
    /// Compilation and the autotuner's trials, where no earlier process left its choice.
    first_ms: f64,
    times_ms: Vec<f64>,
    median_ms: f64,
    min_ms: f64,
    max_ms: f64,
    max_abs_error: f64,
    rows_checked: usize,
}

struct Case {
    text: String,
    batch: usize,
    queries: usize,
    keys: usize,
    heads: usize,
    dim: usize,
    causal: bool,
    dtype: DType,
}

impl Case {
    fn parse(text: &str) -> Option<Self> {
        let [batch, tokens, heads, dim, mask, dtype]: [&str; 6] =
            text.split(',').collect::<Vec<_>>().try_into().ok()?;
        let (queries, keys) = tokens.split_once(':').unwrap_or((tokens, tokens));
        let case = Self {
            text: text.to_owned(),
            batch: batch.parse().ok()?,
            queries: queries.parse().ok()?,
            keys: keys.parse().ok()?,
            heads: heads.parse().ok()?,
            dim: dim.parse().ok()?,
            causal: match mask {
                "full" => false,
                "causal" => true,
                _ => return None,
            },
            dtype: match dtype {
                "f32" => DType::F32,
                "f16" => DType::F16,
                _ => return None,
            },
        };
        let nonzero = [case.batch, case.queries, case.keys, case.heads, case.dim].iter().all(|n| *n > 0);
        (nonzero && (case.queries == case.keys || !case.causal)).then_some(case)
    }

    /// Values as they are after rounding to the case's dtype, so that the reference sees what Burn sees.
    fn tensor(&self, tokens: usize, random: &mut Random) -> Result<(TensorData, Vec<f32>), String> {
        let shape = [self.batch, self.heads, tokens, self.dim];
        let values = (0..shape.iter().product()).map(|_| random.normal()).collect::<Vec<_>>();
        let data =
            TensorData::new(values, shape).try_cast(self.dtype).map_err(|error| format!("{error:?}"))?;
        let values = data.iter().collect();
        Ok((data, values))
    }

    /// Largest distance of `o` to the definition, over a sample of rows, and how many rows.
    fn judge(&self, [q, k, v]: [&[f32]; 3], o: &[f32]) -> (f64, usize) {
        let mut worst: f64 = 0.0;
        let mut rows = 0;
        for plane in 0..self.batch * self.heads {
            let row_of = |data: &[f32], tokens: usize, row: usize| {
                let start = (plane * tokens + row) * self.dim;
                data[start..start + self.dim].iter().map(|x| f64::from(*x)).collect::<Vec<_>>()
            };
            for row in (0..self.queries).step_by(37).chain([self.queries - 1]) {
                let seen = if self.causal { row + 1 } else { self.keys };
                let query = row_of(q, self.queries, row);
                let logit = |key| {
                    let key = row_of(k, self.keys, key);
                    query.iter().zip(&key).map(|(a, b)| a * b).sum::<f64>() / (self.dim as f64).sqrt()
                };
                let logits = (0..seen).map(logit).collect::<Vec<_>>();
                let top = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let mut exact = vec![0.0; self.dim];
                let mut weights = 0.0;
                for (key, logit) in logits.iter().enumerate() {
                    let weight = (logit - top).exp();
                    weights += weight;
                    for (sum, value) in exact.iter_mut().zip(row_of(v, self.keys, key)) {
                        *sum += weight * value;
                    }
                }
                for (exact, got) in exact.iter().zip(row_of(o, self.queries, row)) {
                    let off = (exact / weights - got).abs();
                    // A NaN must not pass for small.
                    worst = if off.is_nan() { f64::INFINITY } else { worst.max(off) };
                }
                rows += 1;
            }
        }
        (worst, rows)
    }
}

/// SplitMix64, and normal numbers out of it.
struct Random(u64);

impl Random {
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    fn normal(&mut self) -> f32 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        (radius * (std::f64::consts::TAU * self.unit()).cos()) as f32
    }
}

fn measure(case: &Case, repeat: usize) -> Result<Report, String> {
    let device = Device::wgpu(DeviceKind::DefaultDevice);
    let mut random = Random(7);
    let (q_data, q) = case.tensor(case.queries, &mut random)?;
    let (k_data, k) = case.tensor(case.keys, &mut random)?;
    let (v_data, v) = case.tensor(case.keys, &mut random)?;
    let tensors = [q_data, k_data, v_data].map(|data| Tensor::<4>::from_data(data, (&device, case.dtype)));
    let options = AttentionModuleOptions { is_causal: case.causal, ..Default::default() };
    let sync = || device.sync().map_err(|error| format!("{error:?}"));
    sync()?;
    let call = || -> Result<(f64, Tensor<4>), String> {
        let [q, k, v] = tensors.clone();
        let started = Instant::now();
        let o = attention(q, k, v, None, None, options);
        sync()?;
        Ok((started.elapsed().as_secs_f64() * 1e3, o))
    };
    let (first_ms, _) = call()?;
    for _ in 0..2 {
        call()?;
    }
    let mut times_ms = Vec::new();
    let mut last = None;
    for _ in 0..repeat {
        let (ms, o) = call()?;
        times_ms.push(ms);
        last = Some(o);
    }
    let o = last.ok_or("REPEAT is 0")?.try_into_vec_as::<f32>().map_err(|error| format!("{error:?}"))?;
    let (max_abs_error, rows_checked) = case.judge([&q, &k, &v], &o);
    let mut sorted = times_ms.clone();
    sorted.sort_by(f64::total_cmp);
    Ok(Report {
        case: case.text.clone(),
        first_ms,
        median_ms: sorted[repeat / 2],
        min_ms: sorted[0],
        max_ms: sorted[repeat - 1],
        times_ms,
        max_abs_error,
        rows_checked,
    })
}

fn main() -> ExitCode {
    let arguments = std::env::args().skip(1).collect::<Vec<_>>();
    let case = arguments.first().and_then(|text| Case::parse(text));
    let repeat = arguments.get(1).map_or(Some(7), |text| text.parse().ok());
    let (Some(case), Some(repeat)) = (case, repeat) else {
        eprintln!("burn-attention BATCH,TOKENS,HEADS,DIM,full|causal,f32|f16 [REPEAT]");
        return ExitCode::from(2);
    };
    match measure(&case, repeat) {
        Ok(report) => {
            println!("{}", serde_json::to_string(&report).expect("numbers and text"));
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{}: {error}", case.text);
            ExitCode::FAILURE
        }
    }
}
