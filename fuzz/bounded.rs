//! A bounded run of a fuzz target on stable Rust: its corpus, then 1500 mutations of it from a seed
//! (fewer for a slow target). The memory that a decoder takes for its input is limited.
//! `KYKLOS_FUZZ_SECONDS` runs mutations for that long, `KYKLOS_FUZZ_SEED` chooses other ones.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Most bytes that a decoder may hold at a time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limit {
    /// For any input.
    pub(crate) fixed: u64,
    /// In addition, for each byte of the input.
    pub(crate) per_byte: u64,
}

/// The folder of the corpus of a target.
pub(crate) fn corpus_folder(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target)
}

/// The corpus of a target, in order: first the made files, which must equal the output of the
/// encoders byte for byte, then the inputs that cargo-fuzz has found. `KYKLOS_BLESS=1` writes the
/// made files.
pub(crate) fn corpus(target: &str, made: &[(String, Vec<u8>)]) -> Vec<Vec<u8>> {
    let folder = corpus_folder(target);
    let found = found(&folder, |name| made.iter().any(|(made, _)| made == name));
    if std::env::var_os("KYKLOS_BLESS").is_some() {
        bless(&folder, made);
    }
    for (name, bytes) in made {
        let held = std::fs::read(folder.join(name)).unwrap_or_default();
        assert!(
            held == *bytes,
            "fuzz/corpus/{target}/{name} is not what is made now: KYKLOS_BLESS=1 writes it anew"
        );
    }
    made.iter().map(|(_, bytes)| bytes.clone()).chain(found).collect()
}

/// The same for a corpus whose made inputs differ in each run, because they contain new keys.
/// `KYKLOS_BLESS=1` writes them as first inputs for cargo-fuzz, under names that git ignores.
#[allow(dead_code, reason = "the program's decoders read no keys")]
pub(crate) fn corpus_with_keys(target: &str, made: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let folder = corpus_folder(target);
    let named: Vec<_> = (0..).zip(made).map(|(at, bytes)| (format!("new-{at}"), bytes.clone())).collect();
    if std::env::var_os("KYKLOS_BLESS").is_some() {
        bless(&folder, &named);
    }
    made.iter().cloned().chain(found(&folder, |name| name.starts_with("new-"))).collect()
}

fn bless(folder: &Path, made: &[(String, Vec<u8>)]) {
    std::fs::create_dir_all(folder).expect("a folder");
    for (name, bytes) in made {
        std::fs::write(folder.join(name), bytes).expect("a file");
    }
}

/// The inputs that cargo-fuzz has found, in order. It names each by its SHA-1. The folder may hold
/// no other files except the made ones.
fn found(folder: &Path, is_made: impl Fn(&str) -> bool) -> Vec<Vec<u8>> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    let mut names: Vec<_> =
        entries.map(|entry| entry.expect("an entry").file_name().into_string().expect("text")).collect();
    names.retain(|name| !is_made(name));
    names.sort();
    let read = |name: String| {
        let is_hash = name.len() == 40 && name.bytes().all(|byte| byte.is_ascii_hexdigit());
        assert!(is_hash, "{} is made by nobody: remove it", folder.join(&name).display());
        std::fs::read(folder.join(name)).expect("a file")
    };
    names.into_iter().map(read).collect()
}

/// Runs a target on many inputs. Returns their number.
pub(crate) fn run(name: &str, corpus: &[Vec<u8>], limit: Limit, target: impl Fn(&[u8])) -> u64 {
    let number = |name, usual: u64| std::env::var(name).map_or(usual, |text| text.parse().expect("a number"));
    let (seconds, seed) = (number("KYKLOS_FUZZ_SECONDS", 0), number("KYKLOS_FUZZ_SEED", 1));
    let (until, mut chance, mut times) = (Instant::now() + Duration::from_secs(seconds), Chance(seed), 0);
    let [least, usual] = [LEAST_MUTATIONS, MUTATIONS].map(|count| corpus.len() as u64 + count);
    let usual_until = Instant::now() + Duration::from_secs(2);
    // The first call may allocate memory that stays.
    target(&corpus[0]);
    while times < least || (times < usual && Instant::now() < usual_until) || Instant::now() < until {
        let input = corpus.get(times as usize).cloned().unwrap_or_else(|| chance.mutation(corpus));
        let told = Tell { name, times, input: &input };
        let held = allocation_counter::measure(|| target(&input)).bytes_max;
        let allowed = limit.fixed + limit.per_byte * input.len() as u64;
        assert!(held <= allowed, "{name} held {held} bytes for {} bytes, allowed are {allowed}", input.len());
        drop(told);
        times += 1;
    }
    times
}

/// Number of mutations of every run, even for a slow target.
const LEAST_MUTATIONS: u64 = 110;

/// Number of mutations of a usual run.
const MUTATIONS: u64 = 1500;

/// Prints the input of the target if the target panics.
struct Tell<'a> {
    name: &'a str,
    times: u64,
    input: &'a [u8],
}

impl Drop for Tell<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let shown = &self.input[..self.input.len().min(2000)];
            eprintln!("{}, call {}: {}", self.name, self.times, shown.escape_ascii());
        }
    }
}

/// `SplitMix64`.
struct Chance(u64);

impl Chance {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % end.max(1) as u64) as usize
    }

    /// One input of the corpus, changed in a few places.
    fn mutation(&mut self, corpus: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = corpus[self.below(corpus.len())].clone();
        for _ in 0..=self.below(4) {
            let at = self.below(bytes.len());
            let end = (at + 1 + self.below(16)).min(bytes.len());
            match self.below(8) {
                0 if at < bytes.len() => bytes[at] ^= 1 << self.below(8),
                1 if at < bytes.len() => {
                    bytes[at] = [0, 1, 0x7f, 0x80, 0xff, b'0', b'9', b'['][self.below(8)]
                }
                2 => bytes.truncate(at),
                // A length of one, two, four or eight bytes.
                3 => {
                    let value = [0, 1, 0xff, 0xffff, 0x10_0000, 0xffff_ffff, u64::MAX][self.below(7)];
                    let width = [1, 2, 4, 8][self.below(4)].min(bytes.len() - at.min(bytes.len()));
                    bytes[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
                }
                // A number in a text.
                4 => {
                    let digits =
                        [&b"0"[..], b"-1", b"4294967296", b"99999999999999999999", b"1e999"][self.below(5)];
                    bytes.splice(at..at, digits.iter().copied());
                }
                5 => {
                    let again = bytes[at.min(end)..end].repeat(1 + self.below(64));
                    bytes.splice(at..at, again);
                }
                6 => drop(bytes.drain(at.min(end)..end)),
                // The rest is from another input.
                _ => {
                    let other = &corpus[self.below(corpus.len())];
                    let from = self.below(other.len());
                    bytes.truncate(at);
                    bytes.extend_from_slice(&other[from..]);
                }
            }
            bytes.truncate(MOST_BYTES);
        }
        bytes
    }
}

/// Longest input.
const MOST_BYTES: usize = 1 << 17;
