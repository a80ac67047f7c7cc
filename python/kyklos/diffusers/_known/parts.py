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


def embedded(axes: int = 3) -> dict[int, Input]:
    """The output of a module that makes tokens of an input."""
    return {0: Input(split_dim=1, expected_dims=axes, split_output=True)}


def gathered(axes: int = 3) -> Output:
    """An output of all tokens, which are axis 1."""
    return Output(gather_dim=1, expected_dims=axes)


def cos_sin(axes: int, dim: int) -> tuple[Input, Input]:
    """An input that is a pair of rotary factors."""
    return (tokens(axes, dim), tokens(axes, dim))


#: The inputs of the first block, from prompt and picture that lie in two tensors.
BOTH = {"hidden_states": tokens(3), "encoder_hidden_states": tokens(3)}
#: The output of the usual last module.
OUT = {"proj_out": gathered()}
#: Inputs that have one time for all tokens, or one for each.
PER_TOKEN_TIME = frozenset({"timestep"})
