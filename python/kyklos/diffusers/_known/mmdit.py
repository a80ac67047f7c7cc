"""Prompt and picture in two streams with joint attention: SD 3, AuraFlow, QwenImage, GLM-Image, JoyImage."""

from __future__ import annotations

from .._plan import Joined, Known, SplitPlan
from .parts import BOTH, OUT, cos_sin, embedded, rope, tokens

KNOWN = {
    "SD3Transformer2DModel": Known(
        SplitPlan(
            {
                "": {"encoder_hidden_states": tokens(3), "block_controlnet_hidden_states": tokens(3)},
                "pos_embed": embedded(),
                **OUT,
            },
            attention=("transformer_blocks.*",),
        ),
        frozenset({"JointAttnProcessor2_0", "FusedJointAttnProcessor2_0"}),
        {"skip_layers": "each attention module is to make one call, and those of skipped layers make none"},
    ),
    # Register tokens come before those of the prompt, in front of the first block.
    "AuraFlowTransformer2DModel": Known(
        SplitPlan(
            {"joint_transformer_blocks.0": BOTH, **OUT},
            attention=("joint_transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
        ),
        frozenset({"AuraFlowAttnProcessor2_0", "FusedAuraFlowAttnProcessor2_0"}),
    ),
    "QwenImageTransformer2DModel": Known(
        SplitPlan(
            {
                "": {"controlnet_block_samples": tokens(3)},
                "transformer_blocks.0": {"hidden_states": tokens(3), "encoder_hidden_states": tokens(3)},
                "transformer_blocks.*": {"modulate_index": tokens(2), "encoder_hidden_states_mask": tokens(2)},
                "pos_embed": rope(2, 0),
                **OUT,
            },
            attention=("transformer_blocks.*.attn",),
        ),
        frozenset({"QwenDoubleStreamAttnProcessor2_0"}),
    ),
    # Its cache has the keys that this rank had in the forward that wrote it.
    "GlmImageTransformer2DModel": Known(
        SplitPlan(
            {"transformer_blocks.0": BOTH, "transformer_blocks.*": {"image_rotary_emb": cos_sin(2, 0)}, **OUT},
            attention=("transformer_blocks.*.attn1",),
        ),
        frozenset({"GlmImageAttnProcessor"}),
        {"attention_mask": "its attention turns it into rows of queries by the keys of one rank"},
    ),
    "JoyImageEditTransformer3DModel": Known(
        SplitPlan(
            {"double_blocks.0": BOTH, "double_blocks.*": {"image_rotary_emb": (cos_sin(2, 0), cos_sin(2, 0))}, **OUT},
            attention=("double_blocks.*.attn",),
        ),
        frozenset({"JoyImageAttnProcessor"}),
    ),
    "JoyImageEditPlusTransformer3DModel": Known(
        SplitPlan(
            {
                "double_blocks.0": BOTH,
                "double_blocks.*": {
                    "image_rotary_emb": cos_sin(3, 1),
                    "attention_mask": Joined(-1, ("hidden_states", "encoder_hidden_states")),
                },
                **OUT,
            },
            attention=("double_blocks.*.attn",),
        ),
        frozenset({"JoyImageEditPlusAttnProcessor"}),
    ),
}
