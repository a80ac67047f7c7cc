//! What ranks tell each other with their votes before a call, so that all of them plan from the
//! same facts.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::shapes::Shapes;
use crate::call::{Attention, BiasRows, Extents, Options, checked_label};
use crate::error::{Error, Result};
use kyklos_plan::Dtype;
use kyklos_plan::plan::PLAN_FORMAT;

/// One rank's facts of a call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Facts {
    /// Version of these facts.
    #[serde(rename = "v")]
    version: u32,
    /// Version of the rules by which plans are made.
    #[serde(rename = "p")]
    plans: u32,
    dtype: String,
    batch: u32,
    q_heads: u32,
    kv_heads: u32,
    dim: u32,
    /// Queries of this rank.
    q: u32,
    /// Keys that this rank owns.
    kv: u32,
    /// Bytes of this rank's part of the attention bias tensor.
    bias: u64,
    /// Rows and keys of that part, where the rank knows them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    bias_axes: Option<[u32; 2]>,
    options: [u64; 5],
    /// Most bytes of a running state that the rank's device reads.
    #[serde(rename = "s", default, skip_serializing_if = "Option::is_none")]
    most_state_bytes: Option<u64>,
    /// Of a call with a cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cache: Option<CacheFacts>,
}

/// One rank's facts of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct CacheFacts {
    /// Its digest in the record of all ranks.
    pub(super) digest: u64,
    /// Rows of each batch entry of this rank's keys, the new ones included.
    pub(super) rows: u32,
}

/// The facts of this rank's last call: calls of one shape encode them once.
#[derive(Debug)]
pub(super) struct LastFacts {
    options: Options,
    shapes: Shapes,
    bias: (u64, Option<[u32; 2]>),
    cache: Option<CacheFacts>,
    encoded: Bytes,
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
    /// Its rows and keys, by rank, where they are known.
    pub(super) bias_axes: Vec<Option<[u32; 2]>>,
    /// Most bytes of a running state, by rank, where a device has such a limit.
    pub(super) most_state_bytes: Vec<Option<u64>>,
    /// With a cache, the rows of the keys of each rank.
    pub(super) cache_rows: Option<Vec<u32>>,
}

/// Increased when the meaning of facts changes.
const VERSION: u32 = 7;

/// The note of this rank's vote: its label, the number of the operation, a hash of the attention
/// bias tensor if that is the same on all ranks, the number of calls, and its facts: the shapes of
/// its tensors, and the most bytes of a running state that its device reads.
///
/// # Errors
/// [`Error::Request`] when the tensors do not fit each other or the call.
pub(super) fn note(
    last: &mut Option<LastFacts>,
    op: u64,
    calls: u32,
    call: &Attention,
    (shapes, most_state_bytes): (&Shapes, Option<u64>),
    cache: Option<(CacheFacts, &[u64])>,
) -> Result<Bytes> {
    let (cache, identity) = match cache {
        Some((facts, made)) => (Some(facts), identity(made)),
        None => (None, 0),
    };
    checked_label(&call.label)?;
    let bias = (call.bias_rows.as_ref().map_or(0, BiasRows::bytes), call.bias_axes);
    if let Some(BiasRows::Tensor(rows)) = &call.bias_rows
        && rows.dtype() != shapes.dtypes[0]
    {
        return Err(Error::request(
            format!("an attention bias tensor of {} for q of {}", rows.dtype(), shapes.dtypes[0]),
            "give it the type of q",
        ));
    }
    let same = |last: &&LastFacts| {
        (last.shapes, last.bias, last.cache) == (*shapes, bias, cache) && last.options == call.options
    };
    let encoded = match last.as_ref().filter(same) {
        Some(last) => last.encoded.clone(),
        None => {
            let (bytes, bias_axes) = bias;
            let facts = Facts {
                bias: bytes,
                bias_axes,
                most_state_bytes,
                cache,
                ..Facts::new(&call.options, shapes)?
            };
            let encoded = Bytes::from(facts.encode());
            let options = call.options.clone();
            *last = Some(LastFacts { options, shapes: *shapes, bias, cache, encoded: encoded.clone() });
            encoded
        }
    };
    let mut note = Vec::with_capacity(1 + call.label.len() + NUMBERS + encoded.len());
    // A label has at most 128 bytes.
    note.push(u8::try_from(call.label.len()).unwrap_or(u8::MAX));
    note.extend_from_slice(call.label.as_bytes());
    note.extend_from_slice(&op.to_le_bytes());
    note.extend_from_slice(&call.shared_bias.unwrap_or(0).to_le_bytes());
    note.extend_from_slice(&calls.to_le_bytes());
    note.extend_from_slice(&identity.to_le_bytes());
    note.extend_from_slice(&encoded);
    Ok(note.into())
}

