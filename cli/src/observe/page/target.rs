//! Where a page is written.

use std::io::Write;
use std::path::{Path, PathBuf};

use crate::failure::{Failure, Result};
use crate::new_file::{NewFile, check_name, check_replaced};
use crate::options::RANK;

/// The file of a page.
#[derive(Clone, Debug)]
pub(crate) struct PageTarget(PathBuf);

impl PageTarget {
    /// Reads `--report`; refuses names that no page can have.
    pub(crate) fn new(path: &Path) -> Result<Self> {
        check_name("--report", path, "report.html")?;
        check_replaced("--report", path)?;
        if path.to_string_lossy().contains(RANK) {
            return Err(Failure::request(
                format!("--report {}: one page is about all ranks", path.display()),
                format!("name one file, without {RANK}"),
            ));
        }
        Ok(Self(path.to_owned()))
    }

    /// Creates the file, without its name: before any work, because a folder may not be writable.
    pub(crate) fn open(&self) -> Result<PageFile> {
        NewFile::create(&self.0).map(PageFile)
    }
}

/// A page before it has its name.
#[derive(Debug)]
pub(crate) struct PageFile(NewFile);

impl PageFile {
    /// Writes the page and gives it its name.
    pub(crate) fn write(self, html: &str) -> Result<()> {
        let written = self.0.as_file().write_all(html.as_bytes());
        written.map_err(|error| self.0.cannot_write(&error))?;
        self.0.commit()
    }
}
