"""Attention modules whose processors call PyTorch's function themselves, instead of the dispatcher of diffusers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ._attention import Split, attention

_SDPA: Callable[..., torch.Tensor] = torch.nn.functional.scaled_dot_product_attention


class _Caught(TorchFunctionMode):
    """Within it calls of ``F.scaled_dot_product_attention`` go to the group."""

    def __init__(self, split: Split) -> None:
        super().__init__()
        self._split = split

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _attention(self._split, *args, **(kwargs or {})) if func is _SDPA else func(*args, **(kwargs or {}))


def catch(module: torch.nn.Module, split: Split) -> list[Any]:
    """Hooks, to be removed, that hand the attention of ``module`` to the group of ``split``."""
    # A mode for each forward, and the same list in both hooks of a copy of the module.
    modes: list[_Caught] = []
    enter, leave = functools.partial(_enter, split, modes), functools.partial(_leave, modes)
    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]


@torch.compiler.disable
def _enter(split: Split, modes: list[_Caught], module: torch.nn.Module, args: Any) -> None:
    if split.shares.whole:
        return
    modes.append(_Caught(split))
    modes[-1].__enter__()


@torch.compiler.disable
def _leave(modes: list[_Caught], module: torch.nn.Module, args: Any, output: Any) -> None:
    if modes:
        modes.pop().__exit__(None, None, None)


def _attention(
    split: Split,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """``F.scaled_dot_product_attention``, whose tensors are ``[batch, heads, tokens, dim]`` and whose mask broadcasts."""
    while attn_mask is not None and attn_mask.dim() < 4:
        attn_mask = attn_mask[None]
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    o = attention(split, q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return o.transpose(1, 2)