/// The encoded facts of all notes, by rank.
///
/// # Errors
/// [`Error::Request`], the same on all ranks, when ranks have different labels or different shared
/// tensors.
pub(super) fn facts_of(notes: &[Bytes]) -> Result<Vec<Bytes>> {
    let mut first = None;
    let mut facts = Vec::with_capacity(notes.len());
    for (rank, note) in notes.iter().enumerate() {
        let Note { label, op, shared_bias, calls, caches, facts: own } =
            Note::of(note).ok_or_else(|| unknown_form(rank))?;
        let (first_label, first_op, first_bias, first_calls, first_caches) =
            *first.get_or_insert((label, op, shared_bias, calls, caches));
        if label != first_label {
            return Err(disagree(rank, &format!("label `{label}`"), &format!("`{first_label}`")));
        }
        if op != first_op {
            return Err(out_of_step(rank, op, first_op));
        }
        if calls != first_calls {
            return Err(disagree(rank, &format!("a number of calls of {calls}"), &first_calls.to_string()));
        }
        if caches != first_caches && caches != 0 && first_caches != 0 {
            return Err(disagree(rank, "another cache", "its own"));
        }
        if shared_bias != first_bias {
            return Err(disagree(rank, "another attention bias tensor", "its own"));
        }
        facts.push(own);
    }
    Ok(facts)
}

/// The parts of a note.
struct Note<'a> {
    label: &'a str,
    op: u64,
    /// Hash of an attention bias tensor that is the same on all ranks, or 0.
    shared_bias: u64,
    /// Calls for which the vote is.
    calls: u32,
    /// Which caches, or 0.
    caches: u64,
    facts: Bytes,
}

/// Bytes of the numbers of a note.
const NUMBERS: usize = 28;

/// A number for caches that were made at these operations. Not 0.
fn identity(made: &[u64]) -> u64 {
    let add = |sum: u64, made: &u64| sum.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(made + 1);
    made.iter().fold(1, add).max(1)
}

impl<'a> Note<'a> {
    fn of(note: &'a Bytes) -> Option<Self> {
        let label_bytes = usize::from(*note.first()?);
        let label = std::str::from_utf8(note.get(1..=label_bytes)?).ok()?;
        let (numbers, facts) = note.get(1 + label_bytes..)?.split_at_checked(NUMBERS)?;
        let number =
            |at: usize| -> Option<u64> { Some(u64::from_le_bytes(numbers[at..at + 8].try_into().ok()?)) };
        let calls = u32::from_le_bytes(numbers[16..20].try_into().ok()?);
        let (op, shared_bias, caches) = (number(0)?, number(8)?, number(20)?);
        Some(Self { label, op, shared_bias, calls, caches, facts: note.slice_ref(facts) })
    }
}

/// A vote that no rank of this release makes.
fn unknown_form(rank: usize) -> Error {
    Error::request(
        format!("rank {rank} describes its call in a form that this release does not know"),
        "use the same release on all ranks",
    )
}

/// Ranks that are at different places in the sequence of their calls.
pub(super) fn out_of_step(rank: usize, theirs: u64, first: u64) -> Error {
    Error::request(
        format!(
            "rank {rank} is at call {theirs} of its session, rank 0 at call {first}: a rank has left out calls"
        ),
        "make the same calls on all ranks; after a call that failed on one rank alone, form a new group",
    )
}

fn disagree(rank: usize, theirs: &str, ours: &str) -> Error {
    Error::request(
        format!("rank {rank} calls with {theirs}, rank 0 with {ours}"),
        "make the same call on all ranks",
    )
}

impl Facts {
    fn new(options: &Options, shapes: &Shapes) -> Result<Self> {
        let Shapes { shapes: [q_shape, k_shape, v_shape], dtypes: [dtype, k_dtype, v_dtype] } = *shapes;
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
        if [k_dtype, v_dtype] != [dtype; 2] {
            return refuse(
                format!("q of {dtype}, k of {k_dtype} and v of {v_dtype}"),
                "use one type for q, k and v",
            );
        }
        let extent = |value: usize| {
            u32::try_from(value).map_err(|_| {
                Error::request(format!("an extent of {value}"), format!("use at most {}", u32::MAX))
            })
        };
        let replicated = options.execution.replicated.len();
        let Some(own) = k_shape[1].checked_sub(replicated) else {
            return refuse(
                format!("{} keys of this rank, {replicated} of them on every rank", k_shape[1]),
                "begin the k and v of each rank with all replicated keys",
            );
        };
        Ok(Self {
            version: VERSION,
            plans: PLAN_FORMAT,
            dtype: dtype.name().to_owned(),
            batch: extent(q_shape[0])?,
            q_heads: extent(q_shape[2])?,
            kv_heads: extent(k_shape[2])?,
            dim: extent(q_shape[3])?,
            q: extent(q_shape[1])?,
            kv: extent(own)?,
            bias: 0,
            bias_axes: None,
            options: options.digests().map(|(_, digest)| digest),
            most_state_bytes: None,
            cache: None,
        })
    }

    fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("plain data without maps always serialises")
    }

    /// The first thing in which these facts must equal `first` and do not: the value of each.
    fn difference(&self, options: &Options, first: &Self) -> Option<(String, String)> {
        let numbers = [
            ("batch", self.batch, first.batch),
            ("query heads", self.q_heads, first.q_heads),
            ("key/value heads", self.kv_heads, first.kv_heads),
            ("dim", self.dim, first.dim),
        ];
        if self.dtype != first.dtype {
            return Some((format!("type `{}`", self.dtype), format!("`{}`", first.dtype)));
        }
        if let Some((name, mine, other)) = numbers.into_iter().find(|(_, mine, other)| mine != other) {
            return Some((format!("{name} {mine}"), other.to_string()));
        }
        match [self.cache, first.cache].map(|cache| cache.map(|cache| cache.digest)) {
            [mine, other] if mine == other => {}
            [Some(_), Some(_)] => {
                return Some(("another record of the tokens in its cache".to_owned(), "its own".to_owned()));
            }
            [Some(_), None] => return Some(("a cache".to_owned(), "none".to_owned())),
            [None, _] => return Some(("no cache".to_owned(), "one".to_owned())),
        }
        let names = options.digests().map(|(name, _)| name);
        let differs = (0..names.len()).find(|index| self.options[*index] != first.options[*index])?;
        Some((format!("another {}", names[differs]), "its own".to_owned()))
    }
}

/// The number of queries where every rank has all of them.
fn same_queries(all: &[Facts]) -> Result<u32> {
    let first = all[0].q;
    match all.iter().position(|facts| facts.q != first) {
        None => Ok(first),
        Some(rank) => Err(disagree(
            rank,
            &format!("{} queries, the same on all ranks", all[rank].q),
            &first.to_string(),
        )),
    }
}

impl Agreed {
    /// What the ranks agree on, from the encoded facts of all of them.
    ///
    /// # Errors
    /// [`Error::Request`], the same on all ranks, when ranks differ in what must be equal.
    pub(super) fn new(options: &Options, facts: &[Bytes]) -> Result<Self> {
        let mut all: Vec<Facts> = Vec::with_capacity(facts.len());
        for (rank, facts) in facts.iter().enumerate() {
            let facts: Option<Facts> = serde_json::from_slice(facts).ok();
            all.push(
                facts
                    .filter(|facts| (facts.version, facts.plans) == (VERSION, PLAN_FORMAT))
                    .ok_or_else(|| unknown_form(rank))?,
            );
        }
        let first = &all[0];
        for (rank, facts) in all.iter().enumerate() {
            if let Some((theirs, ours)) = facts.difference(options, first) {
                return Err(disagree(rank, &theirs, &ours));
            }
        }
        let sum = |of: fn(&Facts) -> u32| {
            let sum: u64 = all.iter().map(|facts| u64::from(of(facts))).sum();
            u32::try_from(sum).map_err(|_| {
                Error::request(format!("{sum} tokens over all ranks"), format!("use at most {}", u32::MAX))
            })
        };
        let kv_len = sum(|facts| facts.kv)?;
        let q_len = if options.execution.same_queries { same_queries(&all)? } else { sum(|facts| facts.q)? };
        let replicated = u32::try_from(options.execution.replicated.len()).unwrap_or(u32::MAX);
        let extents = Extents {
            batch: first.batch,
            q_len,
            kv_len: kv_len.saturating_add(replicated),
            q_heads: first.q_heads,
            kv_heads: first.kv_heads,
            head_dim: first.dim,
            dtype: first.dtype.parse::<Dtype>()?,
        };
        let counts = |of: fn(&Facts) -> u32| all.iter().map(of).collect();
        Ok(Self {
            extents,
            q_counts: counts(|facts| facts.q),
            kv_counts: counts(|facts| facts.kv),
            bias_bytes: all.iter().map(|facts| facts.bias).collect(),
            bias_axes: all.iter().map(|facts| facts.bias_axes).collect(),
            most_state_bytes: all.iter().map(|facts| facts.most_state_bytes).collect(),
            cache_rows: all.iter().map(|facts| facts.cache.map(|cache| cache.rows)).collect(),
        })
    }
}
