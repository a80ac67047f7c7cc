//! Timelines of ranks, merged to a bounded number of segments, and their way to rank 0.

use std::collections::BTreeMap;

use bytes::Bytes;
use kyklos::{Span, Timeline as Work};
use kyklos_transport::{Rank, harmless};

use super::model::{Kind, MOST_WITH_MESSAGES, Segment, TimelineRow};
use crate::failure::{Failure, Result};
use crate::messages::{Messages, numbers};
use crate::observe::clocks::Ahead;

/// The most segments of one of `size` ranks.
pub(crate) fn most_segments(size: u32) -> usize {
    (ALL_SEGMENTS / size.max(1) as usize).clamp(LEAST_SEGMENTS, MOST_SEGMENTS)
}

impl TimelineRow {
    /// The timeline of one of `size` ranks on the clock of rank 0. Numbers of ranks are those of
    /// the current group.
    pub(crate) fn of_spans(spans: &[Span], ahead: Ahead, size: u32) -> Self {
        let segment = |span: &Span| {
            let [start_ns, end_ns] =
                [span.start_ns, span.end_ns.max(span.start_ns)].map(|ns| ahead.on_rank_0(ns));
            let kind = match span.timeline {
                Work::Compute => Kind::Compute,
                Work::Copy => Kind::Copy,
                Work::Wait => Kind::Wait,
                Work::Send => Kind::Send,
                Work::Receive => Kind::Receive,
            };
            Segment::one(kind, (start_ns, end_ns), &span.name)
        };
        Self {
            waited_for: waited_for(spans),
            clock_within_ns: ahead.within_ns,
            ..Self::merged(spans.iter().map(segment).collect(), size)
        }
    }

    /// The row of one of `size` ranks, from these segments: with all of them, or of many with
    /// shares of time.
    pub(crate) fn merged(mut segments: Vec<Segment>, size: u32) -> Self {
        let events = segments.len() as u64;
        if size > MOST_WITH_MESSAGES {
            segments.retain(|segment| !segment.kind.is_message());
        }
        Self { segments: shortened(segments, most_segments(size)), events, ..Self::default() }
    }

    /// Sends the row to rank 0, which returns the rows of all ranks. All ranks call it together.
    pub(crate) fn collect(self, messages: &Messages<'_>) -> Result<Option<Vec<Self>>> {
        if messages.transport.rank().0 != 0 {
            let text = serde_json::to_vec(&self)
                .map_err(|error| Failure::run(format!("cannot describe a timeline: {error}")))?;
            messages.send(Rank(0), LENGTH, Bytes::copy_from_slice(&(text.len() as u64).to_le_bytes()))?;
            messages.send(Rank(0), ROW, text.into())?;
            return Ok(None);
        }
        let size = messages.transport.size();
        let mut rows = vec![self];
        for rank in (1..size).map(Rank) {
            let [length] = numbers(&messages.recv(rank, LENGTH, 8)?);
            let length = usize::try_from(length).ok().filter(|length| *length <= MOST_BYTES);
            let length = length.ok_or_else(|| {
                Failure::run(format!("rank {rank} has more than {MOST_BYTES} bytes of timeline"))
            })?;
            let row = Self::decode(&messages.recv(rank, ROW, length)?, size);
            rows.push(row.map_err(|why| {
                Failure::run(format!("rank {rank} sent a timeline that cannot be read: {}", harmless(&why)))
            })?);
        }
        Ok(Some(rows))
    }

    /// A row from another rank of `size` ranks.
    pub(crate) fn decode(bytes: &[u8], size: u32) -> Result<Self, String> {
        let mut row: Self = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        if row.segments.len() > most_segments(size) || row.waited_for.len() > size as usize {
            return Err(format!("it has {} segments", row.segments.len()));
        }
        for segment in &mut row.segments {
            let length_ns =
                segment.end_ns.checked_sub(segment.start_ns).and_then(|ns| u64::try_from(ns).ok());
            let far = segment.start_ns.unsigned_abs().max(segment.end_ns.unsigned_abs()) > FARTHEST_NS;
            if far || length_ns.is_none_or(|length_ns| segment.busy_ns > length_ns) {
                return Err("a segment ends before it starts".to_owned());
            }
            segment.text = short(&segment.text);
        }
        if let Some((rank, _)) = row.waited_for.iter().find(|(rank, _)| *rank >= size) {
            return Err(format!("it names rank {rank} of {size}"));
        }
        Ok(row)
    }
}

