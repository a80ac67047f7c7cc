//! Attention in f64, element by element, and made-up tensors.

use half::{bf16, f16};
use kyklos::{AttentionProblem, Dtype};

/// A small generator. Tests need numbers without structure; their quality does not matter.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    /// About normal, mean 0, variance 1.
    pub(crate) fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.unit()).sum::<f32>() - 6.0
    }

    fn unit(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 40) as f32 / (1u64 << 24) as f32
    }

    pub(crate) fn tensor(&mut self, dtype: Dtype, elements: usize) -> Vec<f32> {
        (0..elements).map(|_| rounded(dtype, self.normal())).collect()
    }
}

pub(crate) fn rounded(dtype: Dtype, x: f32) -> f32 {
    match dtype {
        Dtype::F32 => x,
        Dtype::F16 => f16::from_f32(x).to_f32(),
        Dtype::Bf16 => bf16::from_f32(x).to_f32(),
    }
}

pub(crate) fn stored(dtype: Dtype, values: &[f32]) -> Vec<u8> {
    match dtype {
        Dtype::F32 => bytemuck::cast_slice(values).to_vec(),
        Dtype::F16 => values.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
        Dtype::Bf16 => values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
    }
}

pub(crate) fn loaded(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    let halves = || bytes.chunks_exact(2).map(|pair| [pair[0], pair[1]]);
    match dtype {
        Dtype::F32 => bytes
            .chunks_exact(4)
            .map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]]))
            .collect(),
        Dtype::F16 => halves().map(|pair| f16::from_le_bytes(pair).to_f32()).collect(),
        Dtype::Bf16 => halves().map(|pair| bf16::from_le_bytes(pair).to_f32()).collect(),
    }
}

/// Output and log-sum-exp of one row of one head; dense `[batch, seq, heads, dim]` tensors.
pub(crate) fn row(
    problem: &AttentionProblem,
    [q, k, v]: [&[f32]; 3],
    batch: usize,
    token: usize,
    head: usize,
) -> (Vec<f64>, f64) {
    let [q_len, kv_len, q_heads, kv_heads, dim] =
        [problem.q_len, problem.kv_len, problem.q_heads, problem.kv_heads, problem.head_dim]
            .map(|n| n as usize);
    let kv_head = head / (q_heads / kv_heads);
    let q_row = &q[((batch * q_len + token) * q_heads + head) * dim..][..dim];
    let kv_row = |tensor: &'static str, key: usize| {
        let data = if tensor == "k" { k } else { v };
        &data[((batch * kv_len + key) * kv_heads + kv_head) * dim..][..dim]
    };
    let span = problem.mask.visible(batch, problem.q_position(token as u32), problem.kv_len);
    let keys: Vec<usize> = (0..kv_len).filter(|key| span.sees(*key as u32)).collect();
    let logits: Vec<f64> = keys
        .iter()
        .map(|key| {
            let dot: f64 =
                q_row.iter().zip(kv_row("k", *key)).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
            let logit = dot * f64::from(problem.scale);
            match problem.softcap.map(f64::from) {
                Some(cap) => cap * (logit / cap).tanh(),
                None => logit,
            }
        })
        .collect();
    if logits.iter().all(|logit| *logit == f64::NEG_INFINITY) {
        return (vec![0.0; dim], f64::NEG_INFINITY);
    }
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = logits.iter().map(|x| (x - max).exp()).collect();
    let sum: f64 = weights.iter().sum();
    let mut o = vec![0.0; dim];
    for (key, weight) in keys.iter().zip(&weights) {
        for (o, v) in o.iter_mut().zip(kv_row("v", *key)) {
            *o += weight / sum * f64::from(*v);
        }
    }
    (o, max + sum.ln())
}
