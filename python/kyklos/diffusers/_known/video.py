"""Video in one sequence with text or sound, or after its history: MiniMax-H3, Helios, Mochi, EasyAnimate."""

from __future__ import annotations

from .._plan import Count, Joined, Known, SplitPlan
from .parts import BOTH, OUT, gathered, rope, tokens

# A rank has its share of the history, then its share of the new frames, which blocks find by their number.
_NEW = "original_context_length"
_BOTH = Joined(1, (None, _NEW))

KNOWN = {
    # The indices of each modality are those of the whole sequence: it is split after the rows are put there, and gathered before
    # they are taken. The refiner has the whole text on each rank.
    "MiniMaxH3Transformer3DModel": Known(
        SplitPlan(
            {
                "rope": rope(2, 0),
                "transformer_blocks.0": {"hidden_states": tokens(3)},
                "transformer_blocks.*": {"adaln_indices": tokens(1, 0)},
                "norm_out": {"timestep_indices": tokens(1, 0)},
                "proj_out": gathered(),
                "audio_proj_out": gathered(),
            },
            attention=("transformer_blocks.*.attn",),
        ),
        frozenset({"MiniMaxH3AttnProcessor"}),
    ),
    "HeliosTransformer3DModel": Known(
        SplitPlan(
            {
                "blocks.*": {_NEW: Count(), "temb": _BOTH, "rotary_emb": _BOTH},
                "blocks.0": {"hidden_states": _BOTH},
                # It takes the last rows of the times: those of new frames are all the same.
                "norm_out": {_NEW: Count()},
                **OUT,
            },
            attention=("blocks.*.attn1",),
        ),
        frozenset({"HeliosAttnProcessor"}),
    ),
    # Attention takes the tokens of each prompt out of its padding and puts their outputs first: on each rank this is right where padding
    # is behind them.
    "MochiTransformer3DModel": Known(
        SplitPlan(
            {
                "rope": rope(3, 0),
                "transformer_blocks.0": BOTH,
                "transformer_blocks.*": {"encoder_attention_mask": tokens(2)},
                **OUT,
            },
            attention=("transformer_blocks.*.attn1",),
            each_entry=True,
        ),
        frozenset({"MochiAttnProcessor2_0"}),
        padded_behind=frozenset({"encoder_attention_mask"}),
    ),
    "EasyAnimateTransformer3DModel": Known(
        SplitPlan(
            {
                "transformer_blocks.0": {"hidden_states": tokens(3), "encoder_hidden_states": tokens(3)},
                "rope_embedding": rope(2, 0),
                **OUT,
            },
            attention=("transformer_blocks.*.attn1",),
        ),
        frozenset({"EasyAnimateAttnProcessor2_0"}),
    ),
}
