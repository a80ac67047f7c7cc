//! A generated page is compared with what is in the repository.

use std::path::Path;

/// Fails unless the repository's file `name` contains `text`. With KYKLOS_BLESS=1 writes the file
/// instead.
#[track_caller]
pub(super) fn holds(name: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name);
    if std::env::var_os("KYKLOS_BLESS").is_some() {
        std::fs::write(&path, text).unwrap();
    }
    let there = std::fs::read_to_string(&path).unwrap_or_default();
    let line = there.lines().zip(text.lines()).take_while(|(there, text)| there == text).count();
    assert!(
        there == text,
        "{name} is stale from line {}: `{}`, now `{}`; KYKLOS_BLESS=1 with this test rewrites it",
        line + 1,
        there.lines().nth(line).unwrap_or_default(),
        text.lines().nth(line).unwrap_or_default(),
    );
}