impl Segment {
    pub(crate) fn one(kind: Kind, (start_ns, end_ns): (i64, i64), text: &str) -> Self {
        Self { kind, start_ns, end_ns, busy_ns: end_ns.abs_diff(start_ns), events: 1, text: short(text) }
    }
}

/// At most `most` segments: these, or of each of some equal stretches of time and each kind one,
/// with its share of the stretch.
fn shortened(mut segments: Vec<Segment>, most: usize) -> Vec<Segment> {
    segments.sort_by_key(|segment| (segment.kind, segment.start_ns, segment.end_ns));
    if segments.len() <= most {
        return segments;
    }
    let start_ns = segments.iter().map(|segment| segment.start_ns).min().unwrap_or(0);
    let end_ns = segments.iter().map(|segment| segment.end_ns).max().unwrap_or(0);
    let mut kinds: Vec<Kind> = segments.iter().map(|segment| segment.kind).collect();
    kinds.dedup();
    let stretches = (most / kinds.len()).max(1);
    let whole_ns = u128::from(end_ns.abs_diff(start_ns));
    let edge = |index: usize| {
        let part_ns = whole_ns * index as u128 / stretches as u128;
        start_ns.saturating_add(i64::try_from(part_ns).unwrap_or(i64::MAX))
    };
    let edges: Vec<i64> = (0..=stretches).map(edge).collect();
    let mut out = Vec::new();
    for kind in kinds {
        let own = segments.iter().filter(|segment| segment.kind == kind);
        out.append(&mut in_stretches(kind, own, &edges));
    }
    out
}

/// The segments of one kind, sorted by their starts, in each stretch between two edges.
fn in_stretches<'a>(kind: Kind, sorted: impl Iterator<Item = &'a Segment>, edges: &[i64]) -> Vec<Segment> {
    let mut parts: Vec<Segment> = edges
        .windows(2)
        .map(|ends| Segment { busy_ns: 0, events: 0, ..Segment::one(kind, (ends[0], ends[1]), "") })
        .collect();
    let mut covered_to = i64::MIN;
    for segment in sorted {
        let first = edges.partition_point(|edge| *edge <= segment.start_ns).clamp(1, parts.len()) - 1;
        parts[first].events += 1;
        // Messages overlap: what several cover counts once.
        let from_ns = segment.start_ns.max(covered_to);
        covered_to = covered_to.max(segment.end_ns);
        for part in parts[first..].iter_mut().take_while(|part| part.start_ns < segment.end_ns) {
            let inside = segment.end_ns.min(part.end_ns).saturating_sub(from_ns.max(part.start_ns));
            part.busy_ns += u64::try_from(inside).unwrap_or(0);
        }
    }
    parts.retain(|part| part.busy_ns > 0 || part.events > 0);
    parts
}

/// The ranks whose message was the last one before the end of a wait, and the nanoseconds of these
/// waits.
fn waited_for(spans: &[Span]) -> Vec<(u32, u64)> {
    let mut messages: Vec<(u64, u32)> =
        spans.iter().filter_map(|span| Some((span.end_ns, span.peer?))).collect();
    messages.sort_unstable();
    let mut waited: BTreeMap<u32, u64> = BTreeMap::new();
    for wait in spans.iter().filter(|span| span.timeline == Work::Wait) {
        let before = messages.partition_point(|(end_ns, _)| *end_ns <= wait.end_ns);
        if let Some((_, peer)) = messages[..before].last().filter(|(end_ns, _)| *end_ns >= wait.start_ns) {
            *waited.entry(*peer).or_default() += wait.end_ns - wait.start_ns;
        }
    }
    longest_first(waited)
}

pub(crate) fn longest_first(waited: BTreeMap<u32, u64>) -> Vec<(u32, u64)> {
    let mut waited: Vec<(u32, u64)> = waited.into_iter().collect();
    waited.sort_by_key(|(rank, ns)| (std::cmp::Reverse(*ns), *rank));
    waited
}

/// Without control characters and without the spaces that align tables, and of limited length.
fn short(text: &str) -> String {
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let short: String = harmless(&words).chars().take(MOST_CHARACTERS).collect();
    short.trim_end().to_owned()
}

/// Segments of all ranks together: about 2 MB of HTML.
const ALL_SEGMENTS: usize = 10_000;
const MOST_SEGMENTS: usize = 600;
/// Some for each kind.
const LEAST_SEGMENTS: usize = 15;
const MOST_CHARACTERS: usize = 100;
/// Times beyond this make no sense: a year.
const FARTHEST_NS: u64 = 366 * 24 * 3600 * 1_000_000_000;
/// More than [`MOST_SEGMENTS`] segments and [`kyklos::MAX_RANKS`] ranks take.
const MOST_BYTES: usize = 4 << 20;
/// Message numbers that `job/results/collect.rs`, `trace.rs` and `clocks.rs` do not use.
const LENGTH: u32 = 11;
const ROW: u32 = 12;

