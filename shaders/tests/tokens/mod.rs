//! While the kernels move from Rust functions to templates: every kernel has the tokens that it had
//! before. `KYKLOS_BLESS=1` writes `tests/tokens/hashes.txt` anew.

use crate::catalogue::every_kernel;
use kyklos_shaders::{Dialect, Kernel};

#[test]
fn every_kernel_has_the_tokens_that_it_had() {
    let now: String = every_kernel()
        .iter()
        .map(|kernel| format!("{:016x} {}\n", hash(&tokens(&kernel.source(Dialect::Naga))), kernel.name()))
        .collect();
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tokens/hashes.txt");
    if std::env::var_os("KYKLOS_BLESS").is_some() {
        std::fs::write(&path, &now).expect("the folder is there");
    }
    let before = std::fs::read_to_string(&path).expect("KYKLOS_BLESS=1 makes it");
    let changed: Vec<_> = now
        .lines()
        .zip(before.lines())
        .filter(|(now, before)| now != before)
        .map(|(now, _)| &now[17..])
        .collect();
    assert_eq!(now.lines().count(), before.lines().count());
    assert!(
        changed.is_empty(),
        "{} kernels have other tokens, the first ones: {:?}",
        changed.len(),
        &changed[..changed.len().min(8)]
    );
    assert!(every_kernel().iter().any(Kernel::needs_matrices));
}

/// A text without comments, and without white space that separates nothing.
fn tokens(text: &str) -> String {
    let mut out = String::new();
    let word = |c: char| c.is_alphanumeric() || c == '_';
    for line in text.lines() {
        let code = line.split("//").next().unwrap_or_default();
        for part in code.split_whitespace() {
            // Two words, or two operators that together are another one, stay apart.
            let apart = out.ends_with(word) && part.starts_with(word)
                || out.ends_with(|c: char| "+-&|<>=".contains(c))
                    && part.starts_with(|c: char| "+-&|<>=".contains(c));
            if apart {
                out.push(' ');
            }
            out.push_str(part);
        }
    }
    out
}

/// FNV-1a.
fn hash(text: &str) -> u64 {
    text.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}
