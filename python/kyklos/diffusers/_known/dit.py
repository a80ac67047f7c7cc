"""DiT, PixArt and others like them: self-attention of the picture or video, cross-attention to a prompt that stays whole."""

from __future__ import annotations

from .._plan import Joined, Known, SplitPlan
from .parts import OUT, gathered, tokens

_SELF_ATTENTION = ("transformer_blocks.*.attn1",)
# Of a mask for the keys, [batch, 1, tokens], which the blocks get.
_KEYS = tokens(3, 2)

KNOWN = {
    "PixArtTransformer2DModel": Known(
        SplitPlan(
            {
                "transformer_blocks.0": {"hidden_states": tokens(3)},
                "transformer_blocks.*": {"attention_mask": _KEYS},
                **OUT,
            },
            attention=_SELF_ATTENTION,
        ),
        frozenset({"AttnProcessor2_0"}),
    ),
    "HunyuanDiT2DModel": Known(
        SplitPlan(
            {
                "": {"image_rotary_emb": tokens(2, 0), "controlnet_block_samples": tokens(3)},
                "blocks.0": {"hidden_states": tokens(3)},
                **OUT,
            },
            attention=("blocks.*.attn1",),
        ),
        frozenset({"HunyuanAttnProcessor2_0"}),
    ),
    "AllegroTransformer3DModel": Known(
        SplitPlan(
            {
                # Tables of frames, rows and columns, then of each token its row in them, [1, tokens].
                "": {"image_rotary_emb": (None, tokens(2))},
                "transformer_blocks.0": {"hidden_states": tokens(3)},
                "transformer_blocks.*": {"attention_mask": _KEYS},
                **OUT,
            },
            attention=_SELF_ATTENTION,
            # Its blocks drop an axis of tokens that has one.
            least=2,
        ),
        frozenset({"AllegroAttnProcessor2_0"}),
    ),
    # A rank has its places of all frames. So it has all keys of attention over time, whose batch entries are these places.
    "LatteTransformer3DModel": Known(
        SplitPlan(
            {
                "transformer_blocks.0": {"hidden_states": tokens(3)},
                "temporal_transformer_blocks.*": {"timestep": Joined(0, ("hidden_states",))},
                **OUT,
            },
            attention=_SELF_ATTENTION,
        ),
        frozenset({"AttnProcessor2_0"}),
    ),
    "DiTTransformer2DModel": Known(
        SplitPlan(
            {"transformer_blocks.0": {"hidden_states": tokens(3)}, "proj_out_2": gathered()},
            attention=_SELF_ATTENTION,
        ),
        frozenset({"AttnProcessor2_0"}),
    ),
    # The keys of the prompt are before those of the picture.
    "PRXTransformer2DModel": Known(
        SplitPlan(
            {
                "blocks.0": {"hidden_states": tokens(3)},
                # Rotations, [batch, 1, tokens, pairs, 2, 2].
                "blocks.*": {"image_rotary_emb": tokens(6, 2)},
                "final_layer": gathered(),
            },
            attention=("blocks.*.attention",),
            common_keys=True,
        ),
        frozenset({"PRXAttnProcessor2_0"}),
    ),
}
