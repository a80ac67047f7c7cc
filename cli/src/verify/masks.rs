//! Masks for the oracle, parsed from the text of the command line.

use kyklos_oracle::oracle::{OracleMask, OracleSlice, OracleTerm};

use crate::failure::{Failure, Result};

/// The mask for the oracle. Parsed from the text, not converted from the library's form, so that both parsers are tested.
pub(super) fn oracle_mask(text: &str) -> Result<OracleMask> {
    let unreadable = || Failure::run(format!("mask `{text}` cannot be read for the oracle"));
    let mut mask = OracleMask::full();
    for term in text.split('+') {
        let (kind, arguments) = term.split_once(':').unwrap_or((term, ""));
        let numbers = || -> Result<Vec<i64>> {
            arguments.split(',').map(|number| number.parse().map_err(|_| unreadable())).collect()
        };
        let unsigned = || -> Result<Vec<u64>> {
            numbers()?.into_iter().map(|number| u64::try_from(number).map_err(|_| unreadable())).collect()
        };
        mask = match kind {
            "full" => mask,
            "causal" => mask.and(OracleTerm::Causal),
            "window" => match numbers()?[..] {
                [left, right] => mask.and(OracleTerm::Window { left, right }),
                _ => return Err(unreadable()),
            },
            "documents" => mask.and(OracleTerm::Documents(unsigned()?)),
            "valid" => mask.and(OracleTerm::Valid(unsigned()?)),
            "slices" => {
                let slices = arguments.split(',').map(|slice| oracle_slice(slice).ok_or_else(unreadable));
                mask.and(OracleTerm::Slices(slices.collect::<Result<_>>()?))
            }
            _ => return Err(unreadable()),
        };
    }
    Ok(mask)
}

fn oracle_slice(text: &str) -> Option<OracleSlice> {
    let (area, part) = text.split_once('/').unwrap_or((text, "full"));
    let (q, k) = area.split_once('x')?;
    let range = |text: &str| {
        let (begin, end) = text.split_once("..")?;
        Some(begin.parse().ok()?..end.parse().ok()?)
    };
    let (causal, inverse) = match part {
        "full" => (false, false),
        "causal" => (true, false),
        "inverse" => (false, true),
        "both" => (true, true),
        _ => return None,
    };
    Some(OracleSlice { q: range(q)?, k: range(k)?, causal, inverse })
}
