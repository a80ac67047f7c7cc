"""Bria Fibo: prompt and picture in one sequence, and each block has a layer of the text encoder."""

from __future__ import annotations

from .._plan import Joined, Known, SplitPlan
from .parts import OUT, Input, tokens

# [tokens, axes], or the same for each batch entry.
_POSITIONS = Input(split_dim=-2, expected_dims=None, split_output=False)

KNOWN = {
    "BriaFiboTransformer2DModel": Known(
        SplitPlan(
            {
                "": {
                    "hidden_states": tokens(3),
                    "encoder_hidden_states": tokens(3),
                    "text_encoder_layers": tokens(3),
                    "img_ids": _POSITIONS,
                    "txt_ids": _POSITIONS,
                    "joint_attention_kwargs": {"attention_mask": Joined(-1, ("encoder_hidden_states", "hidden_states"))},
                },
                **OUT,
            },
            attention=("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
        ),
        frozenset({"BriaFiboAttnProcessor", "BriaAttnProcessor"}),
    ),
}
