//! Whether a helper's results are right: a row of them is computed again.
//!
//! The row is chosen by randomness that the helper does not know. Every key/value head of the
//! part may be chosen, and the query heads of it are compared in all batch entries.

use std::hash::{BuildHasher, Hasher, RandomState};

use kyklos::backend::Device;
use kyklos::{Dtype, Result, Saved, Session, Tensor, WireFormat, in_process_group};

use crate::call::{Call, Part, Shape};
use crate::encoding::{Encoding, Role};
use crate::owner::Inputs;

/// Computes rows again, on the processor.
pub(crate) struct Checker {
    session: Session,
    random: RandomState,
    count: u64,
}

impl std::fmt::Debug for Checker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Checker").field("count", &self.count).finish_non_exhaustive()
    }
}

impl Checker {
    pub(crate) fn new() -> Self {
        let session = Session::new(in_process_group(1).remove(0), Device::cpu());
        Self { session, random: RandomState::new(), count: 0 }
    }

    /// A number below `end` that nobody can know before.
    pub(crate) fn random(&mut self, end: u32) -> u32 {
        self.count += 1;
        let mut hasher = self.random.build_hasher();
        hasher.write_u64(self.count);
        u32::try_from(hasher.finish() % u64::from(end.max(1))).unwrap_or(0)
    }

    /// Compares one row of the results of a part, whose options and shape these are. `Some`: what
    /// is wrong, in words. Of gradients it is that of q. Tensors are dense and in host memory.
    ///
    /// # Errors
    /// Of the processor's kernels.
    pub(crate) fn wrong(
        &mut self,
        (call, shape): (&Call, &Shape),
        inputs: &Inputs,
        keys: &[Tensor; 2],
        results: &[Tensor],
        wire: WireFormat,
    ) -> Result<Option<String>> {
        if shape.q_len == 0 || shape.kv_heads == 0 {
            return Ok(None);
        }
        let (head, row) = (self.random(shape.kv_heads), self.random(shape.q_len));
        let part = Part { kv_heads: head..head + 1, rows: row..row + 1 };
        let encoding = Encoding::new(shape.dtype, wire)?;
        // As the helper has it.
        let sent = |tensor: Tensor, role| {
            let parts = encoding.encode(self.session.device(), &tensor.copied()?, role)?;
            let arrived = encoding.decode(self.session.device(), parts, tensor.shape(), role)?;
            Tensor::from_bytes(tensor.shape(), shape.dtype, pollster::block_on(arrived.bytes())?)
        };
        let q = sent(part.of_queries(&inputs.q, shape)?, Role::Rows)?;
        let k = sent(part.of_keys(&keys[0])?, Role::Keys)?;
        let v = sent(part.of_keys(&keys[1])?, Role::Rows)?;
        let d_o =
            inputs.d_o.as_ref().map(|d_o| sent(part.of_queries(d_o, shape)?, Role::Gradients)).transpose()?;
        let of_row = part.call(call, shape);
        let attention = of_row.attention();
        let output = self.session.attend(&attention, &q, &k, &v)?;
        let wanted = match &d_o {
            None => output.o,
            Some(d_o) => {
                let (o, lse) = (output.o, output.lse_pair);
                let saved = Saved { q: q.clone(), k: k.clone(), v: v.clone(), o, lse };
                self.session.backward(&attention, &saved, d_o, None)?.dq
            }
        };
        let row = Row { call, shape, numbers: [numbers(&q)?, numbers(&k)?, numbers(&v)?] };
        let sizes = Tensor::new(k.shape(), row.sizes(d_o.as_ref().map(numbers).transpose()?.as_deref()))?;
        // Of the same weights; in f32, whose range is that of all.
        let [q, k] = [&q, &k].map(|tensor| Tensor::new(tensor.shape(), numbers(tensor)?));
        let size = self.session.attend(&attention, &q?, &k?, &sizes)?.o;
        let role = if d_o.is_some() { Role::Gradients } else { Role::Rows };
        let given = numbers(&part.of_queries(&results[0], shape)?)?;
        let (wanted, size) = (numbers(&wanted)?, numbers(&size)?);
        let rounding = row.rounding();
        let dim = shape.head_dim as usize;
        for (at, ((wanted, given), size)) in
            wanted.chunks(dim).zip(given.chunks(dim)).zip(size.chunks(dim)).enumerate()
        {
            let largest = wanted.iter().fold(0.0, |most: f32, value| most.max(value.abs()));
            for ((wanted, given), size) in wanted.iter().zip(given).zip(size) {
                let tolerance =
                    rounding * size + encoding.rounding(*wanted, largest, role) + f32::MIN_POSITIVE;
                let worst = difference(*wanted, *given);
                // Where a size is no number, numbers are compared by their kind only.
                if worst > if tolerance.is_finite() { tolerance } else { f32::MAX } {
                    return Ok(Some(format!(
                        "a row that was computed again has {given:.3e} where {wanted:.3e} is right, and {tolerance:.1e} may be \
                         rounding (head {at} of {})",
                        shape.q_heads
                    )));
                }
            }
        }
        Ok(None)
    }
}

