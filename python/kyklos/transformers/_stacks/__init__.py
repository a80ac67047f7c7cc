"""Encoder-decoders, and encoders of them: their tokens are cut before the first layer, so that they need no ``position_ids``."""

from .split import SplitStacks, stacks_of

__all__ = ["SplitStacks", "stacks_of"]
