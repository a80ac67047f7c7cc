//! The file with the choices of `kyklos tune`. A damaged file never fails a run; a new file
//! replaces the old one whole.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use kyklos::backend::wgpu::TuningTable;
use kyklos_transport::regular_file::read_regular_text;
use serde::{Deserialize, Serialize};

use crate::failure::{Failure, Result, note};
use crate::new_file::NewFile;
use crate::switches;

/// The content of the file.
#[derive(Debug, Serialize, Deserialize)]
struct Contents {
    /// Version of the layout and of the names in it.
    version: u32,
    entries: TuningTable,
}

/// The table for a run. None with `KYKLOS_TUNE=off`, or if the file cannot be used, which is
/// reported once.
pub(crate) fn for_runs() -> Result<Option<TuningTable>> {
    static TABLE: OnceLock<TuningTable> = OnceLock::new();
    if switches::TUNE.is_off()? {
        return Ok(None);
    }
    Ok(Some(
        TABLE
            .get_or_init(|| {
                let Some(path) = path() else { return TuningTable::default() };
                read(&path).unwrap_or_else(|why| {
                    note(&format!("note: {} is ignored: {why}; kyklos tune replaces it", path.display()));
                    TuningTable::default()
                })
            })
            .clone(),
    ))
}

/// The path of the file, if this user has a cache folder.
pub(crate) fn path() -> Option<PathBuf> {
    kyklos::machine::cache_folder().map(|folder| folder.join("tuning.json"))
}

/// The table in the file; empty if there is no file. The error says why the file cannot be used.
pub(crate) fn read(path: &Path) -> Result<TuningTable, String> {
    match read_regular_text(path, MOST_BYTES) {
        Ok(text) => parse(&text),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(TuningTable::default()),
        Err(error) => Err(error.to_string()),
    }
}

/// The table in the text of a file.
pub(crate) fn parse(text: &str) -> Result<TuningTable, String> {
    // The version first: what follows may have another layout.
    let value: serde_json::Value =
        serde_json::from_str(text).map_err(|error| format!("it is damaged: {error}"))?;
    match value.get("version").and_then(serde_json::Value::as_u64) {
        Some(version) if version == u64::from(VERSION) => {}
        Some(version) => return Err(format!("it has version {version}, this program has {VERSION}")),
        None => return Err("it has no version".to_owned()),
    }
    serde_json::from_value::<Contents>(value)
        .map(|contents| contents.entries)
        .map_err(|error| format!("it is damaged: {error}"))
}

/// Replaces the file atomically: a concurrent reader gets the old or the new file. Of two
/// concurrent writers the later wins.
pub(crate) fn write(path: &Path, table: &TuningTable) -> Result<()> {
    let failed = |error: &io::Error| Failure::file("keep the choices in", path, error);
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder).map_err(|error| failed(&error))?;
    let file = NewFile::create_private(path)?;
    let text = text_of(table).map_err(|error| Failure::run(format!("cannot keep the choices: {error}")))?;
    file.as_file().write_all((text + "\n").as_bytes()).map_err(|error| file.cannot_write(&error))?;
    file.commit()
}

/// The text of a file with this table.
pub(crate) fn text_of(table: &TuningTable) -> serde_json::Result<String> {
    serde_json::to_string_pretty(&Contents { version: VERSION, entries: table.clone() })
}

const VERSION: u32 = 1;
/// Far more than the choices for all devices of a machine.
const MOST_BYTES: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_written_table_is_read_and_a_damaged_or_foreign_one_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deeper").join("tuning.json");
        assert_eq!(read(&path), Ok(TuningTable::default()));
        let entry = r#"{"key": {"adapter": {"name": "a", "vendor": 1, "device": 2, "backend": "vulkan",
            "driver": "d", "driver_info": "i"}, "kernel": "auto", "dtype": "f32", "head_dim": 64,
            "bucket": {"row_heads_log4": 6}, "sources": "00"}, "variant": "portable-2x4"}"#;
        let table: TuningTable = serde_json::from_str(&format!("[{entry}]")).unwrap();
        write(&path, &table).unwrap();
        assert_eq!(read(&path), Ok(table));
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "nothing else is left there");

        for (text, why) in [
            ("", "damaged"),
            ("{\"version\": 1, \"entries\": [", "damaged"),
            ("[]", "no version"),
            ("{\"version\": 0, \"entries\": []}", "version 0"),
            ("{\"version\": 2, \"choices\": {}}", "version 2"),
            ("{\"version\": 1}", "damaged"),
            (
                &format!(
                    "{{\"version\": 1, \"entries\": [{}]}}",
                    entry.replace("portable-2x4", "portable-x")
                ),
                "damaged",
            ),
        ] {
            fs::write(&path, text).unwrap();
            assert!(read(&path).unwrap_err().contains(why), "{text}");
        }
        fs::write(&path, [0xff, 0xfe]).unwrap();
        assert!(read(&path).is_err());
        fs::write(&path, vec![b' '; MOST_BYTES as usize + 1]).unwrap();
        assert!(read(&path).unwrap_err().contains("bytes"));
        assert!(read(folder.path()).is_err(), "a folder is no file");
    }
}
