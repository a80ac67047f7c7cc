"""What split models change in their modules, besides the forward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .._rows import gather
from ._cache import CACHE
from ._attention import Forward, current, entered

#: Functions that restore a model, the last one first.
Undo = list[Callable[[], None]]


def whole_pooler_input(base: torch.nn.Module, undo: Undo) -> None:
    """Gives the pooler of an encoder, which looks at chosen tokens, the rows of all ranks; or the first token, if it gets one."""
    pooler = getattr(base, "pooler", None)
    if not isinstance(pooler, torch.nn.Module):
        return

    undo.append(pooler.register_forward_pre_hook(_whole).remove)


def _whole(_: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    forward = current()
    if forward is None or forward.trial or forward.counts is None:
        return args
    own, label = args[0], f"{forward.label} pooler"
    if own.dim() == 2:
        # Rank 0 has the first token. The check of parallelize() finds a model that takes another one.
        first = own[:, None] if forward.group.rank == 0 else own[:, None][:, :0]
        return (gather(forward.group, first, label)[:, 0], *args[1:])
    rows = gather(forward.group, own, label)
    forward.pooled = (own, rows)
    return (rows, *args[1:])


def longest_position(base: torch.nn.Module, undo: Undo) -> None:
    """Gives rotary embeddings that scale with the longest position the longest one of all ranks, as one more token."""

    for module in base.modules():
        kinds = getattr(module, "rope_type", None)
        kinds = [*kinds.values()] if isinstance(kinds, dict) else [kinds]
        if any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds):
            undo.append(module.register_forward_pre_hook(_longer, with_kwargs=True).remove)
            undo.append(module.register_forward_hook(_shorter, with_kwargs=True).remove)


def _longer(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    forward = current()
    if forward is None or forward.trial:
        return None
    positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
    longest = positions.new_full((positions.shape[0], 1), forward.longest)
    positions = torch.cat([positions, longest], -1)
    if "position_ids" in kwargs:
        return args, {**kwargs, "position_ids": positions}
    return (args[0], positions, *args[2:]), kwargs


def _shorter(_: Any, args: Any, kwargs: Any, output: Any) -> Any:
    forward = current()
    if forward is None or forward.trial:
        return None
    return tuple(part[:, :-1] for part in output)


def first_token(base: torch.nn.Module, undo: Undo) -> None:
    """Tells layers that scale their queries by the number of the token, as those of Llama 4 without RoPE, where this rank's tokens begin."""
    for module in base.modules():
        if getattr(module, "attn_temperature_tuning", None) and not getattr(module, "use_rope", True):
            undo.append(module.register_forward_pre_hook(_later, with_kwargs=True).remove)


class _Later:
    """A cache, or none, whose length is the number of this rank's first token."""

    def __init__(self, cache: Any, first: int) -> None:
        self._cache, self._first = cache, first

    def get_seq_length(self, *_: Any) -> int:
        return self._first

    def update(self, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return (key, value) if self._cache is None else self._cache.update(key, value, *args, **kwargs)


def _later(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    forward, cache = current(), kwargs.get(CACHE)
    if forward is None or forward.trial:
        return None
    past = 0 if forward.cache is None else forward.cache.length
    return args, {**kwargs, CACHE: _Later(cache, past + forward.first)}


@contextmanager
def recomputed(base: torch.nn.Module, forward: Forward) -> Iterator[None]:
    """A block in which layers with gradient checkpointing remember the pass: ``backward()`` runs them again, long after it."""
    undo: Undo = []

    def remembering(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        def run(layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            def again(*inputs: Any, **others: Any) -> Any:
                if current() is not None:
                    return layer(*inputs, **others)
                with entered(forward):
                    return layer(*inputs, **others)

            return checkpoint(again, *args, **kwargs)

        return run

    try:
        for module in base.modules() if base.training else ():
            if getattr(module, "gradient_checkpointing", False) and hasattr(module, "_gradient_checkpointing_func"):
                checkpoint: Any = module._gradient_checkpointing_func
                replace(module, "_gradient_checkpointing_func", remembering(checkpoint), undo)
        yield
    finally:
        while undo:
            undo.pop()()


def replace(owner: Any, name: str, function: Callable[..., Any], undo: Undo) -> None:
    """Sets an attribute of an instance, and notes how to restore it. Copies of the owner have the attribute too: those of a partial
    function or a method have its arguments copied, so that they belong to the copy."""
    # Not there: the ellipsis, whose copy is the same object.
    undo.append(functools.partial(_restore, owner, name, owner.__dict__.get(name, ...)))
    setattr(owner, name, function)


def _restore(owner: Any, name: str, before: Any) -> None:
    if before is ...:
        delattr(owner, name)
    else:
        setattr(owner, name, before)
