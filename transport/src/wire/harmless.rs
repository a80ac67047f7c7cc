//! Texts of peers as they may be printed: no character of them controls a terminal or begins a line
//! of a log.

use super::frame::Frame;
use crate::error::AbortCause;
use crate::rank::Vote;

/// The text with its control characters escaped, line ends among them, and those that reorder a
/// line: what a peer or a file says must not control a terminal, nor begin a line of a log.
///
/// ```
/// assert_eq!(kyklos_transport::harmless("gone\n[1] rank 0 died"), r"gone\n[1] rank 0 died");
/// ```
pub fn harmless(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() || REORDERING.contains(&c) {
            out.extend(c.escape_default());
        } else {
            out.push(c);
        }
    }
    out
}

impl Frame {
    /// The frame of a peer, with every text in it harmless.
    pub(crate) fn with_harmless_texts(mut self) -> Self {
        let text = match &mut self {
            Self::Reject { text, .. }
            | Self::LinkLost { text, .. }
            | Self::Refuse { text, .. }
            | Self::NoSharedMemory { text } => Some(text),
            Self::Vote { vote: Vote::Refuse { text, .. } } => Some(text),
            Self::Verdict { refusal, .. } => refusal.as_mut().map(|(.., text)| text),
            Self::Abort { abort } => {
                let (AbortCause::Died(text) | AbortCause::Failed(text) | AbortCause::Stuck(text)) =
                    &mut abort.cause;
                Some(text)
            }
            _ => None,
        };
        if let Some(text) = text {
            *text = harmless(text);
        }
        self
    }
}

/// They change the order in which a terminal shows the characters around them (Unicode
/// bidirectional controls), or separate lines.
const REORDERING: [char; 14] = [
    '\u{61c}', '\u{200e}', '\u{200f}', '\u{2028}', '\u{2029}', '\u{202a}', '\u{202b}', '\u{202c}',
    '\u{202d}', '\u{202e}', '\u{2066}', '\u{2067}', '\u{2068}', '\u{2069}',
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped_and_nothing_else() {
        assert_eq!(harmless("a\nb\r\u{1b}[2J\u{9b}é \u{202e}x"), r"a\nb\r\u{1b}[2J\u{9b}é \u{202e}x");
        assert_eq!(harmless("a\u{2028}b\u{200f}\u{61c}"), r"a\u{2028}b\u{200f}\u{61c}");
        let plain = r"rank 1: C:\temp, 字 'é' — ok";
        assert_eq!(harmless(plain), plain);
        assert_eq!(harmless(&harmless("a\n")), r"a\n");
    }
}
