"""Flux and its relatives: prompt and picture in one sequence."""

from __future__ import annotations

from .._plan import Joined, Known, SplitPlan
from .parts import OUT, Input, tokens

_ATTENTION = ("transformer_blocks.*.attn", "single_transformer_blocks.*.attn")
_INPUTS = {
    "hidden_states": tokens(3),
    "encoder_hidden_states": tokens(3),
    "img_ids": tokens(2, 0),
    "txt_ids": tokens(2, 0),
}
_CONTROLNET = {"controlnet_block_samples": tokens(3), "controlnet_single_block_samples": tokens(3)}
# Chroma multiplies a mask of 0 and 1 with itself and adds that to the logits: each query has a row of its own.
_ROWS = {"attention_mask": Joined(-2, ("encoder_hidden_states", "hidden_states"), keys=-1)}

# [tokens, axes], or the same for each batch entry.
_POSITIONS = Input(split_dim=-2, expected_dims=None, split_output=False)

KNOWN = {
    "FluxTransformer2DModel": Known(
        SplitPlan({"": {**_INPUTS, **_CONTROLNET}, **OUT}, attention=_ATTENTION),
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
    "ChromaTransformer2DModel": Known(
        SplitPlan(
            {"": {**_INPUTS, **_CONTROLNET}, **{place: _ROWS for place in _ATTENTION}, **OUT}, attention=_ATTENTION
        ),
        frozenset({"FluxAttnProcessor"}),
    ),
    "BriaTransformer2DModel": Known(
        SplitPlan({"": {**_INPUTS, "controlnet_block_samples": tokens(3)}, **OUT}, attention=_ATTENTION),
        frozenset({"BriaAttnProcessor"}),
        {"controlnet_single_block_samples": "they are added to image tokens that are counted from the number of text tokens on"},
    ),
    "OvisImageTransformer2DModel": Known(
        SplitPlan({"": _INPUTS, **OUT}, attention=_ATTENTION), frozenset({"OvisImageAttnProcessor"})
    ),
    "LongCatImageTransformer2DModel": Known(
        SplitPlan({"": _INPUTS, **OUT}, attention=_ATTENTION), frozenset({"LongCatImageAttnProcessor"})
    ),
    "BriaFiboTransformer2DModel": Known(
        SplitPlan(
            {
                "": {
                    "hidden_states": tokens(3),
                    "encoder_hidden_states": tokens(3),
                    "text_encoder_layers": tokens(3),
                    "img_ids": _POSITIONS,
                    "txt_ids": _POSITIONS,
                    "joint_attention_kwargs": {"attention_mask": Joined(-1, ("encoder_hidden_states", "hidden_states"))},
                },
                **OUT,
            },
            attention=("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
        ),
        frozenset({"BriaFiboAttnProcessor", "BriaAttnProcessor"}),
    ),
}
