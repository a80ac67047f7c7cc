"""Lumina 2 and Z-Image, with refiners of the picture and of the prompt before one sequence of both; and Krea 2."""

from __future__ import annotations

from .._plan import Known, SplitPlan
from .parts import Input, gathered, rope, tokens

# Lumina 2 and Z-Image cut the refined picture and prompt to their lengths and join them, so the refined picture is gathered. The refiners of
# the prompt have few tokens, which every rank computes.

KNOWN = {
    "Lumina2Transformer2DModel": Known(
        SplitPlan(
            {
                "noise_refiner.0": {"hidden_states": tokens(3)},
                "noise_refiner.*": {"image_rotary_emb": tokens(3)},
                "noise_refiner.-1": gathered(3),
                "layers.0": {"hidden_states": tokens(3)},
                "layers.*": {"attention_mask": tokens(2), "image_rotary_emb": tokens(3)},
                "norm_out": gathered(3),
            },
            attention=("noise_refiner.*.attn", "layers.*.attn"),
        ),
        frozenset({"Lumina2AttnProcessor2_0"}),
    ),
    "ZImageTransformer2DModel": Known(
        SplitPlan(
            {
                "": {"controlnet_block_samples": tokens(3)},
                "noise_refiner.0": {"x": tokens(3)},
                "noise_refiner.*": {"attn_mask": tokens(2), "freqs_cis": tokens(3), "noise_mask": tokens(2)},
                "noise_refiner.-1": gathered(3),
                "layers.0": {"x": tokens(3)},
                "layers.*": {"attn_mask": tokens(2), "freqs_cis": tokens(3), "noise_mask": tokens(2)},
                "all_final_layer.*": {"noise_mask": tokens(2)},
                "all_final_layer.*.linear": gathered(3),
            },
            attention=("noise_refiner.*.attention", "layers.*.attention"),
        ),
        frozenset({"ZSingleStreamAttnProcessor"}),
    ),
    # Prompt and picture are one sequence, in their order: after the last block the transformer takes the picture from the whole of it.
    "Krea2Transformer2DModel": Known(
        SplitPlan(
            {
                "rotary_emb": rope(2, 0),
                "transformer_blocks.0": {"hidden_states": tokens(3)},
                "transformer_blocks.*": {"attention_mask": Input(split_dim=3, expected_dims=4)},
                "transformer_blocks.-1": gathered(),
            },
            attention=("transformer_blocks.*.attn",),
        ),
        frozenset({"Krea2AttnProcessor"}),
    ),
}
