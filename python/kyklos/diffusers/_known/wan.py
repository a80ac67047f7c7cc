"""Wan and its relatives."""

from __future__ import annotations

from .._plan import Known, SplitPlan
from .parts import OUT, PER_TOKEN_TIME, rope, tokens

# The prompt stays whole in cross-attention: every rank has all its keys, so these calls are local and need no mask of others.
_WAN = Known(
    SplitPlan(
        {"": {"timestep": tokens(2)}, "rope": rope(4, 1), "blocks.0": {"hidden_states": tokens(3)}, **OUT},
        attention=("blocks.*.attn1",),
        whole=PER_TOKEN_TIME,
    ),
    frozenset({"WanAttnProcessor"}),
)

KNOWN = {
    "WanTransformer3DModel": _WAN,
    "ChronoEditTransformer3DModel": Known(_WAN.plan, frozenset({"WanAttnProcessor"})),
    "SkyReelsV2Transformer3DModel": Known(
        SplitPlan(
            {"rope": rope(4, 1), "blocks.0": {"hidden_states": tokens(3)}, **OUT}, attention=("blocks.*.attn1",)
        ),
        frozenset({"SkyReelsV2AttnProcessor"}),
    ),
}
