"""CogVideoX and CogView 4: prompt and picture in one sequence, rotary factors for the picture alone."""

from __future__ import annotations

from .._plan import Known, SplitPlan
from .parts import BOTH, OUT, tokens

KNOWN = {
    "CogVideoXTransformer3DModel": Known(
        SplitPlan(
            {"": {"image_rotary_emb": tokens(2, 0)}, "transformer_blocks.0": BOTH, **OUT},
            attention=("transformer_blocks.*.attn1",),
        ),
        frozenset({"CogVideoXAttnProcessor2_0", "FusedCogVideoXAttnProcessor2_0"}),
    ),
    "CogView4Transformer2DModel": Known(
        SplitPlan(
            {
                "transformer_blocks.0": BOTH,
                "transformer_blocks.*": {"image_rotary_emb": tokens(2, 0)},
                **OUT,
            },
            attention=("transformer_blocks.*.attn1",),
        ),
        frozenset({"CogView4AttnProcessor"}),
        {"attention_mask": "its attention turns it into rows of queries by the keys of one rank"},
    ),
}
