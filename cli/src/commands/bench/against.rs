//! `kyklos bench --against`: times other programs in turns with this one, on one device.
//!
//! # What a peer is
//!
//! Any command. It gets two more arguments: the case, `BATCH,KEYS,HEADS,KV HEADS,DIM,MASK,DTYPE`,
//! with `QUERIES:KEYS` instead of KEYS if only the last tokens are queries and `,backward` after it
//! with `--backward`, and the number of timed calls. It checks its own result and ends with one
//! line of JSON, `{"first_ms":…,"times_ms":[…],"max_abs_error":…}`, and `"device_ms":[…]` if it
//! measures calls by the clock of the device too. If it cannot run a case, its exit code is not 0,
//! and the last line of its standard error is the reason.

use std::io::Read;
use std::process::{Command, ExitStatus, Stdio};
use std::str::FromStr;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kyklos::plan::table;
use serde::{Deserialize, Serialize};

use crate::failure::{Failure, Result, note};
use crate::median::median;

/// A program to compare with: `NAME=COMMAND`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Peer {
    pub(crate) name: String,
    /// The program and its first arguments.
    command: Vec<String>,
}

impl FromStr for Peer {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, command) = text.split_once('=').unwrap_or_default();
        let command: Vec<String> = command.split_whitespace().map(str::to_owned).collect();
        if name.is_empty() || name == OURS || command.is_empty() {
            return Err(format!(
                "`{text}` is not NAME=COMMAND: write burn='target/peer --fast', say, with a name other than {OURS}"
            ));
        }
        Ok(Self { name: name.to_owned(), command })
    }
}

/// The measurements of one program in one round of one case.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Times {
    /// The first call, which compiles kernels.
    pub(crate) first_ms: f64,
    /// By the clock of the host, from the call until the device has done it.
    pub(crate) times_ms: Vec<f64>,
    /// By the clock of the device, if it has one.
    #[serde(default)]
    pub(crate) device_ms: Option<Vec<f64>>,
    pub(crate) max_abs_error: f64,
}

impl Times {
    /// Reads a line of JSON. The error is empty if times are missing or not finite.
    pub(crate) fn of_line(line: &str) -> Result<Self, String> {
        let times: Self = serde_json::from_str(line).map_err(|error| format!(": {error}"))?;
        let device = times.device_ms.as_deref().unwrap_or_default();
        let numbers = times.times_ms.iter().chain(device).chain([&times.first_ms, &times.max_abs_error]);
        if times.times_ms.is_empty() || numbers.into_iter().any(|number| !number.is_finite()) {
            return Err(String::new());
        }
        Ok(times)
    }

    fn median_ms(&self) -> f64 {
        median(self.times_ms.iter().copied())
    }

    fn device_median_ms(&self) -> Option<f64> {
        let times = self.device_ms.as_ref().filter(|times| !times.is_empty())?;
        Some(median(times.iter().copied()))
    }
}

/// One case: all programs, all rounds.
#[derive(Debug, Serialize)]
pub(crate) struct Comparison {
    pub(crate) case: String,
    programs: Vec<Program>,
    /// Peers that could not run the case, with the reason.
    left_out: Vec<(String, String)>,
}

#[derive(Debug, Serialize)]
struct Program {
    name: String,
    /// Each round's median.
    medians_ms: Vec<f64>,
    min_ms: f64,
    /// The median of the program divided by ours, for each round.
    ratios: Vec<f64>,
    /// The medians by the clock of the device, and their ratios; empty if this program or ours has
    /// none.
    device_medians_ms: Vec<f64>,
    device_ratios: Vec<f64>,
    first_ms: f64,
    max_abs_error: f64,
}

