"""What attends in the block of helpers: PyTorch's function, and the backends of diffusers beside it."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ._shared import may_share

if TYPE_CHECKING:
    from ._owner import Helpers

_NAME = "scaled_dot_product_attention"
_SDPA: Callable[..., torch.Tensor] = torch.nn.functional.scaled_dot_product_attention

_lock = threading.RLock()
#: The blocks that have begun and not ended, the newest last.
_blocks: list[Capture] = []
#: What was replaced: an object or a dictionary, the name there, what it had, and what it has now.
_replaced: list[tuple[Any, Any, Any, Any]] = []
_thread = threading.local()


class Capture:
    """Replaces attention functions in all threads, from the first :meth:`start` until the last :meth:`stop`."""

    def __init__(self, helpers: Helpers) -> None:
        self.helpers = helpers

    def start(self) -> None:
        with _lock:
            _blocks.append(self)
            if len(_blocks) == 1:
                _replace_all()
        _of_thread().append(self)

    def stop(self) -> None:
        if self in _of_thread():
            _of_thread().remove(self)
        with _lock:
            if self in _blocks:
                _blocks.remove(self)
            if not _blocks:
                _restore_all()


def _of_thread() -> list[Capture]:
    """The blocks that this thread has begun, the newest last."""
    if not hasattr(_thread, "blocks"):
        _thread.blocks = []
    blocks: list[Capture] = _thread.blocks
    return blocks


def _replace(where: Any, name: Any, function: Any) -> None:
    had = where[name] if isinstance(where, dict) else getattr(where, name)
    _replaced.append((where, name, had, function))
    if isinstance(where, dict):
        where[name] = function
    else:
        setattr(where, name, function)


def _restore_all() -> None:
    while _replaced:
        where, name, had, ours = _replaced.pop()
        # What somebody else has put there meanwhile stays.
        if isinstance(where, dict):
            if where.get(name) is ours:
                where[name] = had
        elif getattr(where, name, None) is ours:
            setattr(where, name, had)


def _replace_all() -> None:
    # PyTorch's own modules and most libraries look the function up there at each call; others have imported it by its name.
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(_NAME) is _SDPA:
            _replace(module, _NAME, _attention)
    diffusers = sys.modules.get("diffusers.models.attention_dispatch")
    if diffusers is not None:
        functions = diffusers._AttentionBackendRegistry._backends
        for name, function in list(functions.items()):
            # The native ones call PyTorch's function.
            if "native" not in str(getattr(name, "value", name)):
                _replace(functions, name, _of_diffusers(function))


def _forget() -> None:
    """In a child process after ``fork``: helpers have stayed with its parent."""
    global _lock
    _lock = threading.RLock()
    _blocks.clear()
    _restore_all()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _block() -> Capture | None:
    """The newest block of this thread, or else of any. Without the lock: a list is read whole, and an ended block still computes right."""
    own = getattr(_thread, "blocks", None)
    if own:
        newest: Capture = own[-1]
        return newest
    return _blocks[-1] if _blocks else None


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """``F.scaled_dot_product_attention``, shared with helpers where that pays."""
    block = _block()
    # Weights that are dropped at random, and arguments that PyTorch refuses, stay with it.
    if (
        torch.compiler.is_compiling()
        or block is None
        or dropout_p
        or (is_causal and attn_mask is not None)
        or not may_share(block.helpers._core, query, key)
    ):
        return _SDPA(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    def original(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return _SDPA(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    shared = block.helpers.attention
    return shared(original, query, key, value, mask=attn_mask, scale=scale, causal=is_causal, gqa=enable_gqa)


def _of_diffusers(function: Callable[..., Any]) -> Callable[..., Any]:
    """A backend of diffusers: q ``[batch, tokens, heads, dim]``. Each reads masks in its own way: calls with one stay with it."""
    names = list(inspect.signature(function).parameters)
    known = {"query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"}

    @functools.wraps(function)
    def attend(*args: Any, **options: Any) -> Any:
        block = _block()
        given = dict(zip(names, args, strict=False)) | options
        other = {name for name, what in given.items() if name not in known and what is not None and what is not False}
        is_whole = len(args) <= len(names) and {"query", "key", "value"} <= given.keys()
        if block is None or not is_whole or other or given.get("dropout_p") or given.get("attn_mask") is not None:
            return function(*args, **options)
        causal = bool(given.get("is_causal"))
        # Of fewer queries than keys each library has its own idea which keys come before.
        if causal and given["query"].shape[1] != given["key"].shape[1]:
            return function(*args, **options)

        def original(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
            keys = slice(q.shape[2]) if causal else slice(None)
            states = {"query": q, "key": k[:, :, keys], "value": v[:, :, keys]}
            o: torch.Tensor = function(**{**given, **{name: x.transpose(1, 2) for name, x in states.items()}})
            return o.transpose(1, 2)

        q, k, v = (given[name].transpose(1, 2) for name in ("query", "key", "value"))
        gqa = bool(given.get("enable_gqa"))
        o = block.helpers.attention(original, q, k, v, scale=given.get("scale"), causal=causal, gqa=gqa)
        return o.transpose(1, 2).contiguous()

    return attend
