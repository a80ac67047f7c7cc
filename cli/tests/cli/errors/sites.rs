//! Places in the sources that refuse something. A test checks that the index has all of them.

use std::path::{Path, PathBuf};

/// A call of `Error::request` or `Failure::request`.
pub(super) struct Site {
    /// File and line.
    pub(super) at: String,
    /// The first text of the call, as the source writes it.
    pub(super) text: String,
}

impl Site {
    /// Whether `sentence` may come from this place: it contains the words of the text, in the same order.
    pub(super) fn may_say(&self, sentence: &str) -> bool {
        let mut rest = sentence;
        self.text.split(['{', '}']).step_by(2).all(|words| match rest.find(words) {
            Some(found) => {
                rest = &rest[found + words.len()..];
                true
            }
            None => false,
        })
    }
}

/// All such places in the libraries and the program, without tests.
pub(super) fn all() -> Vec<Site> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut sites = Vec::new();
    for folder in ["runtime/src", "cuda-backend/src", "launch/src", "cli/src"] {
        let mut files = Vec::new();
        walk(&root.join(folder), &mut files);
        for file in files {
            let source = std::fs::read_to_string(&file).unwrap();
            let source = source.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
            let name = file.strip_prefix(&root).unwrap().display();
            for (at, call) in source.match_indices("::request(") {
                let before = &source[..at];
                if before.ends_with("Error") || before.ends_with("Failure") {
                    let line = 1 + before.matches('\n').count();
                    sites.push(Site {
                        at: format!("{name}:{line}"),
                        text: literal(&source[at + call.len()..]),
                    });
                }
            }
        }
    }
    sites
}

fn walk(folder: &Path, files: &mut Vec<PathBuf>) {
    let mut entries: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    entries.sort();
    for path in entries {
        if path.is_dir() {
            walk(&path, files);
        } else if path.extension().is_some_and(|e| e == "rs")
            && path.file_name().is_some_and(|n| n != "tests.rs")
        {
            files.push(path);
        }
    }
}

/// The first string literal of `source`, with its escapes decoded. Only the escapes in such texts are supported.
fn literal(source: &str) -> String {
    let mut text = String::new();
    let mut chars = source[source.find('"').map_or(source.len(), |at| at + 1)..].chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '"' => break,
            '\\' => match chars.next() {
                // A continued line: its indentation is not part of the text.
                Some('\n') => while chars.next_if(|c| c.is_whitespace()).is_some() {},
                Some(escaped) => text.push(escaped),
                None => break,
            },
            c => text.push(c),
        }
    }
    text
}
