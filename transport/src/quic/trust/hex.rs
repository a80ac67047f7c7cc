//! Bytes as hexadecimal digits: one spelling, in small letters.

use std::fmt::{self, Write};

/// Two digits a byte.
pub(crate) fn write(out: &mut impl Write, bytes: &[u8]) -> fmt::Result {
    bytes.iter().try_for_each(|byte| write!(out, "{byte:02x}"))
}

/// Exactly so many bytes, in the spelling of [`write()`].
pub(crate) fn read<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digits: Option<Vec<u8>> = text.bytes().map(digit).collect();
    let bytes: Vec<u8> =
        digits?.chunks(2).filter_map(|pair| Some(pair.first()? << 4 | pair.get(1)?)).collect();
    bytes.try_into().ok().filter(|_| text.len() == 2 * N)
}

fn digit(byte: u8) -> Option<u8> {
    match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    }
}
