//! Call settings on which all ranks must agree, in addition to the plans: the texts that ranks
//! compare in their first vote.

use bytes::Bytes;
use kyklos::Split;
use kyklos_transport::{MAX_NOTE_BYTES, harmless};

use super::settings::{Outputs, Settings};
use crate::failure::{Failure, Result};
use crate::observe::trace;
use crate::request::Request;
use crate::tensors::output::OutputTarget;
use crate::tensors::{COPY_ID_BYTES, CopyId, Source};

/// The terms of one rank, in an order that all ranks of one release share.
#[derive(Clone, Debug)]
pub(crate) struct Terms {
    values: Vec<(&'static str, String)>,
    copy: CopyId,
}

impl Terms {
    pub(super) fn of(request: &Request, settings: Settings, outputs: &Outputs) -> Self {
        let Request { problem, source, mesh, strategy, placement, .. } = request;
        let (batch, q_len, kv_len, q_heads, kv_heads, head_dim, dtype) = (
            problem.batch,
            problem.q_len,
            problem.kv_len,
            problem.q_heads,
            problem.kv_heads,
            problem.head_dim,
            problem.dtype,
        );
        let Settings { repeat, verify, on_loss, ways, .. } = settings;
        let tokens = if q_len == kv_len { q_len.to_string() } else { format!("{q_len} to {kv_len}") };
        let input = match source {
            Source::Random { seed } => format!("seed {seed}"),
            Source::File(_) => "a file".to_owned(),
        };
        let bias = problem.bias.map_or_else(
            || "none".to_owned(),
            |tensor| {
                format!(
                    "{:?} {} x {}, shared {}",
                    tensor.kind, tensor.batch, tensor.heads, tensor.shared_rows
                )
            },
        );
        let result = match &outputs.result {
            None => "none",
            Some(OutputTarget::Whole(_)) => "one file",
            Some(OutputTarget::Parts(_)) => "a file of each rank",
        };
        let trace = match &outputs.trace {
            None => "none",
            Some(path) if trace::is_by_rank(path) => "a file of each rank",
            Some(_) => "one file",
        };
        let page = match (outputs.page.is_some(), outputs.watched) {
            (false, false) => "none",
            (true, false) => "one page",
            (false, true) => "a live page",
            (true, true) => "one page and a live page",
        };
        let yes = |yes: bool| if yes { "yes" } else { "no" }.to_owned();
        let values: [_; COUNT] = [
            ("the release", format!("kyklos {}", env!("CARGO_PKG_VERSION"))),
            ("batch and tokens", format!("{batch} x {tokens}")),
            ("query heads, KV heads, head dim", format!("{q_heads}, {kv_heads}, {head_dim}")),
            ("--dtype", dtype.to_string()),
            ("the input (--input, or --shape and --seed)", input),
            ("--mask", problem.mask.to_string()),
            ("--q-offset", problem.q_offset.to_string()),
            ("--scale", problem.scale.to_string()),
            ("--softcap", problem.softcap.map_or_else(|| "none".to_owned(), |cap| cap.to_string())),
            ("the sinks", sinks(&problem.sinks)),
            ("the mask or bias tensor", bias),
            ("--wire", problem.wire.to_string()),
            ("--fixed-order", yes(problem.fixed_order)),
            ("--replicated", format!("{}..{}", problem.replicated.start, problem.replicated.end)),
            ("--mesh", mesh.to_string()),
            ("--strategy", strategy.to_string()),
            ("--placement", placement.to_string()),
            ("the shares of the ranks (--split or token counts)", shares_of(request)),
            ("--repeat", repeat.to_string()),
            ("--verify", yes(verify)),
            ("--output", result.to_owned()),
            ("--trace", trace.to_owned()),
            ("--report and --watch", page.to_owned()),
            ("--on-loss and --collective", format!("{} and {}", on_loss.name(), ways.collective.name())),
            (
                "--grad and --grad-bias",
                if problem.bias_gradient { "both".to_owned() } else { yes(request.gradients) },
            ),
        ];
        let copy = match source {
            Source::Random { .. } => CopyId::NONE,
            Source::File(file) => file.copy,
        };
        Self { values: values.into(), copy }
    }

    /// The note of this rank in the first vote: the copy of its input, and the values, each after
    /// its length.
    pub(super) fn note(&self) -> Bytes {
        let mut note = self.copy.0.to_vec();
        for (_, value) in &self.values {
            let value = shortened(value);
            note.push(u8::try_from(value.len()).unwrap_or(u8::MAX));
            note.extend_from_slice(value.as_bytes());
        }
        note.into()
    }

