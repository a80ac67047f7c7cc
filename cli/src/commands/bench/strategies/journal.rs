//! The file of cells that have ended: one line of JSON each, written when the cell ends. A crash
//! loses the running cell only.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use kyklos_transport::regular_file::read_regular;
use serde::{Deserialize, Serialize};

use super::cells::CellName;
use super::record::{Record, State};
use crate::failure::{Failure, Result};

/// What all cells of a folder have in common.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Header {
    pub(super) release: String,
    pub(super) ranks: u32,
    /// Whether each rank is a process.
    pub(super) processes: bool,
    pub(super) transport: String,
    /// By rank.
    pub(super) devices: Vec<String>,
    pub(super) repeat: u32,
    /// How messages go between devices; a folder of an older release does not say so.
    #[serde(default = "host_memory")]
    pub(super) messages: String,
}

fn host_memory() -> String {
    "host memory".to_owned()
}

/// A line of the file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Line {
    Header(Header),
    /// A cell starts. Without a later line of this cell the program has ended in it.
    Begun(CellName),
    Ended(Box<Record>),
}

/// The cells of a folder. The last line of a cell counts.
#[derive(Debug)]
pub(super) struct Journal {
    path: PathBuf,
    file: File,
    records: Vec<Record>,
    /// Places in `records`.
    places: BTreeMap<CellName, usize>,
}

/// What a file holds.
#[derive(Default)]
struct Contents {
    header: Option<Header>,
    records: Vec<Record>,
    places: BTreeMap<CellName, usize>,
    begun: Option<CellName>,
    /// Bytes of whole lines.
    whole: u64,
}

impl Journal {
    /// Opens or creates the file in `folder`. A cell in which the program has ended counts as
    /// failed.
    ///
    /// # Errors
    /// Exit code 2 if the folder has cells of another group.
    pub(super) fn open(folder: &Path, header: &Header) -> Result<Self> {
        std::fs::create_dir_all(folder)
            .map_err(|error| Failure::file("make", folder, &error).into_refusal())?;
        let path = path_in(folder);
        let Contents { header: there, records, places, begun, whole } = read(&path)?;
        if let Some(different) = there.as_ref().and_then(|there| difference(there, header)) {
            return Err(Failure::request(
                format!("{} has cells of another group, with {different}", folder.display()),
                "name another folder with --output",
            ));
        }
        let cannot_write = |error: &std::io::Error| Failure::file("write", &path, error);
        let mut file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .map_err(|error| cannot_write(&error))?;
        // A line that a crash has cut off is overwritten.
        let end = file.set_len(whole).and_then(|()| file.seek(SeekFrom::Start(whole)));
        end.map_err(|error| cannot_write(&error))?;
        let mut journal = Self { path, file, records, places };
        if there.is_none() {
            journal.write(&Line::Header(header.clone()))?;
        }
        if let Some(cell) = begun {
            journal.end(Record::without_times(cell, State::Failed, ENDED_IN_IT))?;
        }
        Ok(journal)
    }

    /// Notes that a cell starts.
    pub(super) fn begin(&mut self, cell: &CellName) -> Result<()> {
        self.write(&Line::Begun(cell.clone())).map(|_| ())
    }

    /// Notes how a cell has ended.
    pub(super) fn end(&mut self, record: Record) -> Result<()> {
        // As a later run reads it: numbers in JSON may lose their last bit.
        if let Line::Ended(record) = self.write(&Line::Ended(Box::new(record)))? {
            keep(&mut self.records, &mut self.places, *record);
        }
        Ok(())
    }

    /// How a cell has ended.
    pub(super) fn of(&self, cell: &CellName) -> Option<&Record> {
        self.places.get(cell).map(|place| &self.records[*place])
    }

    /// All cells that have ended, in the order in which they ended first.
    pub(super) fn records(&self) -> &[Record] {
        &self.records
    }

    /// Appends a line. Returns it as it reads.
    fn write(&mut self, line: &Line) -> Result<Line> {
        let no_json =
            |error: serde_json::Error| Failure::run(format!("a cell cannot be written as JSON: {error}"));
        let mut text = serde_json::to_vec(line).map_err(no_json)?;
        let read = serde_json::from_slice(&text).map_err(no_json)?;
        text.push(b'\n');
        // One call: a crash leaves a whole line or the beginning of one.
        let written = self.file.write_all(&text).and_then(|()| self.file.sync_data());
        written.map_err(|error| Failure::file("write", &self.path, &error))?;
        Ok(read)
    }
}

/// The cells in `folder` that have ended or in which the program has ended; of these the failed
/// ones with `failed` only.
pub(super) fn over(folder: &Path, failed: bool) -> Result<Vec<CellName>> {
    let Contents { records, begun, .. } = read(&path_in(folder))?;
    let ended = records.into_iter().filter(|record| failed || record.state != State::Failed);
    Ok(ended.map(|record| record.name).chain(begun.filter(|_| failed)).collect())
}

fn path_in(folder: &Path) -> PathBuf {
    folder.join("cells.jsonl")
}

fn keep(records: &mut Vec<Record>, places: &mut BTreeMap<CellName, usize>, record: Record) {
    match places.get(&record.name) {
        Some(place) => records[*place] = record,
        None => {
            places.insert(record.name.clone(), records.len());
            records.push(record);
        }
    }
}