/// Infinite where one of the two is no number and the other is.
fn difference(wanted: f32, given: f32) -> f32 {
    if wanted == given || (wanted.is_nan() && given.is_nan()) {
        return 0.0;
    }
    let difference = (wanted - given).abs();
    if difference.is_nan() { f32::INFINITY } else { difference }
}

fn numbers(tensor: &Tensor) -> Result<Vec<f32>> {
    Ok(match tensor.dtype() {
        Dtype::F32 => tensor.to_vec::<f32>()?,
        Dtype::F16 => tensor.to_vec::<half::f16>()?.into_iter().map(half::f16::to_f32).collect(),
        Dtype::Bf16 => tensor.to_vec::<half::bf16>()?.into_iter().map(half::bf16::to_f32).collect(),
    })
}

/// One query with the keys of a head: how far right results may be from each other.
///
/// An output is a sum of values with weights exp(logit). What rounds a weight or a product by ε
/// changes it by at most ε times the sum of the same weights with |values|, which is the size. A
/// gradient of a query is the sum of keys with weights p·(do·v − δ).
struct Row<'a> {
    call: &'a Call,
    shape: &'a Shape,
    /// q, k and v.
    numbers: [Vec<f32>; 3],
}

impl Row<'_> {
    fn dim(&self) -> usize {
        self.shape.head_dim as usize
    }

    fn scale(&self) -> f32 {
        #[expect(clippy::cast_precision_loss, reason = "head dims are small")]
        let usual = 1.0 / (self.shape.head_dim as f32).sqrt();
        self.call.scale.unwrap_or(usual).abs()
    }

    /// What takes the place of values in the size.
    fn sizes(&self, d_o: Option<&[f32]>) -> Vec<f32> {
        let [_, k, v] = &self.numbers;
        let Some(d_o) = d_o else { return v.iter().map(|value| value.abs()).collect() };
        let (dim, keys) = (self.dim(), self.shape.kv_len as usize);
        let heads = d_o.len() / dim / self.shape.batch as usize;
        let mut sizes = Vec::with_capacity(k.len());
        for (entry, rows) in d_o.chunks(heads * dim).enumerate() {
            let of_entry = entry * keys * dim..(entry + 1) * keys * dim;
            let product = |value: &[f32]| {
                let of_head = |row: &[f32]| row.iter().zip(value).map(|(a, b)| a * b).sum::<f32>().abs();
                rows.chunks(dim).map(of_head).fold(0.0, f32::max)
            };
            let products: Vec<f32> = v[of_entry.clone()].chunks(dim).map(product).collect();
            let most = products.iter().copied().fold(0.0, f32::max);
            for (key, product) in k[of_entry].chunks(dim).zip(products) {
                sizes.extend(key.iter().map(|element| element.abs() * (product + most) * self.scale()));
            }
        }
        sizes
    }

    /// The ε of right kernels and of this one: 16-bit types round weights and results; a rounding
    /// of a logit is one of its weight, and as large as the logit.
    fn rounding(&self) -> f32 {
        let longest = |x: &[f32]| x.chunks(self.dim()).map(norm).fold(0.0, f32::max);
        let [q, k, _] = &self.numbers;
        let logits = (longest(q) * longest(k) * self.scale()).min(self.call.softcap.map_or(1e4, f32::abs));
        let stored = match self.shape.dtype {
            Dtype::F32 => 1.0 / 16_384.0,
            Dtype::F16 => 1.0 / 512.0,
            Dtype::Bf16 => 1.0 / 128.0,
        };
        stored + if logits.is_finite() { logits } else { 1e4 } / 131_072.0
    }
}

