//! Key padding: the first keys of a batch entry are valid, the others are hidden.

use super::kind::{MaskKind, Term, list};
use crate::error::{Error, Result};

/// Numbers of valid keys.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, serde::Serialize)]
pub(super) struct KeyPadding {
    /// Keys at or above this number are hidden; an empty list hides no key. One value for all batch
    /// entries, or one for each.
    pub(super) valid: Vec<u32>,
}

impl MaskKind for KeyPadding {
    const NOTATION: &'static [&'static str] = &["valid:N[,N…]"];

    fn parse(term: &Term<'_>) -> Result<Option<Self>> {
        match term.name {
            "valid" => Ok(Some(Self { valid: term.positions()? })),
            _ => Ok(None),
        }
    }

    fn terms(&self) -> Vec<String> {
        if self.valid.is_empty() { Vec::new() } else { vec![format!("valid:{}", list(&self.valid))] }
    }

    fn and(self, other: Self) -> Result<Self> {
        let (mine, theirs) = (self.valid, other.valid);
        let valid = match (&mine[..], &theirs[..]) {
            ([], _) => theirs,
            (_, []) => mine,
            ([one], many) | (many, [one]) => many.iter().map(|n| n.min(one)).copied().collect(),
            (a, b) if a.len() == b.len() => a.iter().zip(b).map(|(a, b)| *a.min(b)).collect(),
            (a, b) => {
                return Err(Error::request(
                    format!("one key padding has {} batch entries, the other {}", a.len(), b.len()),
                    "give one value, or one for each batch entry",
                ));
            }
        };
        Ok(Self { valid })
    }

    fn fits(&self, batch: u32, kv_len: u32) -> Result<()> {
        if self.valid.len() > 1 && self.valid.len() != batch as usize {
            return Err(Error::request(
                format!("key padding has {} values, the batch has {batch} entries", self.valid.len()),
                "give valid:N for all, or one value for each batch entry",
            ));
        }
        match self.valid.iter().find(|n| **n > kv_len) {
            Some(above) => Err(Error::request(
                format!("key padding keeps {above} keys, the problem has {kv_len}"),
                format!("use values from 0 to {kv_len}"),
            )),
            None => Ok(()),
        }
    }

    fn batch_classes(&self) -> usize {
        self.valid.len().max(1)
    }

    fn ends(&self, batch: usize, _q: u32, kv_len: u32) -> (u32, u32) {
        (0, self.valid.get(if self.valid.len() > 1 { batch } else { 0 }).copied().unwrap_or(kv_len))
    }
}
