"""SD 3, and AuraFlow."""

from __future__ import annotations

from .._plan import Known, SplitPlan
from .parts import BOTH, OUT, embedded, tokens

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
}
