"""HunyuanVideo with Framepack, its version 1.5, and HunyuanImage."""

from __future__ import annotations

from .._plan import Joined, Known, SplitPlan
from .parts import BOTH, OUT, cos_sin, gathered, rope, tokens

_MASK = {"attention_mask": Joined(-1, ("hidden_states", "encoder_hidden_states"))}
# The refiner of the prompt in front of the blocks sees all of it, and so does what makes the mask.
_PLAN = SplitPlan(
    {
        "rope": rope(2, 0),
        "transformer_blocks.0": BOTH,
        "transformer_blocks.*": _MASK,
        "single_transformer_blocks.*": _MASK,
        **OUT,
    },
    attention=("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
)

KNOWN = {
    "HunyuanVideoTransformer3DModel": Known(
        _PLAN,
        frozenset({"HunyuanVideoAttnProcessor2_0"}),
        config={
            "image_condition_type": (
                (None, "latent_concat"),
                "its blocks count the tokens of the first frame from the first token of the whole sequence",
            )
        },
    ),
    "HunyuanVideo15Transformer3DModel": Known(
        SplitPlan(
            {
                "rope": rope(2, 0),
                "transformer_blocks.0": BOTH,
                "transformer_blocks.*": {"attention_mask": tokens(2)},
                **OUT,
            },
            attention=("transformer_blocks.*.attn",),
            rows_alike=True,
        ),
        frozenset({"HunyuanVideo15AttnProcessor2_0"}),
    ),
    "HunyuanImageTransformer2DModel": Known(_PLAN, frozenset({"HunyuanImageAttnProcessor"})),
    # The history is before the new frames, which are taken by their number after the last block.
    "HunyuanVideoFramepackTransformer3DModel": Known(
        SplitPlan(
            {
                "transformer_blocks.0": BOTH,
                "transformer_blocks.*": {**_MASK, "freqs_cis": cos_sin(2, 0)},
                "single_transformer_blocks.*": {**_MASK, "image_rotary_emb": cos_sin(2, 0)},
                "single_transformer_blocks.-1": (gathered(), None),
            },
            attention=_PLAN.attention,
        ),
        frozenset({"HunyuanVideoAttnProcessor2_0"}),
    ),
}
