"""Kandinsky 5, and 6 with sound: the prompt has blocks of its own, and stays whole in cross-attention."""

from __future__ import annotations

from .._plan import Known, SplitPlan
from .parts import gathered, tokens

KNOWN = {
    "Kandinsky5Transformer3DModel": Known(
        SplitPlan(
            {
                "visual_transformer_blocks.0": {"visual_embed": tokens(3)},
                # Rotations, [batch, tokens, 1, pairs, 2, 2].
                "visual_transformer_blocks.*": {"rope": tokens(6)},
                # The output layer wants frames, rows and columns.
                "visual_transformer_blocks.-1": gathered(3),
            },
            attention=("visual_transformer_blocks.*.self_attention",),
        ),
        frozenset({"Kandinsky5AttnProcessor"}),
        {"sparse_params": "its block mask is made of the tokens of one rank"},
    ),
    # Sound is whole on each rank, as are its keys; its queries of the video's keys are the same on all ranks.
    "Kandinsky6Transformer3DModel": Known(
        SplitPlan(
            {
                "visual_transformer_blocks.0": {"vis": tokens(3)},
                # Rotations, [tokens, 1, pairs, 2, 2].
                "visual_transformer_blocks.*": {"vis_rope": tokens(5, 0)},
                "visual_transformer_blocks.-1": (gathered(), None),
            },
            attention=("visual_transformer_blocks.*.video_dec_block.self_attention", "visual_transformer_blocks.*.av_cross_attention"),
            where_given={"*.av_cross_attention": "audio_hidden_states"},
        ),
        frozenset({"Kandinsky6AttnProcessor"}),
    ),
}
