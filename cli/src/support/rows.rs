//! The rows of the table: small problems as options of `attend`, one for each feature.
//!
//! Sizes are not multiples of any tile, mask edges lie inside tiles, and heads do not divide evenly
//! over a mesh.

use std::collections::HashMap;
use std::path::Path;

use half::{bf16, f16};
use kyklos::Dtype;
use kyklos_oracle::inputs::{TensorId, fill, normal};
use kyklos_oracle::oracle::Element;
use safetensors::tensor::TensorView;

/// What of a combination is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pass {
    /// Attention.
    Forward,
    /// Attention, and then the gradients, which are compared.
    Backward,
}

impl Pass {
    pub(super) const ALL: [Self; 2] = [Self::Forward, Self::Backward];
}

/// One row. To add one, add a line to [`ROWS`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Row {
    pub(super) name: &'static str,
    tensors: Tensors,
    share: Share,
    /// Further options of `attend`.
    options: &'static str,
}

/// The source of the tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Tensors {
    /// `--shape`.
    Random([u32; 5]),
    /// `--input`: tensors that no option generates. Queries and keys have [`HEADS`].
    File { q_len: usize, kv_len: usize, bias: Option<BiasInput> },
}

/// `mask` or `bias`, for all batch entries, and its extents: one head or one for each query head,
/// and a row for each query or one for all.
type BiasInput = (&'static str, [usize; 2]);

/// How four ranks share the tokens. One rank alone gets all tokens.
#[derive(Clone, Copy, Debug)]
enum Share {
    Even,
    /// `--split`: weights, after a word.
    Split(&'static str, [u32; 4]),
    Tokens([u32; 4]),
    /// Counts of queries, and counts of keys.
    EachSide([u32; 4], [u32; 4]),
}

/// Query heads, KV heads, elements: over four ranks 2, 2, 1 and 1 query heads, in groups of 3.
const HEADS: [usize; 3] = [6, 2, 16];
const SHAPE: Tensors = Tensors::Random([1, 260, 6, 2, 16]);
const TWO: Tensors = Tensors::Random([2, 130, 6, 2, 16]);

const fn row(name: &'static str, tensors: Tensors, options: &'static str) -> Row {
    Row { name, tensors, share: Share::Even, options }
}

/// All rows.
pub(super) const ROWS: &[Row] = &[
    row("full", SHAPE, "--mask full"),
    row("causal", SHAPE, "--mask causal"),
    row("window", SHAPE, "--mask window:70,9"),
    row("key padding", TWO, "--mask valid:130,51"),
    row("documents", SHAPE, "--mask documents:0,31,130,131,260"),
    row("slices", SHAPE, "--mask slices:0..260x0..9,0..150x40..177,150..260x120..251/causal"),
    row("intersection", TWO, "--mask causal+window:60,-1+documents:0,64,130+valid:130,100"),
    row(
        "a mask for each batch entry",
        TWO,
        "--mask causal+documents:0,31,130//slices:0..130x0..9,0..75x20..88,75..130x60..125/causal",
    ),
    row("boolean tensor", file(260, 260, Some(("mask", [1, 260]))), ""),
    row("boolean tensor for each head", file(260, 260, Some(("mask", [6, 260]))), "--mask causal"),
    row("bias", file(260, 260, Some(("bias", [1, 260]))), ""),
    row("bias for each head", file(260, 260, Some(("bias", [6, 260]))), "--mask causal"),
    row("key mask of any pattern", file(260, 260, Some(("mask", [1, 1]))), "--mask causal"),
    row("bias over keys for each head", file(260, 260, Some(("bias", [6, 1]))), ""),
    row("softcap, scale", SHAPE, "--mask causal --softcap 1.5 --scale 0.7"),
    row("sinks", SHAPE, "--mask causal --sinks"),
    row("as many kv heads", Tensors::Random([1, 260, 4, 4, 16]), "--mask causal"),
    row("one kv head", Tensors::Random([1, 260, 6, 1, 16]), "--mask causal"),
    row("shards of several tiles", Tensors::Random([1, 530, 4, 2, 8]), "--mask causal"),
    row("q offset", SHAPE, "--mask causal --q-offset 90"),
    row("cross-attention", file(70, 260, None), "--mask full"),
    row("chunk after a cache", file(70, 260, None), "--mask causal --q-offset 190"),
    row("decoding", file(2, 260, None), "--mask causal --q-offset 258"),
    Row { share: Share::Split("", [3, 0, 1, 2]), ..row("weights, an empty rank", SHAPE, "--mask causal") },
    Row { share: Share::Split("work:", [2, 1, 1, 3]), ..row("shares of work", SHAPE, "--mask causal") },
    Row {
        share: Share::Tokens([120, 0, 139, 1]),
        ..row("token counts, an empty rank", SHAPE, "--mask causal")
    },
    Row {
        share: Share::EachSide([0, 21, 1, 48], [120, 0, 139, 1]),
        ..row("counts of queries and keys", file(70, 260, None), "--mask causal --q-offset 190")
    },
    Row {
        share: Share::EachSide([0, 200, 19, 41], [130, 0, 30, 60]),
        ..row("queries and keys of unlike owners", SHAPE, "--mask causal --replicated 70..110")
    },
    row("wire f16", SHAPE, "--mask causal --wire f16"),
    row("wire int8", SHAPE, "--mask causal --wire int8"),
    row("replicated keys", SHAPE, "--mask causal --replicated 70..110"),
    row("keys on every rank", file(70, 260, None), "--replicated 0..260"),
    // Tiles of 256 keys, the last of them short.
    Row {
        share: Share::Tokens([256, 0, 256, 18]),
        ..row("fixed order", Tensors::Random([1, 530, 4, 2, 8]), "--mask causal --fixed-order")
    },
];

const fn file(q_len: usize, kv_len: usize, bias: Option<BiasInput>) -> Tensors {
    Tensors::File { q_len, kv_len, bias }
}

impl Row {
    pub(super) fn named(name: &str) -> Self {
        *ROWS.iter().find(|row| row.name == name).unwrap()
    }

    /// Options of `attend` for the problem and the placement, on `ranks` ranks (1 or 4), with input
    /// files in `DIR`.
    pub(super) fn options(&self, kind: (Dtype, Pass), ranks: u32) -> String {
        let tensors = match self.tensors {
            Tensors::Random(shape) => format!("--shape {} --dtype {}", join(&shape), kind.0),
            Tensors::File { .. } => format!("--input DIR/{}", self.file_name(kind)),
        };
        format!("{tensors} {}", self.words(ranks)).trim_end().to_owned()
    }

    /// Those options that name no tensors.
    fn words(&self, ranks: u32) -> String {
        let share = match self.share {
            Share::Even => String::new(),
            Share::Split(word, weights) => format!("--split {word}{}", join(&weights[..ranks as usize])),
            Share::Tokens(tokens) => format!("--tokens {}", counts(&tokens, ranks)),
            Share::EachSide(queries, keys) => {
                format!("--q-tokens {} --kv-tokens {}", counts(&queries, ranks), counts(&keys, ranks))
            }
        };
        format!("{} {share}", self.options).trim().to_owned()
    }

    /// The options of the row, in Markdown.
    pub(super) fn in_words(&self) -> String {
        let tensors = match self.tensors {
            SHAPE => String::new(),
            Tensors::Random(shape) => format!("`--shape {}`", join(&shape)),
            Tensors::File { q_len, kv_len, bias } => {
                let bias = bias
                    .map(|(name, [heads, queries])| format!(", `{name}` [1, {heads}, {queries}, {kv_len}]"));
                format!("a file of {q_len} queries, {kv_len} keys{}", bias.unwrap_or_default())
            }
        };
        let options = self.words(4);
        let options = if options.is_empty() { options } else { format!("`{options}`") };
        [tensors, options].into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(" ")
    }

    /// Whether the options change the result for the same tensors.
    pub(super) fn changes_the_answer(&self) -> bool {
        matches!(self.share, Share::Even)
            && !self.options.contains("--wire")
            && !self.options.contains("--replicated")
    }

    /// Whether both rows have the same q, k and v.
    pub(super) fn same_tensors(&self, other: &Self) -> bool {
        match (self.tensors, other.tensors) {
            (Tensors::Random(mine), Tensors::Random(theirs)) => mine == theirs,
            (Tensors::File { q_len, kv_len, .. }, Tensors::File { q_len: other_q, kv_len: other_kv, .. }) => {
                (q_len, kv_len) == (other_q, other_kv)
            }
            _ => false,
        }
    }

    fn file_name(&self, (dtype, pass): (Dtype, Pass)) -> String {
        let name = self.name.replace(", ", "-").replace(' ', "-");
        let pass = if pass == Pass::Backward { "-backward" } else { "" };
        format!("{name}{pass}-{dtype}.safetensors")
    }

    /// Writes the row's input file, if it needs one. That of a backward pass has the gradient of
    /// the output too.
    pub(super) fn write(&self, (dtype, pass): (Dtype, Pass), folder: &Path) {
        let Tensors::File { q_len, kv_len, bias } = self.tensors else { return };
        let mut tensors = match dtype {
            Dtype::F32 => tensors::<f32>(safetensors::Dtype::F32, q_len, kv_len, bias),
            Dtype::F16 => tensors::<f16>(safetensors::Dtype::F16, q_len, kv_len, bias),
            Dtype::Bf16 => tensors::<bf16>(safetensors::Dtype::BF16, q_len, kv_len, bias),
        };
        if pass == Pass::Forward {
            tensors.remove("do");
        }
        let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
            (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
        });
        let bytes = safetensors::serialize(views, None).unwrap();
        std::fs::write(folder.join(self.file_name((dtype, pass))), bytes).unwrap();
    }
}

/// The tensors of a file, by name.
fn tensors<E: Element + bytemuck::Pod>(
    dtype: safetensors::Dtype,
    q_len: usize,
    kv_len: usize,
    bias: Option<BiasInput>,
) -> HashMap<&'static str, (safetensors::Dtype, Vec<usize>, Vec<u8>)> {
    let [q_heads, kv_heads, dim] = HEADS;
    let normal = |id: TensorId, shape: [usize; 4]| {
        let mut values = vec![E::from_f32(0.0); shape.iter().product()];
        fill(0, id, 0..values.len() as u64, &mut values);
        (dtype, shape.to_vec(), bytemuck::cast_slice(&values).to_vec())
    };
    let kv_shape = [1, kv_len, kv_heads, dim];
    let mut tensors = HashMap::from([
        ("q", normal(TensorId::Q, [1, q_len, q_heads, dim])),
        ("k", normal(TensorId::K, kv_shape)),
        ("v", normal(TensorId::V, kv_shape)),
        ("do", normal(TensorId::OutputGradient, [1, q_len, q_heads, dim])),
    ]);
    if let Some((name, [heads, queries])) = bias {
        // Heads differ where there is one row for all queries.
        let row = |i: usize| if queries == 1 { 40 * (i / kv_len) } else { i / kv_len % queries };
        let terms = (0..heads * queries * kv_len).map(|i| term(row(i), i % kv_len, i as u64));
        let (dtype, bytes) = if name == "mask" {
            (safetensors::Dtype::BOOL, terms.map(|term| u8::from(term.is_some())).collect())
        } else {
            let bias: Vec<E> = terms.map(|term| E::from_f32(term.unwrap_or(f32::NEG_INFINITY))).collect();
            (dtype, bytemuck::cast_slice(&bias).to_vec())
        };
        tensors.insert(name, (dtype, vec![1, heads, queries, kv_len], bytes));
    }
    tensors
}

/// An element of a mask or bias tensor; `None` hides the key. Some single keys are hidden, and
/// whole ranges of keys from ranges of rows, longer than a tile of any kernel.
fn term(row: usize, key: usize, index: u64) -> Option<f32> {
    let made = normal(0, TensorId::Bias, index);
    let stretch = (row / 40 + key / 32) % 3 == 1 || (row < 100 && (96..230).contains(&key));
    (made < 1.0 && !stretch).then_some(made * 1.5)
}

/// Token counts of four ranks, or of one rank that has them all.
fn counts(tokens: &[u32; 4], ranks: u32) -> String {
    if ranks == 1 { tokens.iter().sum::<u32>().to_string() } else { join(tokens) }
}

fn join(numbers: &[u32]) -> String {
    numbers.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}
