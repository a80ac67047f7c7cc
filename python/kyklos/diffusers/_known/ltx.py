"""LTX video, and LTX 2 with sound."""

from __future__ import annotations

from .._plan import Known, SplitPlan
from .parts import OUT, PER_TOKEN_TIME, rope, tokens

# [batch, tokens, dim] or [batch, heads, tokens, dim], by the configuration.
_ROPE_BEFORE_LAST = rope(None, -2)

KNOWN = {
    "LTXVideoTransformer3DModel": Known(
        SplitPlan(
            {"": {"hidden_states": tokens(3), "timestep": tokens(2)}, "rope": rope(3, 1), **OUT},
            attention=("transformer_blocks.*.attn1",),
            whole=PER_TOKEN_TIME,
        ),
        frozenset({"LTXVideoAttnProcessor"}),
    ),
    # Sound is whole on each rank, as are its keys; the sound's queries of the video's keys are the same on all ranks.
    "LTX2VideoTransformer3DModel": Known(
        SplitPlan(
            {
                "": {
                    "hidden_states": tokens(3),
                    "timestep": tokens(2),
                    "video_keyframes_mask": tokens(3),
                },
                "rope": _ROPE_BEFORE_LAST,
                "cross_attn_rope": _ROPE_BEFORE_LAST,
                **OUT,
            },
            attention=("transformer_blocks.*.attn1", "transformer_blocks.*.video_to_audio_attn"),
            whole=PER_TOKEN_TIME,
        ),
        frozenset({"LTX2AudioVideoAttnProcessor"}),
        {
            "video_self_attention_mask": "its attention pads the rows of a mask to the number of tokens of this rank",
            "isolate_modalities": "each attention module is to make one call, and those between sound and video make none then",
        },
    ),
}
