"""EasyAnimate: prompt and video in one sequence, positions for the video alone."""

from __future__ import annotations

from .._plan import Known, SplitPlan
from .parts import OUT, rope, tokens

KNOWN = {
    "EasyAnimateTransformer3DModel": Known(
        SplitPlan(
            {
                "transformer_blocks.0": {"hidden_states": tokens(3), "encoder_hidden_states": tokens(3)},
                "rope_embedding": rope(2, 0),
                **OUT,
            },
            attention=("transformer_blocks.*.attn1",),
        ),
        frozenset({"EasyAnimateAttnProcessor2_0"}),
    ),
}
