"""Kandinsky 5: the prompt has blocks of its own, and stays whole in cross-attention."""

from __future__ import annotations

from .._plan import Known, SplitPlan
from .parts import gathered, tokens

KNOWN = {
    "Kandinsky5Transformer3DModel": Known(
        SplitPlan(
            {
                "visual_transformer_blocks.0": {"visual_embed": tokens(3)},
                # Rotations, [batch, tokens, 1, pairs, 2, 2].
                "visual_transformer_blocks.*": {"rope": tokens(6)},
                # The output layer wants frames, rows and columns.
                "visual_transformer_blocks.-1": gathered(3),
            },
            attention=("visual_transformer_blocks.*.self_attention",),
        ),
        frozenset({"Kandinsky5AttnProcessor"}),
        {"sparse_params": "its block mask is made of the tokens of one rank"},
    ),
}