    /// Compares the notes of all ranks. Returns the copy that each rank reads.
    ///
    /// # Errors
    /// The first term that differs, on the lowest rank that has another one than rank 0: the same
    /// error on all ranks.
    pub(super) fn compare(&self, notes: &[Bytes]) -> Result<Vec<CopyId>> {
        let unknown = |rank: usize| {
            Failure::request(
                format!("rank {rank} describes its call in a form that this release of kyklos does not know"),
                "install the same release on all hosts",
            )
        };
        let read: Vec<(CopyId, Vec<String>)> = notes
            .iter()
            .enumerate()
            .map(|(rank, note)| read(note).ok_or_else(|| unknown(rank)))
            .collect::<Result<_>>()?;
        let Some((_, first)) = read.first() else { return Ok(Vec::new()) };
        // The release comes first: other releases may have other terms.
        for (index, (label, _)) in self.values.iter().enumerate() {
            for (rank, (_, values)) in read.iter().enumerate() {
                let [theirs, ours] = [values, first].map(|values| values.get(index));
                let (Some(theirs), Some(ours)) = (theirs, ours) else { return Err(unknown(rank)) };
                if theirs != ours {
                    return Err(Failure::request(
                        format!("{label}: rank {rank} has {theirs}, rank 0 has {ours}"),
                        "start every rank with the same release, options and inputs",
                    ));
                }
            }
        }
        Ok(read.into_iter().map(|(copy, _)| copy).collect())
    }
}

/// The parts of a note. `None` for what is no note of [`Terms::note`].
fn read(note: &[u8]) -> Option<(CopyId, Vec<String>)> {
    let (copy, mut rest) = note.split_first_chunk::<COPY_ID_BYTES>()?;
    let mut values = Vec::new();
    while let Some((length, after)) = rest.split_first() {
        let (value, after) = after.split_at_checked(usize::from(*length))?;
        values.push(harmless(&String::from_utf8_lossy(value)));
        rest = after;
    }
    Some((CopyId(*copy), values))
}

/// A value that fits the note: a long one is cut, and its digest added.
fn shortened(value: &str) -> String {
    if value.len() <= MOST_VALUE_BYTES {
        return value.to_owned();
    }
    let digest = blake3::hash(value.as_bytes()).to_hex();
    let fits = |end: &usize| *end <= MOST_VALUE_BYTES - SHORT_DIGEST - ELLIPSIS.len();
    let end = value.char_indices().map(|(at, c)| at + c.len_utf8()).take_while(fits).last().unwrap_or(0);
    format!("{}{ELLIPSIS}{}", &value[..end], &digest[..SHORT_DIGEST])
}

fn sinks(sinks: &[f32]) -> String {
    match sinks {
        [] => "none".to_owned(),
        [first, ..] => {
            let digest = blake3::hash(bytemuck::cast_slice(sinks)).to_hex();
            format!("{} from {first} on ({})", sinks.len(), &digest[..SHORT_DIGEST])
        }
    }
}

/// The shares as far as the options decide them.
fn shares_of(request: &Request) -> String {
    match (&request.split, request.open) {
        (Split::Even, Some(_)) if request.always_measures() => "auto".to_owned(),
        (Split::Even, Some(_)) => "even, or by speed".to_owned(),
        (split, _) => shares(split),
    }
}

fn shares(split: &Split) -> String {
    fn list<T: ToString>(numbers: &[T]) -> String {
        numbers.iter().map(T::to_string).collect::<Vec<_>>().join(",")
    }
    match split {
        Split::Even => "even".to_owned(),
        Split::Weights(weights) => list(weights),
        Split::Work(weights) => format!("work:{}", list(weights)),
        Split::Tokens(counts) => format!("{} tokens", list(counts)),
        Split::Separate { queries, keys } => format!("{} and {}", shares(queries), shares(keys)),
    }
}

/// Of a value in a note, in UTF-8.
const MOST_VALUE_BYTES: usize = 39;
/// Terms of a call.
const COUNT: usize = 25;
const _: () = assert!(
    COPY_ID_BYTES + COUNT * (1 + MOST_VALUE_BYTES) <= MAX_NOTE_BYTES,
    "a note has room for all terms"
);
const SHORT_DIGEST: usize = 8;
const ELLIPSIS: &str = "… ";

#[cfg(test)]
mod tests {
    use super::*;

    fn terms(values: &[&str]) -> Terms {
        let values = values.iter().map(|value| ("--mask", (*value).to_owned())).collect();
        Terms { values, copy: CopyId([7; COPY_ID_BYTES]) }
    }

    #[test]
    fn notes_of_equal_terms_agree_and_the_lowest_rank_with_another_one_is_named() {
        let long = "documents:".to_owned() + &"1024,".repeat(200);
        let longer = long.clone() + "1";
        let notes = |values: [&str; 3]| values.map(|value| terms(&["full", value]).note());
        let me = terms(&["full", &long]);
        assert_eq!(me.compare(&notes([&long, &long, &long])).map(|copies| copies.len()).ok(), Some(3));
        let error = me.compare(&notes([&long, &longer, "causal"])).unwrap_err();
        assert_eq!(error.exit, 2);
        assert!(
            error.text.contains("rank 1 has documents:1024") && !error.text.contains("rank 2"),
            "{error:?}"
        );
    }

    #[test]
    fn a_note_that_is_no_note_is_refused_and_cannot_control_a_terminal() {
        let me = terms(&["full"]);
        for bad in [Bytes::new(), Bytes::from_static(&[0; COPY_ID_BYTES]), vec![9; COPY_ID_BYTES + 1].into()]
        {
            assert!(me.compare(&[me.note(), bad]).is_err());
        }
        let error = me.compare(&[me.note(), terms(&["\u{1b}[2J\nerror: x"]).note()]).unwrap_err();
        assert!(!error.text.contains(['\u{1b}', '\n']), "{error:?}");
    }

    #[test]
    fn long_values_are_cut_between_characters() {
        let short = shortened(&"é".repeat(100));
        assert!(short.len() <= MOST_VALUE_BYTES && short.starts_with("éé"), "{short}");
        assert_ne!(short, shortened(&"é".repeat(101)));
    }
}
