//! Reads a record. The file may be truncated, or may not be a record.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use kyklos::MAX_RANKS;
use kyklos_transport::harmless;
use kyklos_transport::regular_file::open_regular;

use crate::observe::record::format::{
    AbortLine, CallLine, EventLine, FORMAT, Line, MessagesLine, NcclLine, PeerLine, RankLine, StepAt,
};

/// The record of one rank.
#[derive(Clone, Debug)]
pub(crate) struct Record {
    pub(super) path: PathBuf,
    pub(super) rank: RankLine,
    pub(super) peers: Vec<PeerLine>,
    pub(super) calls: Vec<CallLine>,
    pub(super) abort: Option<AbortLine>,
    pub(super) events: Vec<EventLine>,
    /// The damage of a file that is partly readable.
    pub(super) damage: Option<String>,
}

/// Reads a file, or says why it cannot be used.
pub(super) fn read(path: &Path) -> Result<Record, String> {
    let file = open_regular(path).map_err(|error| error.to_string())?;
    of_lines(path, file)
}

pub(crate) fn of_lines(path: &Path, from: impl Read) -> Result<Record, String> {
    let mut from = BufReader::new(from.take(MOST_BYTES));
    let mut next = || -> Result<Option<Vec<u8>>, String> {
        let mut line = Vec::new();
        let read = from.read_until(b'\n', &mut line).map_err(|error| error.to_string())?;
        Ok((read > 0).then_some(line))
    };
    let first = next()?.ok_or("it is empty")?;
    let rank = match serde_json::from_slice(&first) {
        Ok(Line::Rank(rank)) => *rank,
        _ => return Err("its first line does not say whose record it is".to_owned()),
    };
    if rank.format != FORMAT {
        return Err(format!("its format is {}, this program reads {FORMAT}", rank.format));
    }
    if rank.size == 0 || rank.size > MAX_RANKS || rank.rank >= rank.size {
        return Err(format!("it says rank {} of {} ranks", rank.rank, rank.size));
    }
    let mut record = Record {
        path: path.to_owned(),
        rank: clean_rank(rank),
        peers: Vec::new(),
        calls: Vec::new(),
        abort: None,
        events: Vec::new(),
        damage: None,
    };
    let mut bad_lines = 0_u32;
    let mut ended = false;
    while let Some(line) = next()? {
        match serde_json::from_slice(&line) {
            Ok(Line::End) => {
                ended = true;
                break;
            }
            Ok(line) => bad_lines += u32::from(!record.take(line)),
            Err(_) => bad_lines = bad_lines.saturating_add(1),
        }
    }
    record.damage = match (bad_lines, ended) {
        (0, true) => None,
        (0, false) => Some("it was cut off before its end".to_owned()),
        (bad, true) => Some(format!("{bad} of its lines make no sense")),
        (bad, false) => Some(format!("{bad} of its lines make no sense, and it was cut off before its end")),
    };
    Ok(record)
}

impl Record {
    /// Keeps a line if it is one that a rank of this group can have written.
    fn take(&mut self, line: Line) -> bool {
        let size = self.rank.size;
        match line {
            Line::Peer(mut peer) if peer.rank < size && self.peers.len() < size as usize => {
                peer.at = peer.at.map(clean_step);
                self.peers.push(peer);
            }
            Line::Call(call) if call.peer < size && self.calls.len() < MOST_LINES => {
                self.calls.push(CallLine { call: clean(&call.call), ..call });
            }
            Line::Abort(abort) if abort.culprit < size && self.abort.is_none() => {
                let (text, at) = (clean(&abort.text), clean_step(abort.at));
                self.abort = Some(AbortLine { text, at, ..abort });
            }
            Line::Event(event) if event.peer < size && self.events.len() < MOST_LINES => {
                self.events.push(EventLine { event: clean(&event.event), ..event });
            }
            _ => return false,
        }
        true
    }
}

fn clean_rank(rank: RankLine) -> RankLine {
    RankLine {
        version: clean(&rank.version),
        job: clean(&rank.job),
        plan_hash: clean(&rank.plan_hash),
        strategy: clean(&rank.strategy),
        mesh: clean(&rank.mesh),
        why: clean(&rank.why),
        error: rank.error.as_deref().map(clean),
        network: rank.network.as_deref().map(clean),
        at: clean_step(rank.at),
        messages: rank.messages.map(clean_messages),
        ..rank
    }
}

fn clean_messages(MessagesLine { ways, nccl }: MessagesLine) -> MessagesLine {
    let nccl = nccl.map(|nccl| NcclLine {
        version: clean(&nccl.version),
        library: nccl.library.as_deref().map(clean),
        ranks: nccl.ranks.into_iter().take(MOST_LINES).collect(),
        failure: nccl.failure.as_deref().map(clean),
        ..nccl
    });
    MessagesLine { ways: clean(&ways), nccl }
}

fn clean_step(place: StepAt) -> StepAt {
    StepAt { doing: place.doing.as_deref().map(clean), ..place }
}

/// Text that controls no terminal, of limited length.
pub(super) fn clean(text: &str) -> String {
    harmless(&text.chars().take(MOST_CHARACTERS).collect::<String>())
}

/// More than any record has: a recorder keeps some thousand events, of about 120 bytes each.
const MOST_BYTES: u64 = 64 << 20;
const MOST_LINES: usize = 1 << 16;
const MOST_CHARACTERS: usize = 1000;
