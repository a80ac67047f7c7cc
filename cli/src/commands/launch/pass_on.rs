//! Passes on what the processes of a launcher write.

use std::io::{BufRead, BufReader, Read, Write};

use kyklos_transport::harmless;

use crate::activity;
use crate::interrupt::LAST_LINE;

/// Copies lines until the other side closes. Keeps reading when writing fails, so that the process
/// does not block. Returns whether there was [`LAST_LINE`], which is not copied.
pub(super) fn pass_on(
    rank: u32,
    from: impl Read,
    mut to: impl Write,
    prefix: impl Fn(&[u8]) -> String,
) -> bool {
    let mut from = BufReader::new(from);
    let mut line = Vec::new();
    let mut last = false;
    loop {
        line.clear();
        match from.read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return last,
            Ok(_) => {
                // A line of a driver may have no end.
                if line.ends_with(LAST_LINE) {
                    last = true;
                    line.truncate(line.len() - LAST_LINE.len());
                }
                if let Some(at) = place_of(activity::LINE, &line) {
                    let does = &line[at + activity::LINE.len()..];
                    activity::process_says(rank, &harmless(String::from_utf8_lossy(does).trim_end()));
                    line.truncate(at);
                    if !line.is_empty() {
                        // The line of the terminal comes after it.
                        line.push(b'\n');
                    }
                }
                if line.is_empty() {
                    continue;
                }
                let mut whole = prefix(&line).into_bytes();
                whole.extend_from_slice(&line);
                // One call, so that lines of several ranks do not mix.
                let _ = activity::aside(|| to.write_all(&whole).and_then(|()| to.flush()));
            }
        }
    }
}

fn place_of(part: &[u8], line: &[u8]) -> Option<usize> {
    line.windows(part.len()).position(|bytes| bytes == part)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn passed_on(text: &str) -> (bool, String) {
        let mut to = Vec::new();
        let last = pass_on(3, text.as_bytes(), &mut to, |_| "[3] ".to_owned());
        (last, String::from_utf8(to).unwrap())
    }

    #[test]
    fn lines_are_passed_on_and_those_for_the_launcher_are_not() {
        let text = "one\n\0does y, 1 s\ntwo\n\0does \n\0ends\n";
        assert_eq!(passed_on(text), (true, "[3] one\n[3] two\n".to_owned()));
        assert_eq!(passed_on("one"), (false, "[3] one".to_owned()));
    }

    #[test]
    fn a_driver_may_end_no_line_before_those_for_the_launcher() {
        assert_eq!(passed_on("x\0does y\nz\n"), (false, "[3] x\n[3] z\n".to_owned()));
        assert_eq!(passed_on("x\0ends\n"), (true, "[3] x".to_owned()));
        assert_eq!(passed_on("x\0does y\n\0ends\n"), (true, "[3] x\n".to_owned()));
    }
}