/// Runs `ours` and the peers in turns, `rounds` times, in reverse order every second time. `ours`
/// checks itself, and returns its tolerance.
///
/// # Errors
/// Errors of `ours`. A peer with an error of more than [`ALLOWANCE`] tolerances: the time of a
/// wrong result means nothing. A peer that fails after it has run the case once.
pub(crate) fn compare(
    case: String,
    peers: &[Peer],
    rounds: u32,
    repeat: u32,
    mut ours: impl FnMut() -> Result<(Times, f64)>,
) -> Result<Comparison> {
    let mut allowed = 0.0;
    let mut found: Vec<Vec<Times>> = vec![Vec::new(); peers.len() + 1];
    let mut left_out: Vec<(String, String)> = Vec::new();
    for round in 0..rounds {
        let mut turns: Vec<usize> = (0..found.len()).collect();
        if round % 2 == 1 {
            turns.reverse();
        }
        for turn in turns {
            let Some(peer) = turn.checked_sub(1).map(|peer| &peers[peer]) else {
                let (times, tolerance) = ours()?;
                allowed = tolerance * ALLOWANCE;
                found[0].push(times);
                continue;
            };
            if left_out.iter().any(|(name, _)| *name == peer.name) {
                continue;
            }
            note(&format!("{} {case}", peer.name));
            match peer.measure(&case, repeat) {
                Ok(times) if times.max_abs_error <= allowed => found[turn].push(times),
                Ok(times) => {
                    return Err(Failure::run(format!(
                        "{} is wrong in {case}: off by {:.1e}, allowed {allowed:.1e}",
                        peer.name, times.max_abs_error
                    )));
                }
                Err(why) if found[turn].is_empty() => left_out.push((peer.name.clone(), why)),
                Err(why) => return Err(Failure::run(format!("{} {case}: {why}", peer.name))),
            }
        }
    }
    let our_medians: Vec<f64> = found[0].iter().map(Times::median_ms).collect();
    let names = std::iter::once(OURS.to_owned()).chain(peers.iter().map(|peer| peer.name.clone()));
    let programs = names.zip(&found).filter(|(_, rounds)| !rounds.is_empty()).map(|(name, rounds)| {
        let medians_ms: Vec<f64> = rounds.iter().map(Times::median_ms).collect();
        let device =
            |rounds: &[Times]| rounds.iter().map(Times::device_median_ms).collect::<Option<Vec<_>>>();
        let (device_medians_ms, ours) = device(rounds).zip(device(&found[0])).unwrap_or_default();
        Program {
            name,
            min_ms: rounds.iter().flat_map(|times| &times.times_ms).copied().fold(f64::INFINITY, f64::min),
            ratios: medians_ms.iter().zip(&our_medians).map(|(theirs, ours)| theirs / ours).collect(),
            medians_ms,
            device_ratios: device_medians_ms.iter().zip(&ours).map(|(theirs, ours)| theirs / ours).collect(),
            device_medians_ms,
            first_ms: rounds[0].first_ms,
            max_abs_error: rounds.iter().map(|times| times.max_abs_error).fold(0.0, f64::max),
        }
    });
    Ok(Comparison { case, programs: programs.collect(), left_out })
}

impl Peer {
    /// Runs the program once. An error is the reason for a missing time.
    fn measure(&self, case: &str, repeat: u32) -> Result<Times, String> {
        let [program, arguments @ ..] = &self.command[..] else { return Err("no command".to_owned()) };
        let mut child = Command::new(program)
            .args(arguments)
            .args([case, &repeat.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| format!("cannot start {program}: {error}"))?;
        let stdout = child.stdout.take().map(read_all);
        let stderr = child.stderr.take().map(read_all);
        let ended = wait_for(&mut child);
        let [stdout, stderr] = [stdout, stderr].map(|reader| {
            let bytes = reader.and_then(|reader| reader.join().ok()).unwrap_or_default();
            String::from_utf8_lossy(&bytes).trim_end().to_owned()
        });
        let last = |text: &str| text.lines().next_back().unwrap_or("no message").chars().take(200).collect();
        let ended: Option<ExitStatus> =
            ended.map_err(|error| format!("cannot wait for {program}: {error}"))?;
        let Some(status) = ended else {
            return Err(format!("did not end within {} s", PATIENCE.as_secs()));
        };
        if !status.success() {
            return Err(last(&stderr));
        }
        let line: String = stdout.lines().next_back().unwrap_or_default().to_owned();
        Times::of_line(&line).map_err(|what| format!("wrote no times{what}: {}", last(&line)))
    }
}

/// Waits until the process ends; `None` if it was killed at the time limit.
fn wait_for(child: &mut std::process::Child) -> std::io::Result<Option<ExitStatus>> {
    let started = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if started.elapsed() > PATIENCE {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn read_all(mut from: impl Read + Send + 'static) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        // The output before an error may help.
        let _ = from.read_to_end(&mut bytes);
        bytes
    })
}

/// The comparisons as a table: `ratio` is the time of a program divided by ours.
pub(crate) fn text(comparisons: &[Comparison]) -> String {
    let header = [
        "case",
        "program",
        "median ms",
        "of medians",
        "min ms",
        "ratio",
        "of ratios",
        "device ms",
        "device ratio",
        "first ms",
        "error",
    ];
    let middle = |values: &[f64]| match values {
        [] => "-".to_owned(),
        values => format!("{:.2}", median(values.iter().copied())),
    };
    let span = |values: &[f64]| {
        let (min, max) =
            values.iter().fold((f64::INFINITY, 0.0_f64), |(min, max), v| (min.min(*v), max.max(*v)));
        format!("{min:.2} to {max:.2}")
    };
    let rows = comparisons.iter().flat_map(|comparison| {
        comparison.programs.iter().map(move |program| {
            vec![
                comparison.case.clone(),
                program.name.clone(),
                format!("{:.2}", median(program.medians_ms.iter().copied())),
                span(&program.medians_ms),
                format!("{:.2}", program.min_ms),
                format!("{:.2}", median(program.ratios.iter().copied())),
                span(&program.ratios),
                middle(&program.device_medians_ms),
                middle(&program.device_ratios),
                format!("{:.0}", program.first_ms),
                format!("{:.1e}", program.max_abs_error),
            ]
        })
    });
    let mut out = table(&header, rows.collect());
    for comparison in comparisons {
        for (name, why) in &comparison.left_out {
            out.push_str(&format!("{name} left out of {}: {why}\n", comparison.case));
        }
    }
    out
}

/// Peers may round weights to half precision, which ours does not, and may use other inputs.
const ALLOWANCE: f64 = 10.0;
/// Name of this program in the table.
const OURS: &str = "kyklos";
/// Time limit of a peer, which may compile and tune for minutes.
const PATIENCE: Duration = Duration::from_secs(1800);

#[cfg(test)]
mod tests {
    use super::*;

