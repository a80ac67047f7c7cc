//! The model, alone and on processes. It needs the weights: run `fetch-model.sh` first.

#![expect(clippy::unwrap_used, reason = "a test fails by a panic")]

mod model;
mod processes;

use sentence_encoder::model::{Encoder, ModelFolder};
use sentence_encoder::texts::Packed;
use serde::Deserialize;

/// Largest difference between numbers of embeddings of length 1 that rounding to f32 explains.
pub(crate) const ROUNDING: f32 = 2e-6;

pub(crate) fn texts() -> Vec<String> {
    include_str!("../../texts.txt").lines().map(str::to_owned).collect()
}

pub(crate) fn packed() -> Packed {
    Packed::new(&ModelFolder::fetched(), &texts()).unwrap()
}

pub(crate) fn encoder() -> Encoder {
    Encoder::read(&ModelFolder::fetched()).unwrap_or_else(|error| panic!("{error}"))
}

/// Embeddings of the texts by transformers in f64, made by `make_reference.py`.
#[derive(Debug, Deserialize)]
pub(crate) struct Reference {
    /// The first numbers of each.
    pub(crate) first_numbers: Vec<Vec<f32>>,
    /// Of each with each.
    pub(crate) cosines: Vec<Vec<f32>>,
}

pub(crate) fn reference() -> Reference {
    serde_json::from_str(include_str!("reference.json")).unwrap()
}
