//! A call of the library: the owner's part on its own device, the others by helpers.

use std::time::Instant;

use bytes::{Bytes, BytesMut};
use kyklos::{Result, Saved, Session, Tensor};

use super::{Inputs, Owner};
use crate::call::{Call, Part, Shape};
use crate::forecast::GRADIENT_AGAIN;

/// The gradients of q, k and v.
pub type Gradients = [Tensor; 3];

impl Owner {
    /// Attention with the help of others where that pays: `softmax(scale · q kᵀ, masked) v`, shaped
    /// as q, in host memory. `session` is a group of one, with the owner's device. Blocks.
    ///
    /// # Errors
    /// As [`Session::attend`]. A helper that fails is no error: its share is computed here.
    pub fn attend(
        &mut self,
        session: &mut Session,
        call: &Call,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
    ) -> Result<Tensor> {
        let call = Call { gradients: false, ..call.clone() };
        let [results] = self.run(session, &call, [q, k, v], None)?;
        Ok(results)
    }

    /// The gradients of q, k and v of [`Self::attend`], where `d_o`, shaped as q, is the gradient
    /// of its output.
    ///
    /// # Errors
    /// As [`Session::backward`].
    pub fn backward(
        &mut self,
        session: &mut Session,
        call: &Call,
        [q, k, v]: [&Tensor; 3],
        d_o: &Tensor,
    ) -> Result<Gradients> {
        let call = Call { gradients: true, ..call.clone() };
        self.run(session, &call, [q, k, v], Some(d_o))
    }

    fn run<const N: usize>(
        &mut self,
        session: &mut Session,
        call: &Call,
        [q, k, v]: [&Tensor; 3],
        d_o: Option<&Tensor>,
    ) -> Result<[Tensor; N]> {
        let shape = Shape::of(q, k, v)?;
        call.check_bias_rows(&shape)?;
        let forecast = self.decide(call, &shape)?;
        if forecast.shares.is_empty() {
            let began = Instant::now();
            let results = on_host(computed(session, call, [q, k, v], d_o)?)?;
            let again = if call.gradients { GRADIENT_AGAIN } else { 1.0 };
            self.learn_alone(call, &shape, began.elapsed().as_secs_f64() * again);
            return Ok(array(results));
        }
        let whole_began = Instant::now();
        let dense = |tensor: &Tensor| {
            Tensor::from_bytes(tensor.shape(), tensor.dtype(), pollster::block_on(tensor.bytes())?)
        };
        let [q, k, v] = [dense(q)?, dense(k)?, dense(v)?];
        let d_o = d_o.map(dense).transpose()?;
        let whole = Whole { call, shape: &shape, states: [&q, &k, &v], d_o: d_o.as_ref() };
        let mut inputs = Vec::new();
        for share in &forecast.shares {
            inputs.push(whole.inputs(&share.parts)?);
        }
        let own = forecast.own.clone();
        let flight = self.begin(call, &shape, forecast.clone(), inputs, whole_began.elapsed())?;
        let began = Instant::now();
        let mut parts = Vec::new();
        for part in own {
            parts.push((part.clone(), whole.compute(session, &part)?));
        }
        let own_s = began.elapsed().as_secs_f64();
        for (part, results) in self.finish(flight, Some(own_s))?.into_iter().flatten() {
            let results = match results {
                Some(results) => results,
                None => whole.compute(session, &part)?,
            };
            parts.push((part, results));
        }
        let assembled = whole.assembled(&parts)?;
        self.learn_shared(call, &shape, &forecast, whole_began.elapsed().as_secs_f64());
        Ok(array(assembled))
    }
}

fn array<const N: usize>(results: Vec<Tensor>) -> [Tensor; N] {
    results.try_into().unwrap_or_else(|_| unreachable!("a call has one result or three"))
}

