"""CogVideoX."""

from __future__ import annotations

from .._plan import Known, SplitPlan
from .parts import BOTH, OUT, tokens

KNOWN = {
    # The rotary factors are of the picture only.
    "CogVideoXTransformer3DModel": Known(
        SplitPlan(
            {"": {"image_rotary_emb": tokens(2, 0)}, "transformer_blocks.0": BOTH, **OUT},
            attention=("transformer_blocks.*.attn1",),
        ),
        frozenset({"CogVideoXAttnProcessor2_0", "FusedCogVideoXAttnProcessor2_0"}),
    ),
}
