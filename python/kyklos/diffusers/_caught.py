"""Attention modules whose processors call PyTorch's functions themselves, instead of the dispatcher of diffusers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.eval_frame import skip_code
from torch.overrides import TorchFunctionMode

from .._models.telling import told
from ._attention import Split, attention

_SDPA: Callable[..., torch.Tensor] = torch.nn.functional.scaled_dot_product_attention


class _Caught(TorchFunctionMode):
    """Within it calls of ``F.scaled_dot_product_attention`` go to the group, and the first result of each function of ``sums`` is summed over the
    ranks."""

    def __init__(self, split: Split, sums: tuple[Any, ...]) -> None:
        super().__init__()
        self._split, self._sums = split, list(sums)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _SDPA:
            return _attention(self._split, *args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if func in self._sums:
            self._sums.remove(func)
            return _summed(self._split, result)
        return result


# What compiled code calls where it has a break in its graph is compiled by itself, and this would be once for each function and its arguments. Its
# code is still traced where the graph goes on.
skip_code(_Caught.__torch_function__.__code__)


def catch(module: torch.nn.Module, split: Split, sums: tuple[Any, ...] = ()) -> list[Any]:
    """Hooks, to be removed, that hand the attention of ``module`` to the group of ``split``; of linear attention the sums over tokens."""
    # A mode for each forward, and the same list in both hooks of a copy of the module.
    modes: list[_Caught] = []
    enter, leave = functools.partial(_enter, split, sums, modes), functools.partial(_leave, modes)
    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]


@torch.compiler.disable
def _enter(split: Split, sums: tuple[Any, ...], modes: list[_Caught], module: torch.nn.Module, args: Any) -> None:
    if split.shares.whole:
        return
    modes.append(_Caught(split, sums))
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


@torch.compiler.disable
def _summed(split: Split, x: torch.Tensor) -> torch.Tensor:
    """The sum of ``x`` over the ranks. Its gradient is the sum of what the ranks have for it."""
    with told(split.group):
        split.begin_call()
        return split.gather(x[None], 0).sum(0)