/// A call with its tensors, dense and in host memory.
struct Whole<'a> {
    call: &'a Call,
    shape: &'a Shape,
    states: [&'a Tensor; 3],
    d_o: Option<&'a Tensor>,
}

impl Whole<'_> {
    /// Of each part of a share.
    fn inputs(&self, parts: &[Part]) -> Result<Vec<Inputs>> {
        let [q, k, v] = self.states;
        let mut before: Option<&Part> = None;
        let mut inputs = Vec::new();
        for part in parts {
            let new_keys = before.is_none_or(|before| before.kv_heads != part.kv_heads);
            let keys = || Ok::<_, kyklos::Error>([part.of_keys(k)?.copied()?, part.of_keys(v)?.copied()?]);
            inputs.push(Inputs {
                q: part.of_queries(q, self.shape)?.copied()?,
                keys: if new_keys { Some(keys()?) } else { None },
                d_o: self.d_o.map(|d_o| part.of_queries(d_o, self.shape)?.copied()).transpose()?,
            });
            before = Some(part);
        }
        Ok(inputs)
    }

    /// A part on the owner's device.
    fn compute(&self, session: &mut Session, part: &Part) -> Result<Vec<Tensor>> {
        let [q, k, v] = self.states;
        let (q, k, v) = (part.of_queries(q, self.shape)?, part.of_keys(k)?, part.of_keys(v)?);
        let d_o = self.d_o.map(|d_o| part.of_queries(d_o, self.shape)).transpose()?;
        on_host(computed(session, &part.call(self.call, self.shape), [&q, &k, &v], d_o.as_ref())?)
    }

    /// The results of the whole call from those of its parts. Parts of a gradient have all rows.
    fn assembled(&self, parts: &[(Part, Vec<Tensor>)]) -> Result<Vec<Tensor>> {
        let count = parts.first().map_or(0, |(_, results)| results.len());
        let mut all = Vec::new();
        for index in 0..count {
            let of = self.states[index];
            let [batch, tokens, heads, dim] = of.shape();
            let head_bytes = dim * of.dtype().bytes();
            let mut bytes = BytesMut::zeroed(batch * tokens * heads * head_bytes);
            for (part, results) in parts {
                let (rows, of_heads) = match index {
                    0 => (part.rows.clone(), part.q_heads(self.shape)),
                    _ => (0..self.shape.kv_len, part.kv_heads.clone()),
                };
                let from: Bytes = pollster::block_on(results[index].bytes())?;
                let line = of_heads.len() * head_bytes;
                for entry in 0..batch {
                    for (at, row) in rows.clone().enumerate() {
                        let source = (entry * rows.len() + at) * line;
                        let into =
                            ((entry * tokens + row as usize) * heads + of_heads.start as usize) * head_bytes;
                        bytes[into..into + line].copy_from_slice(&from[source..source + line]);
                    }
                }
            }
            all.push(Tensor::from_bytes([batch, tokens, heads, dim], of.dtype(), bytes.freeze())?);
        }
        Ok(all)
    }
}

fn on_host(results: Vec<Tensor>) -> Result<Vec<Tensor>> {
    let tensor = |tensor: Tensor| {
        Tensor::from_bytes(tensor.shape(), tensor.dtype(), pollster::block_on(tensor.bytes())?)
    };
    results.into_iter().map(tensor).collect()
}

fn computed(
    session: &mut Session,
    call: &Call,
    [q, k, v]: [&Tensor; 3],
    d_o: Option<&Tensor>,
) -> Result<Vec<Tensor>> {
    let attention = call.attention();
    let output = session.attend(&attention, q, k, v)?;
    let Some(d_o) = d_o else { return Ok(vec![output.o]) };
    let saved = Saved { q: q.clone(), k: k.clone(), v: v.clone(), o: output.o, lse: output.lse_pair };
    let gradients = session.backward(&attention, &saved, d_o, None)?;
    Ok(vec![gradients.dq, gradients.dk, gradients.dv])
}
