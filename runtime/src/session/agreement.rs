//! What ranks tell each other with their votes before a call, so that all of them plan from the same facts.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::call::{Attention, Extents, checked_label};
use crate::{Dtype, Error, Result, Tensor};

/// One rank's part of a call, as it travels in its vote.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct CallNote {
    /// Version of this note.
    #[serde(rename = "v")]
    version: u32,
    label: String,
    dtype: String,
    batch: u32,
    q_heads: u32,
    kv_heads: u32,
    dim: u32,
    /// Queries of this rank.
    pub(super) q: u32,
    /// Keys that this rank owns.
    pub(super) kv: u32,
    /// Bytes of this rank's part of the attention bias tensor.
    bias: u64,
    options: [u64; 5],
}

/// The facts of a call that all ranks share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Agreed {
    pub(super) extents: Extents,
    /// By rank.
    pub(super) q_counts: Vec<u32>,
    /// By rank, without the replicated keys.
    pub(super) kv_counts: Vec<u32>,
    /// Bytes of the attention bias tensor, by rank.
    pub(super) bias_bytes: Vec<u64>,
}

/// Increased when the meaning of a note changes.
const VERSION: u32 = 1;

impl CallNote {
    /// The note of this rank's tensors.
    ///
    /// # Errors
    /// [`Error::Request`] when the tensors do not fit each other or the call.
    pub(super) fn new(call: &Attention, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Self> {
        checked_label(&call.label)?;
        let [q_shape, k_shape, v_shape] = [q, k, v].map(Tensor::shape);
        let refuse = |mismatch: String, remedy: &str| Err(Error::request(mismatch, remedy));
        if k_shape != v_shape {
            return refuse(
                format!("k of shape {k_shape:?} and v of shape {v_shape:?}"),
                "give each key its value: the same batch entries, tokens, heads and dim",
            );
        }
        if [q_shape[0], q_shape[3]] != [k_shape[0], k_shape[3]] {
            return refuse(
                format!(
                    "q of shape {q_shape:?} and k of shape {k_shape:?}, both [batch, tokens, heads, dim]"
                ),
                "give q and k the same batch entries and the same dim",
            );
        }
        if [k.dtype(), v.dtype()] != [q.dtype(); 2] {
            return refuse(
                format!("q of {}, k of {} and v of {}", q.dtype(), k.dtype(), v.dtype()),
                "use one type for q, k and v",
            );
        }
        let extent = |value: usize| {
            u32::try_from(value).map_err(|_| {
                Error::request(format!("an extent of {value}"), format!("use at most {}", u32::MAX))
            })
        };
        let replicated = call.options.execution.replicated.len();
        let Some(own) = k_shape[1].checked_sub(replicated) else {
            return refuse(
                format!("{} keys of this rank, {replicated} of them on every rank", k_shape[1]),
                "begin the k and v of each rank with all replicated keys",
            );
        };
        Ok(Self {
            version: VERSION,
            label: call.label.clone(),
            dtype: q.dtype().name().to_owned(),
            batch: extent(q_shape[0])?,
            q_heads: extent(q_shape[2])?,
            kv_heads: extent(k_shape[2])?,
            dim: extent(q_shape[3])?,
            q: extent(q_shape[1])?,
            kv: extent(own)?,
            bias: call.bias_rows.as_ref().map_or(0, |rows| rows.len() as u64),
            options: call.digests().map(|(_, digest)| digest),
        })
    }

    pub(super) fn encode(&self) -> Bytes {
        serde_json::to_vec(self).expect("plain data without maps always serialises").into()
    }

    /// The facts of all notes, by rank.
    ///
    /// # Errors
    /// [`Error::Request`], the same on all ranks, when ranks differ in what must be equal.
    pub(super) fn agree(call: &Attention, notes: &[Bytes]) -> Result<Agreed> {
        let mut all: Vec<Self> = Vec::with_capacity(notes.len());
        for (rank, note) in notes.iter().enumerate() {
            let note: Option<Self> = serde_json::from_slice(note).ok();
            all.push(note.filter(|note| note.version == VERSION).ok_or_else(|| {
                Error::request(
                    format!("rank {rank} describes its call in a form that this release does not know"),
                    "use the same release on all ranks",
                )
            })?);
        }
        let first = &all[0];
        for (rank, note) in all.iter().enumerate() {
            if let Some((what, theirs, ours)) = note.difference(call, first) {
                return Err(Error::request(
                    format!("rank {rank} calls with {what}{theirs}, rank 0 with {ours}"),
                    "make the same call on all ranks",
                ));
            }
        }
        let sum = |of: fn(&Self) -> u32| {
            let sum: u64 = all.iter().map(|note| u64::from(of(note))).sum();
            u32::try_from(sum).map_err(|_| {
                Error::request(format!("{sum} tokens over all ranks"), format!("use at most {}", u32::MAX))
            })
        };
        let kv_len = sum(|note| note.kv)?;
        let replicated = u32::try_from(call.options.execution.replicated.len()).unwrap_or(u32::MAX);
        let extents = Extents {
            batch: first.batch,
            q_len: sum(|note| note.q)?,
            kv_len: kv_len.saturating_add(replicated),
            q_heads: first.q_heads,
            kv_heads: first.kv_heads,
            head_dim: first.dim,
            dtype: first.dtype.parse::<Dtype>()?,
        };
        let counts = |of: fn(&Self) -> u32| all.iter().map(of).collect();
        Ok(Agreed {
            extents,
            q_counts: counts(|note| note.q),
            kv_counts: counts(|note| note.kv),
            bias_bytes: all.iter().map(|note| note.bias).collect(),
        })
    }

    /// The first thing in which this note must equal `first` and does not: its name, and both values.
    fn difference(&self, call: &Attention, first: &Self) -> Option<(String, String, String)> {
        let numbers = [
            ("batch", self.batch, first.batch),
            ("query heads", self.q_heads, first.q_heads),
            ("key/value heads", self.kv_heads, first.kv_heads),
            ("dim", self.dim, first.dim),
        ];
        let texts = [("label", &self.label, &first.label), ("type", &self.dtype, &first.dtype)];
        let texts =
            texts.into_iter().map(|(name, mine, other)| (name, format!("`{mine}`"), format!("`{other}`")));
        let numbers =
            numbers.into_iter().map(|(name, mine, other)| (name, mine.to_string(), other.to_string()));
        let named = texts.chain(numbers).find(|(_, mine, other)| mine != other);
        if let Some((name, mine, other)) = named {
            return Some((format!("{name} "), mine, other));
        }
        let options = call.digests();
        let differs = (0..options.len()).find(|index| self.options[*index] != first.options[*index])?;
        Some((format!("another {}", options[differs].0), String::new(), "its own".to_owned()))
    }
}