    fn ours() -> Result<(Times, f64)> {
        let device_ms = Some(vec![1.0, 2.0, 4.0]);
        Ok((Times { first_ms: 9.0, times_ms: vec![2.0, 4.0, 3.0], device_ms, max_abs_error: 1e-7 }, 1e-6))
    }

    fn against(script: &str) -> Result<Comparison> {
        let peer =
            Peer { name: "peer".into(), command: ["sh", "-c", script, "peer"].map(str::to_owned).to_vec() };
        compare("1,8,1,1,8,full,f32".into(), &[peer], 3, 5, ours)
    }

    #[test]
    fn ratios_are_their_time_over_ours_round_by_round() {
        let comparison =
            against(r#"echo warm; echo "{\"first_ms\":1,\"times_ms\":[6,5,$2],\"max_abs_error\":0}""#)
                .unwrap();
        let [mine, theirs] = &comparison.programs[..] else { panic!("two programs: {comparison:?}") };
        assert_eq!((mine.name.as_str(), &mine.ratios[..]), ("kyklos", &[1.0; 3][..]));
        assert_eq!(theirs.medians_ms, [5.0; 3]);
        assert_eq!(theirs.ratios, [5.0 / 3.0; 3]);
        assert_eq!(
            (mine.device_ratios.len(), theirs.device_ratios.len()),
            (3, 0),
            "the peer has no clock of the device"
        );
        assert!(text(&[comparison]).contains("1.67"));
        let clocked =
            against(r#"echo "{\"first_ms\":1,\"times_ms\":[6],\"device_ms\":[3],\"max_abs_error\":0}""#)
                .unwrap();
        assert_eq!(clocked.programs[1].device_ratios, [1.5; 3]);
    }

    #[test]
    fn a_peer_that_cannot_do_a_case_is_left_out_and_one_that_is_wrong_ends_the_run() {
        let refused = against("echo no bf16 >&2; exit 1").unwrap();
        assert_eq!(refused.left_out, [("peer".to_owned(), "no bf16".to_owned())]);
        assert_eq!(refused.programs.len(), 1);
        for silent in ["true", "echo '{}'", r#"echo '{"first_ms":1,"times_ms":[],"max_abs_error":0}'"#] {
            let why = &against(silent).unwrap().left_out[0].1;
            assert!(why.starts_with("wrote no times"), "{why}");
        }
        let wrong = against(r#"echo '{"first_ms":1,"times_ms":[1],"max_abs_error":0.5}'"#).unwrap_err().text;
        assert!(wrong.contains("peer is wrong"), "{wrong}");
    }

    #[test]
    fn peers_are_a_name_and_a_command() {
        let peer: Peer = "ort=python3 peer.py ort".parse().unwrap();
        assert_eq!((peer.name.as_str(), peer.command.len()), ("ort", 3));
        for wrong in ["ort", "=x", "ort=", "kyklos=x", "ort= "] {
            assert!(wrong.parse::<Peer>().is_err(), "{wrong}");
        }
    }
}
