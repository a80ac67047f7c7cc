"""Mochi."""

from __future__ import annotations

from .._plan import Known, SplitPlan
from .parts import BOTH, OUT, rope, tokens

KNOWN = {
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
}
