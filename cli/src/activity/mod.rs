//! One line on a terminal that says what this process does: nothing in a pipe.
//!
//! Anything may say what it does. The line is drawn by a thread of its own, so that its times go
//! on while nothing else happens.

mod line;

use std::io::{IsTerminal, Write};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use kyklos_transport::quic::Awaited;

use self::line::Happened;

/// From now on the line is drawn, if standard error is a terminal, or told to the `kyklos launch`
/// that draws the lines of this process. Of the processes that another launcher has started on a
/// host the first one draws its line: they may share a terminal.
pub(crate) fn show() {
    let is_told = std::env::var_os(TELLS).is_some();
    let draws = std::io::stderr().is_terminal() && kyklos_launch::local_rank().is_none_or(|rank| rank == 0);
    if !(is_told || draws) || SHOWN.get().is_some() {
        return;
    }
    let shown = Shown {
        is_told,
        told: Mutex::default(),
        bar: Mutex::default(),
        happened: Mutex::default(),
        since: Instant::now(),
    };
    if SHOWN.set(shown).is_ok() {
        // Without the thread there is no line.
        let _ = std::thread::Builder::new().name("line".into()).spawn(|| {
            loop {
                std::thread::sleep(TICK);
                if let Some(shown) = SHOWN.get() {
                    shown.draw(&mut lock(&shown.bar));
                }
            }
        });
    }
}

/// Whether anybody sees the line: otherwise nothing has to be told.
pub(crate) fn is_shown() -> bool {
    SHOWN.get().is_some()
}

/// This process does this now.
pub(crate) fn doing(what: &str) {
    tell(|happened, now| happened.doing(what, now));
}

/// This process waits for this until it has its group.
pub(crate) fn waits_for(awaited: Awaited<'_>) {
    let ranks = match awaited {
        Awaited::Ranks(ranks) => ranks,
        Awaited::OthersOf(rank) => return doing(&format!("rank {rank} waits for the others")),
        Awaited::NextGroup => return doing("a rank was lost, the others form the next group"),
        Awaited::Nothing => return doing("the group is complete"),
    };
    let names: Vec<String> = ranks.iter().take(MOST_NAMES).map(ToString::to_string).collect();
    let more = ranks.len() - names.len();
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let rank = if ranks.len() > 1 { "ranks" } else { "rank" };
    doing(&format!("waiting for {rank} {}{more} to join the group", names.join(", ")));
}

/// Of `kyklos launch`: the process of `rank` has told this line.
pub(crate) fn process_says(rank: u32, line: &str) {
    tell(|happened, _| happened.process_says(rank, line));
}

/// `rank` will compute passes of these floating-point operations, `repeat` times all of them.
pub(crate) fn joins(rank: u32, flops: Vec<f64>, repeat: u64) {
    tell(|happened, now| happened.joins(rank, flops, repeat, now));
}

/// `rank` begins a step.
pub(crate) fn step(rank: u32, step: &dyn Fn() -> String) {
    tell(|happened, now| happened.step(rank, step(), now));
}

/// `rank` has done this share of its pass.
pub(crate) fn worked(rank: u32, share: f64) {
    tell(|happened, now| happened.worked(rank, share, now));
}

/// `rank` has done its pass.
pub(crate) fn passed(rank: u32) {
    tell(|happened, now| happened.passed(rank, now));
}

/// Removes the line, until something is told again.
pub(crate) fn ends() {
    if let Some(shown) = SHOWN.get() {
        let mut bar = lock(&shown.bar);
        lock(&shown.happened).ends();
        shown.draw(&mut bar);
    }
}

/// Writes something else to the terminal, without the line.
pub(crate) fn aside<T>(write: impl FnOnce() -> T) -> T {
    let Some(shown) = SHOWN.get() else { return write() };
    // The line is not drawn meanwhile.
    match &*lock(&shown.bar) {
        Some(bar) => bar.suspend(write),
        None => write(),
    }
}

fn tell(event: impl FnOnce(&mut Happened, Duration)) {
    if let Some(shown) = SHOWN.get() {
        event(&mut lock(&shown.happened), shown.since.elapsed());
    }
}

/// Two locks: a terminal that takes no bytes holds the first one only, and nobody who computes
/// waits for it. Who needs both takes them in this order.
#[derive(Debug)]
struct Shown {
    /// Whether `kyklos launch` draws the line.
    is_told: bool,
    /// The last line that was told.
    told: Mutex<String>,
    bar: Mutex<Option<ProgressBar>>,
    happened: Mutex<Happened>,
    since: Instant,
}

impl Shown {
    fn draw(&self, bar: &mut Option<ProgressBar>) {
        let line = lock(&self.happened).line(self.since.elapsed());
        if self.is_told {
            let line = line.unwrap_or_default();
            let mut told = lock(&self.told);
            if *told != line {
                let whole = [LINE, line.as_bytes(), b"\n"].concat();
                // One call, so that lines of several threads do not mix.
                let _ = std::io::stderr().lock().write_all(&whole);
                *told = line;
            }
            return;
        }
        match line {
            Some(line) => bar.get_or_insert_with(new_bar).set_message(line),
            None => bar.take().iter().for_each(ProgressBar::finish_and_clear),
        }
    }
}

fn lock<T>(state: &Mutex<T>) -> MutexGuard<'_, T> {
    // No panic can leave a state that matters.
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

fn new_bar() -> ProgressBar {
    let bar = ProgressBar::new_spinner();
    if let Ok(style) = ProgressStyle::with_template("{wide_msg}") {
        bar.set_style(style);
    }
    bar
}

/// Set by `kyklos launch` on a terminal: its processes tell their lines.
pub(crate) const TELLS: &str = "KYKLOS_LAUNCH_SHOWS";
/// The begin of such a line on standard error. No other text begins with this character.
pub(crate) const LINE: &[u8] = b"\0does ";

static SHOWN: OnceLock<Shown> = OnceLock::new();

/// Between two drawings.
const TICK: Duration = Duration::from_millis(250);
/// Ranks that a line names.
const MOST_NAMES: usize = 8;