fn read(path: &Path) -> Result<Contents> {
    let bytes = match read_regular(path, MOST_BYTES) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Contents::default()),
        Err(error) => return Err(Failure::file("read", path, &error).into_refusal()),
    };
    let mut contents = Contents::default();
    for (number, line) in bytes.split_inclusive(|byte| *byte == b'\n').enumerate() {
        if !line.ends_with(b"\n") {
            break;
        }
        let line_read = serde_json::from_slice::<Line>(line).map_err(|error| {
            Failure::request(
                format!("line {} of {} is not one of its lines: {error}", number + 1, path.display()),
                "name another folder with --output",
            )
        })?;
        match line_read {
            Line::Header(header) => contents.header = Some(header),
            Line::Begun(cell) => contents.begun = Some(cell),
            Line::Ended(record) => {
                contents.begun = contents.begun.filter(|begun| *begun != record.name);
                keep(&mut contents.records, &mut contents.places, *record);
            }
        }
        contents.whole += line.len() as u64;
    }
    Ok(contents)
}

/// The first difference between two groups.
fn difference(there: &Header, here: &Header) -> Option<String> {
    let Header { release, ranks, processes, transport, devices, repeat, messages } = there;
    let different = [
        (*release != here.release, format!("release {release}")),
        (*ranks != here.ranks, format!("{ranks} ranks")),
        (
            *processes != here.processes,
            format!("ranks in {}", if *processes { "processes" } else { "one process" }),
        ),
        (*transport != here.transport, format!("transport {transport}")),
        (*devices != here.devices, format!("devices {}", devices.join(", "))),
        (*repeat != here.repeat, format!("{repeat} runs")),
        (*messages != here.messages, format!("messages by {messages}")),
    ];
    different.into_iter().find(|(different, _)| *different).map(|(_, text)| text)
}

/// A line for each cell, of a few KiB.
const MOST_BYTES: u64 = 1 << 30;
/// Why a cell failed in which the program ended.
const ENDED_IN_IT: &str = "the program ended in this cell";

#[cfg(test)]
mod tests {
    use super::*;

    fn header(ranks: u32) -> Header {
        Header {
            release: "1".to_owned(),
            ranks,
            processes: false,
            transport: "in-process".to_owned(),
            devices: vec!["cpu x".to_owned(); ranks as usize],
            repeat: 3,
            messages: host_memory(),
        }
    }

    fn cell(strategy: &str) -> CellName {
        CellName {
            shape: [1, 8, 2, 2, 8],
            mask: "full".to_owned(),
            dtype: "f32".to_owned(),
            mesh: "1x2".to_owned(),
            strategy: strategy.to_owned(),
            placement: None,
        }
    }

    fn refused(strategy: &str) -> Record {
        Record::without_times(cell(strategy), State::Refused, "it does not fit")
    }

    #[test]
    fn cells_that_have_ended_are_there_after_a_crash_and_the_running_one_has_failed() {
        let folder = tempfile::tempdir().unwrap();
        let mut journal = Journal::open(folder.path(), &header(2)).unwrap();
        journal.begin(&cell("ring")).unwrap();
        journal.end(refused("ring")).unwrap();
        journal.begin(&cell("gather")).unwrap();
        drop(journal);
        assert_eq!(over(folder.path(), true).unwrap(), [cell("ring"), cell("gather")]);
        assert_eq!(over(folder.path(), false).unwrap(), [cell("ring")]);
        // Power was lost in the middle of a line.
        let path = path_in(folder.path());
        let mut bytes = std::fs::read(&path).unwrap();
        let whole = bytes.len();
        bytes.extend_from_slice(b"{\"ended\":{\"sha");
        std::fs::write(&path, &bytes).unwrap();
        let journal = Journal::open(folder.path(), &header(2)).unwrap();
        assert_eq!(journal.of(&cell("ring")), Some(&refused("ring")));
        let crashed = journal.of(&cell("gather")).unwrap();
        assert_eq!((crashed.state, crashed.why.as_deref()), (State::Failed, Some(ENDED_IN_IT)));
        drop(journal);
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.len() > whole && text.lines().all(|line| serde_json::from_str::<Line>(line).is_ok()));
        // It is failed once, however often the file is opened.
        drop(Journal::open(folder.path(), &header(2)).unwrap());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
    }

    #[test]
    fn the_last_line_of_a_cell_counts() {
        let folder = tempfile::tempdir().unwrap();
        let mut journal = Journal::open(folder.path(), &header(2)).unwrap();
        journal.end(Record::without_times(cell("ring"), State::Failed, "once")).unwrap();
        journal.end(refused("tree")).unwrap();
        journal.end(refused("ring")).unwrap();
        assert_eq!(journal.records(), [refused("ring"), refused("tree")]);
        drop(journal);
        let journal = Journal::open(folder.path(), &header(2)).unwrap();
        assert_eq!(journal.records(), [refused("ring"), refused("tree")]);
    }

    #[test]
    fn cells_of_another_group_do_not_mix_with_these() {
        let folder = tempfile::tempdir().unwrap();
        drop(Journal::open(folder.path(), &header(2)).unwrap());
        let failure = Journal::open(folder.path(), &header(4)).unwrap_err();
        assert!(failure.exit == 2 && failure.text.contains("2 ranks"), "{failure:?}");
        let path = path_in(folder.path());
        std::fs::write(&path, "not a line of a journal\n").unwrap();
        let failure = Journal::open(folder.path(), &header(2)).unwrap_err();
        assert!(failure.exit == 2 && failure.text.contains("line 1 of"), "{failure:?}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "not a line of a journal\n");
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        let failure = Journal::open(folder.path(), &header(2)).unwrap_err();
        assert!(failure.exit == 2 && failure.text.contains("not a regular file"), "{failure:?}");
    }
}
