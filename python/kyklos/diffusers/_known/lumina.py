"""Prompt and picture in one sequence: Lumina 2, Z-Image and Bria Fibo 2, with refiners before it; Krea 2, OmniGen, ERNIE-Image and Ideogram 4."""

from __future__ import annotations

from diffusers.models._modeling_parallel import ContextParallelOutput as Output

from .._plan import Known, SplitPlan
from .parts import Input, cos_sin, gathered, rope, tokens

# Lumina 2 and Z-Image cut the refined picture and prompt to their lengths and join them, so the refined picture is gathered. The refiners of
# the prompt have few tokens, which every rank computes.

# Of a mask [batch, 1, queries, keys] the rows of this rank, with all keys.
_ROWS = Input(split_dim=2, expected_dims=4)

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
    # The tokens that stand for a prompt are before the picture where all prompts have as many, else behind it.
    "BriaFibo2Transformer2DModel": Known(
        SplitPlan(
            {
                "noise_refiner.0": {"x": tokens(3)},
                "noise_refiner.*": {"freqs_cis": tokens(3), "noise_mask": tokens(2)},
                "noise_refiner.-1": gathered(),
                "layers.0": {"x": tokens(3)},
                "layers.*": {"attn_mask": tokens(2), "freqs_cis": tokens(3), "noise_mask": tokens(2)},
                "layers.-1": gathered(),
            },
            attention=("noise_refiner.*.attention", "layers.*.attention"),
        ),
        frozenset({"BriaFibo2AttnProcessor"}),
    ),
    # Its mask is causal but for pictures.
    "OmniGenTransformer2DModel": Known(
        SplitPlan(
            {
                "layers.0": {"hidden_states": tokens(3)},
                "layers.*": {"attention_mask": _ROWS, "image_rotary_emb": cos_sin(2, 0)},
                "norm": gathered(),
            },
            attention=("layers.*.self_attn",),
        ),
        frozenset({"OmniGenAttnProcessor2_0"}),
    ),
    # Tokens are its first axis.
    "ErnieImageTransformer2DModel": Known(
        SplitPlan(
            {
                "layers.0": {"x": tokens(3, 0)},
                "layers.*": {
                    "rotary_pos_emb": tokens(4),
                    "temb": tokens(3, 0),
                    "attention_mask": Input(split_dim=3, expected_dims=4),
                },
                "final_linear": Output(gather_dim=0, expected_dims=3),
            },
            attention=("layers.*.self_attention",),
        ),
        frozenset({"ErnieImageSingleStreamAttnProcessor"}),
    ),
    # Its mask is of segments.
    "Ideogram4Transformer2DModel": Known(
        SplitPlan(
            {
                "layers.0": {"hidden_states": tokens(3)},
                "layers.*": {"attention_mask": _ROWS, "image_rotary_emb": cos_sin(3, 1), "adaln_input": tokens(3)},
                "final_layer": {"conditioning": tokens(3)},
                "final_layer.linear": gathered(),
            },
            attention=("layers.*.attention",),
            whole=frozenset({"adaln_input", "conditioning"}),
        ),
        frozenset({"Ideogram4AttnProcessor"}),
    ),
}