fn norm(x: &[f32]) -> f32 {
    x.iter().map(|x| x * x).sum::<f32>().sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kyklos::Mask;

    fn tensor(shape: [usize; 4], seed: usize) -> Tensor {
        let count = shape.iter().product();
        let value = |i: usize| ((i * 2_654_435_761 + seed * 97) % 1000) as f32 / 500.0 - 1.0;
        Tensor::new(shape, (0..count).map(value).collect::<Vec<f32>>()).unwrap()
    }

    #[test]
    fn right_rows_pass_and_each_wrong_row_is_found_when_it_is_looked_at() {
        let shape = Shape {
            batch: 2,
            q_len: 1,
            kv_len: 40,
            q_heads: 2,
            kv_heads: 1,
            head_dim: 16,
            dtype: Dtype::F32,
        };
        let mut session = Session::new(in_process_group(1).remove(0), Device::cpu());
        for call in [
            Call::default(),
            Call { mask: Mask::causal(), q_offset: 30, softcap: Some(2.0), ..Call::default() },
        ] {
            for gradients in [false, true] {
                let call = Call { gradients, ..call.clone() };
                let q = tensor([2, 1, 2, 16], 1);
                let keys = [tensor([2, 40, 1, 16], 2), tensor([2, 40, 1, 16], 3)];
                let d_o = gradients.then(|| tensor([2, 1, 2, 16], 4));
                let output = session.attend(&call.attention(), &q, &keys[0], &keys[1]).unwrap();
                let right = match &d_o {
                    None => output.o,
                    Some(d_o) => {
                        let [k, v] = keys.clone();
                        let saved = Saved { q: q.clone(), k, v, o: output.o, lse: output.lse_pair };
                        session.backward(&call.attention(), &saved, d_o, None).unwrap().dq
                    }
                };
                let right = right.to_vec::<f32>().unwrap();
                let inputs = Inputs { q, keys: Some(keys.clone()), d_o };
                let mut checker = Checker::new();
                let mut wrong = |numbers: Vec<f32>| {
                    let results = [Tensor::new([2, 1, 2, 16], numbers).unwrap()];
                    checker.wrong((&call, &shape), &inputs, &keys, &results, WireFormat::Same).unwrap()
                };
                assert_eq!(wrong(right.clone()), None);
                for at in [0, 17, 63] {
                    for value in [right[at] + 0.1, f32::NAN, f32::INFINITY] {
                        let mut numbers = right.clone();
                        numbers[at] = value;
                        assert!(wrong(numbers).is_some(), "{at} {value}");
                    }
                }
            }
        }
    }

    /// What a helper that saves work would return, for every type and form: none of it passes.
    #[test]
    fn lazy_results_are_found_in_long_rows_of_every_type() {
        let keys = 4096;
        let shape =
            |dtype| Shape { batch: 1, q_len: 1, kv_len: keys, q_heads: 1, kv_heads: 1, head_dim: 64, dtype };
        let normal = |seed: u64, count: usize| {
            let mut state = seed;
            let mut next = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 40) as f32 / (1 << 24) as f32 - 0.5
            };
            (0..count).map(|_| (0..12).map(|_| next()).sum::<f32>()).collect::<Vec<f32>>()
        };
        let typed = |numbers: &[f32], dtype, tokens: usize| {
            let bytes: Vec<u8> = match dtype {
                Dtype::F32 => numbers.iter().flat_map(|x| x.to_ne_bytes()).collect(),
                Dtype::F16 => numbers.iter().flat_map(|x| half::f16::from_f32(*x).to_ne_bytes()).collect(),
                Dtype::Bf16 => numbers.iter().flat_map(|x| half::bf16::from_f32(*x).to_ne_bytes()).collect(),
            };
            Tensor::from_bytes([1, tokens, 1, 64], dtype, bytes.into()).unwrap()
        };
        let n = keys as usize;
        let (q, k, v) = (normal(1, 64), normal(2, n * 64), normal(3, n * 64));
        for (dtype, wire) in [
            (Dtype::F32, WireFormat::Same),
            (Dtype::F32, WireFormat::F16),
            (Dtype::F32, WireFormat::Int8),
            (Dtype::F16, WireFormat::Same),
            (Dtype::Bf16, WireFormat::Same),
            (Dtype::Bf16, WireFormat::Int8),
        ] {
            let mut checker = Checker::new();
            let mut wrong = |o: &[f32], v: &[f32]| {
                let keys = [typed(&k, dtype, n), typed(v, dtype, n)];
                let inputs = Inputs { q: typed(&q, dtype, 1), keys: Some(keys.clone()), d_o: None };
                checker
                    .wrong((&Call::default(), &shape(dtype)), &inputs, &keys, &[typed(o, dtype, 1)], wire)
                    .unwrap()
            };
            let weights: Vec<f64> = k
                .chunks(64)
                .map(|k| {
                    (q.iter().zip(k).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() / 8.0).exp()
                })
                .collect();
            let output = |weights: &[f64], v: &[f32]| -> Vec<f32> {
                let all: f64 = weights.iter().sum();
                let of = |d: usize| {
                    weights.iter().zip(v.chunks(64)).map(|(w, v)| w * f64::from(v[d])).sum::<f64>()
                };
                (0..64).map(|d| (of(d) / all) as f32).collect()
            };
            let right = output(&weights, &v);
            // int8 messages round what the helper has, by more than this row's tolerance.
            if wire != WireFormat::Int8 {
                assert_eq!(wrong(&right, &v), None, "{dtype} {wire}");
            }
            assert!(wrong(&[0.0; 64], &v).is_some(), "zeros in {dtype} {wire}");
            assert!(wrong(&output(&vec![1.0; n], &v), &v).is_some(), "means in {dtype} {wire}");
            // One value that is much larger than the others hides nothing of them.
            let mut outlier = v.clone();
            outlier[0] = 50.0;
            assert!(wrong(&[0.0; 64], &outlier).is_some(), "zeros beside an outlier in {dtype} {wire}");
        }
    }
}
