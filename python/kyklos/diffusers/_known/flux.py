"""Flux and its relatives: prompt and picture in one sequence; and HiDream."""

from __future__ import annotations

from .._plan import Joined, Known, SplitPlan
from .parts import OUT, Input, gathered, tokens

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

# The picture's part of positions, and of a mask that hides its padding by zeros.
_JOINT = Joined(1, ("hidden_states", None), whole=True)
_PICTURE_OF_JOINT = {"hidden_states_masks": _JOINT, "image_rotary_emb": _JOINT}

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
    # Each of its three kinds of tokens has blocks of its own, before blocks of them all.
    "Flux3Transformer2DModel": Known(
        SplitPlan(
            {
                "": {
                    **_INPUTS,
                    "image_cond_hidden_states": tokens(3),
                    "image_cond_ids": tokens(2, 0),
                },
                **OUT,
            },
            attention=("txt_mode_blocks.*.attn", "mode_blocks.*.attn", "single_transformer_blocks.*.attn"),
            where_given={"mode_blocks.image_cond.*": "image_cond_hidden_states"},
        ),
        frozenset({"Flux3AttnProcessor"}),
    ),
    # Each block has a prompt of its own behind the picture, and drops what it makes of it. All ranks have these tokens, which are few.
    "HiDreamImageTransformer2DModel": Known(
        SplitPlan(
            {
                "double_stream_blocks.0": {"hidden_states": tokens(3)},
                "double_stream_blocks.*": _PICTURE_OF_JOINT,
                "single_stream_blocks.*": _PICTURE_OF_JOINT,
                "final_layer": gathered(),
            },
            attention=("double_stream_blocks.*.attn1", "single_stream_blocks.*.attn1"),
            common_behind="hidden_states",
        ),
        frozenset({"HiDreamAttnProcessor"}),
    ),
}