#[cfg(test)]
mod tests {
    use super::*;

    fn span(timeline: Work, ns: (u64, u64), peer: Option<u32>) -> Span {
        Span { timeline, name: "attend    Q x K".to_owned(), start_ns: ns.0, end_ns: ns.1, peer }
    }

    const HERE: Ahead = Ahead { ns: 0, within_ns: 0 };

    #[test]
    fn a_hundred_thousand_events_become_few_segments_and_keep_their_time() {
        let spans: Vec<Span> = (0..50_000)
            .flat_map(|i| {
                [
                    span(Work::Compute, (i * 100, i * 100 + 60), None),
                    span(Work::Wait, (i * 100 + 60, i * 100 + 100), None),
                ]
            })
            .collect();
        let row = TimelineRow::of_spans(&spans, HERE, 50);
        assert!(row.segments.len() <= 200, "{}", row.segments.len());
        assert_eq!(row.events, 100_000);
        let busy = |kind| row.segments.iter().filter(|s| s.kind == kind).map(|s| s.busy_ns).sum::<u64>();
        assert_eq!([busy(Kind::Compute), busy(Kind::Wait)], [3_000_000, 2_000_000]);
    }

    #[test]
    fn few_events_stay_as_they_are_on_the_clock_of_rank_0() {
        let ahead = Ahead { ns: 1000, within_ns: 7 };
        let row = TimelineRow::of_spans(&[span(Work::Compute, (400, 1600), None)], ahead, 2);
        let expected = Segment::one(Kind::Compute, (-600, 600), "attend Q x K");
        assert_eq!((row.segments, row.clock_within_ns), (vec![expected], 7));
    }

    #[test]
    fn overlapping_messages_count_once() {
        let spans = [(0, 100), (50, 120), (60, 70)].map(|ns| span(Work::Send, ns, Some(1)));
        let row = TimelineRow::of_spans(&spans, HERE, 2);
        let segments = shortened(row.segments, 2);
        let found: Vec<_> = segments.iter().map(|s| (s.start_ns, s.end_ns, s.busy_ns, s.events)).collect();
        assert_eq!(found, [(0, 60, 60, 2), (60, 120, 60, 1)]);
    }

    #[test]
    fn a_wait_is_for_the_rank_whose_message_ended_it() {
        let spans = [
            span(Work::Receive, (0, 140), Some(2)),
            span(Work::Send, (0, 150), Some(1)),
            span(Work::Wait, (100, 151), None),
            span(Work::Receive, (100, 400), Some(2)),
            span(Work::Wait, (300, 401), None),
            // No message ends in this wait.
            span(Work::Wait, (500, 600), None),
        ];
        assert_eq!(waited_for(&spans), [(2, 101), (1, 51)]);
    }

    #[test]
    fn a_row_of_another_rank_is_read_strictly_and_cannot_control_a_page() {
        let good = TimelineRow::merged(vec![Segment::one(Kind::Copy, (5, 9), "copy")], 2);
        let text = |row: &TimelineRow| serde_json::to_vec(row).expect("JSON");
        assert_eq!(TimelineRow::decode(&text(&good), 2), Ok(good.clone()));
        let mut bad = vec![b"{".to_vec(), text(&TimelineRow { waited_for: vec![(2, 1)], ..good.clone() })];
        let segment = |change: fn(&mut Segment)| {
            let mut row = good.clone();
            change(&mut row.segments[0]);
            text(&row)
        };
        bad.push(segment(|segment| segment.end_ns = 4));
        bad.push(segment(|segment| segment.busy_ns = 5));
        bad.push(segment(|segment| (segment.start_ns, segment.end_ns) = (i64::MIN, i64::MAX)));
        let many = vec![good.segments[0].clone(); most_segments(2) + 1];
        bad.push(text(&TimelineRow { segments: many, ..good.clone() }));
        for bad in bad {
            assert!(TimelineRow::decode(&bad, 2).is_err(), "{}", String::from_utf8_lossy(&bad));
        }
        let hostile = segment(|segment| segment.text = "\u{1b}[2J".repeat(100));
        let read = TimelineRow::decode(&hostile, 2).expect("only its text is bad");
        assert!(!read.segments[0].text.contains('\u{1b}'));
    }
}
