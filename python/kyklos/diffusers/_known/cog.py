"""CogVideoX, CogView 3 and 4, and ConsisID: prompt and picture in one sequence, rotary factors for the picture alone."""

from __future__ import annotations

from .._plan import Known, SplitPlan
from .parts import BOTH, OUT, cos_sin, gathered, tokens

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
    "CogView3PlusTransformer2DModel": Known(
        SplitPlan({"transformer_blocks.0": BOTH, **OUT}, attention=("transformer_blocks.*.attn1",)),
        frozenset({"CogVideoXAttnProcessor2_0", "FusedCogVideoXAttnProcessor2_0"}),
    ),
    # After the last block it joins both and takes the prompt away by its number of tokens. Each token attends to the face by itself.
    "ConsisIDTransformer3DModel": Known(
        SplitPlan(
            {
                "": {"image_rotary_emb": cos_sin(2, 0)},
                "transformer_blocks.0": BOTH,
                "transformer_blocks.-1": (gathered(), gathered()),
            },
            attention=("transformer_blocks.*.attn1",),
        ),
        frozenset({"CogVideoXAttnProcessor2_0", "FusedCogVideoXAttnProcessor2_0"}),
    ),
}
