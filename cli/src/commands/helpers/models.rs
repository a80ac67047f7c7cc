//! Models whose attention is long enough to share, with the numbers that a forecast needs.
//! `docs/helpers.md` says where they are from.

/// The transformer of a model at one size.
#[derive(Clone, Copy, Debug)]
pub(super) struct Model {
    pub(super) name: &'static str,
    pub(super) size: &'static str,
    /// Of one attention call: of the picture or video, and of the text beside them.
    pub(super) tokens: u32,
    pub(super) layers: u32,
    pub(super) heads: u32,
    /// Floating point operations of one layer for each token, beside the attention over all tokens.
    other_flops: u64,
}

impl Model {
    /// Attention's part of the operations of a step.
    #[expect(clippy::cast_precision_loss, reason = "shares of a step")]
    pub(super) fn attention_part(&self) -> f64 {
        let attention = 4.0 * f64::from(self.tokens) * f64::from(self.heads * HEAD_DIM);
        attention / (attention + self.other_flops as f64)
    }
}

/// Elements of a head; the same for all of them.
pub(super) const HEAD_DIM: u32 = 128;

/// Products with weights: 2 operations for each weight and token.
const fn weights(count: u64) -> u64 {
    2 * count
}

/// Wan: attention, cross-attention over 512 tokens of text, two products of the MLP.
const fn wan(dim: u64, ffn: u64) -> u64 {
    weights(6 * dim * dim + 2 * dim * ffn) + 4 * 512 * dim
}

/// Layers like those of Flux: four products of the attention, and an MLP of four times the width.
const fn like_flux(dim: u64) -> u64 {
    weights(12 * dim * dim)
}

/// MiniMax H3: heads that are wider than the layer together, and an MLP with a gate.
const fn h3(dim: u64, inner: u64, ffn: u64) -> u64 {
    weights(4 * dim * inner + 3 * dim * ffn)
}

const fn model(
    [name, size]: [&'static str; 2],
    tokens: u32,
    [layers, heads]: [u32; 2],
    other_flops: u64,
) -> Model {
    Model { name, size, tokens, layers, heads, other_flops }
}

pub(super) const MODELS: [Model; 12] = [
    model(["Wan 2.x 14B", "720p, 81 frames"], 21 * 45 * 80, [40, 40], wan(5120, 13_824)),
    model(["Wan 2.x 14B", "480p, 81 frames"], 21 * 30 * 52, [40, 40], wan(5120, 13_824)),
    model(["Wan 2.1 1.3B", "480p, 81 frames"], 21 * 30 * 52, [30, 12], wan(1536, 8960)),
    model(["MiniMax H3", "1080p, 124 frames"], 37 * 34 * 60 + 512, [50, 56], h3(5376, 7168, 14_336)),
    model(["MiniMax H3", "720p, 124 frames"], 37 * 22 * 40 + 512, [50, 56], h3(5376, 7168, 14_336)),
    model(["HunyuanVideo 1.5", "720p, 121 frames"], 31 * 45 * 80 + 256, [54, 16], like_flux(2048)),
    model(["HunyuanVideo 1.5", "480p, 121 frames"], 31 * 30 * 53 + 256, [54, 16], like_flux(2048)),
    model(["Qwen-Image", "2048 x 2048"], 128 * 128 + 256, [60, 24], like_flux(3072)),
    model(["Qwen-Image", "1328 x 1328"], 83 * 83 + 256, [60, 24], like_flux(3072)),
    model(["Qwen-Image", "1024 x 1024"], 64 * 64 + 256, [60, 24], like_flux(3072)),
    model(["Flux.1", "2048 x 2048"], 128 * 128 + 512, [57, 24], like_flux(3072)),
    model(["Flux.1", "1024 x 1024"], 64 * 64 + 512, [57, 24], like_flux(3072)),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_videos_are_mostly_attention_and_small_pictures_are_not() {
        let part = |name: &str, size: &str| {
            let model = MODELS.iter().find(|model| (model.name, model.size) == (name, size)).unwrap();
            (model.attention_part() * 100.0).round()
        };
        assert_eq!(part("Wan 2.x 14B", "720p, 81 frames"), 72.0);
        assert_eq!(part("Wan 2.x 14B", "480p, 81 frames"), 52.0);
        assert_eq!(part("Flux.1", "2048 x 2048"), 48.0);
        assert_eq!(part("Flux.1", "1024 x 1024"), 20.0);
    }
}
