"""Sana: linear attention, and convolutions of 3x3 over the grid of tokens in place of linear layers."""

from __future__ import annotations

from typing import Any

import torch

from .._plan import Extent, Grid, Known, SplitPlan
from .parts import OUT, cos_sin, tokens

# Its products with the keys are sums over tokens, and in the video's also the sum of the keys.
_ATTENTION = "transformer_blocks.*.attn1"


def _grid(names: tuple[str, ...], dims: tuple[int, ...]) -> dict[str, Any]:
    """Of a grid of these extents, which the convolutions have on these axes."""
    return {
        "transformer_blocks.0": {"hidden_states": tokens(3)},
        "transformer_blocks.*": {name: Extent(axis, "hidden_states") for axis, name in enumerate(names)},
        "transformer_blocks.*.ff": {"hidden_states": Grid(dims), 0: Grid(dims)},
        **OUT,
    }


_VIDEO = _grid(("frames", "height", "width"), (1, 2, 3))

KNOWN = {
    "SanaTransformer2DModel": Known(
        SplitPlan(
            {"": {"controlnet_block_samples": tokens(3)}, **_grid(("height", "width"), (2, 3))},
            attention=(),
            sums={_ATTENTION: (torch.matmul,)},
        ),
        frozenset({"SanaLinearAttnProcessor2_0"}),
    ),
    "SanaVideoTransformer3DModel": Known(
        SplitPlan(
            {
                "": {"controlnet_block_samples": tokens(3)},
                **_VIDEO,
                "transformer_blocks.*": {**_VIDEO["transformer_blocks.*"], "timestep": tokens(3), "rotary_emb": cos_sin(4, 1)},
                "norm_out": {"temb": tokens(3)},
            },
            attention=(),
            sums={_ATTENTION: (torch.matmul, torch.Tensor.sum)},
            whole=frozenset({"timestep", "temb"}),
        ),
        frozenset({"SanaLinearAttnProcessor3_0"}),
    ),
}
