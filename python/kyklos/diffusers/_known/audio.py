"""Sound: Stable Audio, ACE-Step, MiniMax Music, LongCat Audio."""

from __future__ import annotations

from .._plan import Known, SplitPlan
from .parts import Input, cos_sin, gathered, rope, tokens

KNOWN = {
    "StableAudioDiTModel": Known(
        SplitPlan(
            {
                "transformer_blocks.0": {"hidden_states": tokens(3)},
                "transformer_blocks.*": {"attention_mask": tokens(2), "rotary_embedding": cos_sin(2, 0)},
                # The token of the global states is before the sound.
                "proj_out": gathered(),
            },
            attention=("transformer_blocks.*.attn1",),
        ),
        frozenset({"StableAudioAttnProcessor2_0"}),
    ),
    # Every second layer sees its neighbours, by a mask [1, 1, queries, keys].
    "AceStepTransformer1DModel": Known(
        SplitPlan(
            {
                "layers.0": {"hidden_states": tokens(3)},
                "layers.*": {"position_embeddings": cos_sin(2, 0), "attention_mask": Input(split_dim=2, expected_dims=4)},
                "norm_out": gathered(),
            },
            attention=("layers.*.self_attn",),
        ),
        frozenset({"AceStepAttnProcessor2_0"}),
    ),
    "MiniMaxMusic3Transformer1DModel": Known(
        SplitPlan(
            {
                "rotary_emb": rope(2, 0),
                "transformer_blocks.0": {"hidden_states": tokens(3)},
                # The token of the time is before the sound.
                "transformer_blocks.-1": gathered(),
            },
            attention=("transformer_blocks.*.attn",),
        ),
        frozenset({"MiniMaxMusic3AttnProcessor"}),
    ),
    # What the first block gets is added to what the last one gives.
    "LongCatAudioDiTTransformer": Known(
        SplitPlan(
            {
                "blocks.0": {"hidden_states": tokens(3)},
                "blocks.*": {"mask": tokens(2), "rope": cos_sin(2, 0)},
                "blocks.-1": gathered(),
            },
            attention=("blocks.*.self_attn",),
        ),
        frozenset({"AudioDiTSelfAttnProcessor"}),
    ),
}
