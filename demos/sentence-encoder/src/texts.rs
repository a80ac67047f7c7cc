//! Texts as tokens: all of them in one row, one behind the other, without padding.

use tokenizers::Tokenizer;

use crate::model::ModelFolder;
use crate::{Error, Result};

/// The tokens of several texts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packed {
    /// Numbers of the tokens.
    pub ids: Vec<u32>,
    /// By token, its position in its own text.
    pub positions: Vec<u32>,
    /// Ends of the texts in the row, after a 0: text `i` has the tokens `boundaries[i]..boundaries[i + 1]`.
    pub boundaries: Vec<u32>,
}

impl Packed {
    /// The tokens of `texts`.
    ///
    /// # Errors
    /// [`Error::Request`] for a text that is longer than the model can take, [`Error::NoModel`], [`Error::Model`].
    pub fn new(folder: &ModelFolder, texts: &[String]) -> Result<Self> {
        let most = folder.config()?.max_position_embeddings;
        let wrong = |error: tokenizers::Error| Error::Model {
            file: folder.0.join("tokenizer.json"),
            fault: error.to_string(),
        };
        let mut tokenizer = Tokenizer::from_bytes(folder.tokenizer()?).map_err(wrong)?;
        // The model's file cuts texts at 128 tokens and pads them to as many.
        tokenizer.with_padding(None).with_truncation(None).map_err(wrong)?;
        let mut packed = Self { ids: Vec::new(), positions: Vec::new(), boundaries: vec![0] };
        for (number, text) in (1..).zip(texts) {
            let tokens = tokenizer.encode(text.as_str(), true).map_err(wrong)?;
            let ids = tokens.get_ids();
            if ids.len() > most {
                let start: String = text.chars().take(30).collect();
                return Err(Error::request(format!(
                    "text {number} (\"{start}…\") has {} tokens, the model takes {most} of a text: divide the text",
                    ids.len()
                )));
            }
            packed.positions.extend((0..).take(ids.len()));
            packed.ids.extend(ids);
            packed.boundaries.push(u32::try_from(packed.ids.len()).map_err(|_| too_many())?);
        }
        Ok(packed)
    }

    /// Number of texts.
    pub fn texts(&self) -> usize {
        self.boundaries.len() - 1
    }

    /// Tells these tokens apart from others.
    pub fn fingerprint(&self) -> String {
        let bytes: Vec<u8> = self.ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        blake3::hash(&bytes).to_hex()[..16].to_owned()
    }

    /// Number of tokens of all texts.
    pub fn tokens(&self) -> u32 {
        self.boundaries.last().copied().unwrap_or_default()
    }
}

fn too_many() -> Error {
    Error::request("more than 4294967295 tokens: give fewer texts")
}
