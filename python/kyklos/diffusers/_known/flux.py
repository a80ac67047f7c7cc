"""Flux and its relatives: prompt and picture in one sequence."""

from __future__ import annotations

from .._plan import Known, SplitPlan
from .parts import OUT, tokens

_ATTENTION = ("transformer_blocks.*.attn", "single_transformer_blocks.*.attn")

KNOWN = {
    "FluxTransformer2DModel": Known(
        SplitPlan(
            {
                "": {
                    "hidden_states": tokens(3),
                    "encoder_hidden_states": tokens(3),
                    "img_ids": tokens(2, 0),
                    "txt_ids": tokens(2, 0),
                    "controlnet_block_samples": tokens(3),
                    "controlnet_single_block_samples": tokens(3),
                },
                **OUT,
            },
            attention=_ATTENTION,
        ),
        frozenset({"FluxAttnProcessor"}),
    ),
    "Flux2Transformer2DModel": Known(
        SplitPlan(
            {
                "": {
                    "hidden_states": tokens(3),
                    "encoder_hidden_states": tokens(3),
                    "img_ids": tokens(3),
                    "txt_ids": tokens(3),
                },
                **OUT,
            },
            attention=_ATTENTION,
        ),
        frozenset({"Flux2AttnProcessor", "Flux2ParallelSelfAttnProcessor"}),
        {"kv_cache_mode": "the cache of reference tokens counts them from the first token of the whole sequence"},
    ),
}
