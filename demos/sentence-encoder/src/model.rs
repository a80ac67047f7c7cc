//! MiniLM, a BERT encoder: everything but attention. All of it works on single tokens, so a rank computes it for its own.

use std::fs;
use std::path::{Path, PathBuf};

use candle_core::{D, DType, Device, Tensor};
use candle_nn::{Embedding, LayerNorm, Linear, Module, VarBuilder, embedding, layer_norm, linear};
use serde::Deserialize;

use crate::{Error, Result};

/// Files of a model's folder.
const CONFIG: &str = "config.json";
const WEIGHTS: &str = "model.safetensors";
const TOKENIZER: &str = "tokenizer.json";

/// A folder with a model, as `fetch-model.sh` makes it.
#[derive(Clone, Debug)]
pub struct ModelFolder(pub PathBuf);

impl ModelFolder {
    /// The folder into which `fetch-model.sh` brings the model.
    pub fn fetched() -> Self {
        Self(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/models/all-minilm-l6-v2"))
    }

    /// The bytes of the tokenizer's description.
    ///
    /// # Errors
    /// [`Error::NoModel`], [`Error::System`].
    pub fn tokenizer(&self) -> Result<Vec<u8>> {
        self.read(TOKENIZER)
    }

    /// The model's sizes.
    ///
    /// # Errors
    /// As [`Self::tokenizer`]; [`Error::Model`] for another kind of model.
    pub fn config(&self) -> Result<Config> {
        let fault = |fault: String| Error::Model { file: self.0.join(CONFIG), fault };
        let config: Config =
            serde_json::from_slice(&self.read(CONFIG)?).map_err(|error| fault(error.to_string()))?;
        let Config {
            model_type,
            hidden_act,
            position_embedding_type,
            hidden_size,
            num_attention_heads: heads,
            ..
        } = &config;
        if (model_type.as_str(), hidden_act.as_str(), position_embedding_type.as_str())
            != ("bert", "gelu", "absolute")
        {
            return Err(fault(format!(
                "a {model_type} with {hidden_act} and {position_embedding_type} positions: use a bert with gelu and absolute ones"
            )));
        }
        if *heads == 0 || !hidden_size.is_multiple_of(*heads) {
            return Err(fault(format!(
                "{hidden_size} numbers for each token in {heads} heads: use a divisor"
            )));
        }
        Ok(config)
    }

    fn read(&self, file: &'static str) -> Result<Vec<u8>> {
        fs::read(self.0.join(file)).map_err(|source| match source.kind() {
            std::io::ErrorKind::NotFound => Error::NoModel { file, folder: self.0.clone() },
            _ => Error::system(self.0.join(file).display().to_string())(source),
        })
    }
}

/// Sizes of the model, by their names in `config.json`.
#[derive(Clone, Debug, Deserialize)]
pub struct Config {
    model_type: String,
    hidden_act: String,
    #[serde(default = "absolute")]
    position_embedding_type: String,
    vocab_size: usize,
    type_vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    layer_norm_eps: f64,
    /// The most tokens of one text.
    pub max_position_embeddings: usize,
}

fn absolute() -> String {
    "absolute".into()
}

/// The model with its weights in f32, on this process's cores.
#[derive(Debug)]
pub struct Encoder {
    words: Embedding,
    positions: Embedding,
    /// `[1, hidden]`: all tokens are of type 0.
    token_type: Tensor,
    norm: LayerNorm,
    layers: Vec<Layer>,
    /// Attention heads.
    pub heads: usize,
    /// Numbers of a head.
    pub head_dim: usize,
    /// Tells the weights apart from others.
    pub fingerprint: String,
}

#[derive(Debug)]
struct Layer {
    queries: Linear,
    keys: Linear,
    values: Linear,
    attended: Linear,
    attended_norm: LayerNorm,
    wide: Linear,
    narrow: Linear,
    norm: LayerNorm,
}

impl Encoder {
    /// Reads the model.
    ///
    /// # Errors
    /// [`Error::NoModel`], [`Error::Model`], [`Error::System`]; [`Error::Candle`] for weights that do not fit the sizes.
    pub fn read(folder: &ModelFolder) -> Result<Self> {
        let config = folder.config()?;
        let weights = folder.read(WEIGHTS)?;
        let fingerprint = blake3::hash(&weights).to_hex()[..16].to_owned();
        let all = VarBuilder::from_buffered_safetensors(weights, DType::F32, &Device::Cpu)?;
        let (hidden, epsilon) = (config.hidden_size, config.layer_norm_eps);
        let of_tokens = all.pp("embeddings");
        let types = embedding(config.type_vocab_size, hidden, of_tokens.pp("token_type_embeddings"))?;
        let layers = (0..config.num_hidden_layers)
            .map(|index| Layer::read(&config, &all.pp(format!("encoder.layer.{index}"))))
            .collect::<Result<_>>()?;
        Ok(Self {
            words: embedding(config.vocab_size, hidden, of_tokens.pp("word_embeddings"))?,
            positions: embedding(
                config.max_position_embeddings,
                hidden,
                of_tokens.pp("position_embeddings"),
            )?,
            token_type: types.embeddings().narrow(0, 0, 1)?,
            norm: layer_norm(hidden, epsilon, of_tokens.pp("LayerNorm"))?,
            layers,
            heads: config.num_attention_heads,
            head_dim: hidden / config.num_attention_heads,
            fingerprint,
        })
    }

