"""QwenImage."""

from __future__ import annotations

from .._plan import Known, SplitPlan
from .parts import OUT, rope, tokens

KNOWN = {
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
}
