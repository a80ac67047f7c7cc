"""Pieces of plans."""

from __future__ import annotations

from diffusers.models._modeling_parallel import ContextParallelInput as Input
from diffusers.models._modeling_parallel import ContextParallelOutput as Output


def tokens(axes: int, dim: int = 1) -> Input:
    """An input of a module with this many axes, whose tokens are axis ``dim``."""
    return Input(split_dim=dim, expected_dims=axes, split_output=False)


def rope(axes: int | None, dim: int) -> dict[int, Input]:
    """Both outputs of a module that makes rotary factors."""
    return {index: Input(split_dim=dim, expected_dims=axes, split_output=True) for index in (0, 1)}


#: The output of all tokens.
OUT = {"proj_out": Output(gather_dim=1, expected_dims=3)}
#: Inputs that have one time for all tokens, or one for each.
PER_TOKEN_TIME = frozenset({"timestep"})