    /// Number of layers, each of which attends once.
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// The last hidden state `[tokens, hidden]` of these tokens. `attend` gets the queries, keys and values of each layer,
    /// `[tokens, heads, head_dim]`, and returns what the queries see, of the same shape.
    ///
    /// # Errors
    /// Those of `attend`; [`Error::Candle`].
    pub fn run(
        &self,
        ids: &[u32],
        positions: &[u32],
        mut attend: impl FnMut([Tensor; 3]) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let lookup = |table: &Embedding, numbers: &[u32]| table.forward(&Tensor::new(numbers, &Device::Cpu)?);
        let sum = (lookup(&self.words, ids)? + lookup(&self.positions, positions)?)?;
        let mut hidden = self.norm.forward(&sum.broadcast_add(&self.token_type)?)?;
        for layer in &self.layers {
            let attended = attend(layer.project(&hidden, [ids.len(), self.heads, self.head_dim])?)?;
            hidden = layer.finish(&hidden, &attended.flatten_from(1)?)?;
        }
        Ok(hidden)
    }
}

impl Layer {
    fn read(config: &Config, all: &VarBuilder<'_>) -> Result<Self> {
        let (hidden, wide, epsilon) = (config.hidden_size, config.intermediate_size, config.layer_norm_eps);
        let attention = all.pp("attention");
        Ok(Self {
            queries: linear(hidden, hidden, attention.pp("self.query"))?,
            keys: linear(hidden, hidden, attention.pp("self.key"))?,
            values: linear(hidden, hidden, attention.pp("self.value"))?,
            attended: linear(hidden, hidden, attention.pp("output.dense"))?,
            attended_norm: layer_norm(hidden, epsilon, attention.pp("output.LayerNorm"))?,
            wide: linear(hidden, wide, all.pp("intermediate.dense"))?,
            narrow: linear(wide, hidden, all.pp("output.dense"))?,
            norm: layer_norm(hidden, epsilon, all.pp("output.LayerNorm"))?,
        })
    }

    fn project(&self, hidden: &Tensor, shape: [usize; 3]) -> Result<[Tensor; 3]> {
        let project = |linear: &Linear| linear.forward(hidden)?.reshape(&shape);
        Ok([project(&self.queries)?, project(&self.keys)?, project(&self.values)?])
    }

    fn finish(&self, hidden: &Tensor, attended: &Tensor) -> Result<Tensor> {
        let hidden = self.attended_norm.forward(&(self.attended.forward(attended)? + hidden)?)?;
        let wide = self.wide.forward(&hidden)?.gelu_erf()?;
        Ok(self.norm.forward(&(self.narrow.forward(&wide)? + hidden)?)?)
    }
}

/// The direction of each row of `[texts, hidden]`, as vectors of length 1.
///
/// # Errors
/// [`Error::Candle`].
pub fn directions(rows: &Tensor) -> Result<Vec<Vec<f32>>> {
    let length = rows.sqr()?.sum_keepdim(D::Minus1)?.sqrt()?;
    Ok(rows.broadcast_div(&length)?.to_vec2()?)
}
