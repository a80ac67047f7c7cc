"""Wan and its relatives."""

from __future__ import annotations

from diffusers.models._modeling_parallel import ContextParallelOutput as Output

from .._plan import Known, SplitPlan
from .parts import OUT, PER_TOKEN_TIME, Input, gathered, rope, tokens

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
            {
                "rope": rope(4, 1),
                "blocks.0": {"hidden_states": tokens(3)},
                # With diffusion forcing each token has a time, also after the last block.
                "blocks.*": {"temb": tokens(4, 2)},
                "blocks.-1": gathered(),
            },
            attention=("blocks.*.attn1",),
            whole=frozenset({"temb"}),
        ),
        frozenset({"SkyReelsV2AttnProcessor"}),
        config={"num_frame_per_block": ((1,), "its mask of frames counts the tokens of one rank")},
    ),
    # Every control block reads the whole first hidden states; the control states go from one to the next.
    "WanVACETransformer3DModel": Known(
        SplitPlan(
            {
                "rope": rope(4, 1),
                "vace_blocks.0": {"control_hidden_states": tokens(3)},
                "vace_blocks.*": {"hidden_states": tokens(3)},
                "blocks.0": {"hidden_states": tokens(3)},
                **OUT,
            },
            attention=("blocks.*.attn1", "vace_blocks.*.attn1"),
        ),
        frozenset({"WanAttnProcessor"}),
    ),
    # A frame attends to the face of its time: the queries of whole frames are needed, whose tokens may be on several ranks. They are
    # gathered for the few keys of the face, and the result is split again.
    "WanAnimateTransformer3DModel": Known(
        SplitPlan(
            {
                "rope": rope(4, 1),
                "blocks.0": {"hidden_states": tokens(3)},
                "face_adapter.*.norm_q": Output(gather_dim=1, expected_dims=4),
                "face_adapter.*.to_out": {"input": tokens(3)},
                **OUT,
            },
            attention=("blocks.*.attn1",),
        ),
        frozenset({"WanAttnProcessor"}),
    ),
    # Each frame has a time, also after the last block.
    "AnyFlowTransformer3DModel": Known(
        SplitPlan(
            {
                "blocks.0": {"hidden_states": tokens(3)},
                "blocks.*": {"temb": tokens(4), "rotary_emb": Input(split_dim=2, expected_dims=4)},
                "blocks.-1": gathered(),
            },
            attention=("blocks.*.attn1",),
        ),
        frozenset({"AnyFlowAttnProcessor"}),
    ),
}
