"""The two calls of a step with guidance: the same latents at the same time, with other prompts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

Inputs = dict[str, Any]


class Pairs:
    """Finds pairs of calls that follow each other, and predicts the second one of the next step when its first one begins."""

    def __init__(self) -> None:
        #: Whether the last calls came in pairs, and whether the one that runs is the second of its pair.
        self.found = self.is_second = False
        self._last: Inputs | None = None
        #: The calls of the last pair.
        self._pair: tuple[Inputs, Inputs] | None = None

    def begin(self, inputs: Inputs) -> None:
        last, was_second = self._last, self.is_second
        self.is_second = last is not None and not was_second and _of_one_step(last, inputs)
        if self.is_second:
            assert last is not None
            self._pair, self.found = (last, copied(inputs)), True
        elif last is not None and not was_second:
            self.found = False
        # Pipelines may write to tensors that they have passed.
        self._last = copied(inputs)

    def second(self) -> Inputs | None:
        """Copies of the inputs of the second call after this first one: those that differed between the last two calls stay, the others are those of
        this call. Nothing if this call has another prompt than the last first one."""
        first = self._last
        if self.is_second or not self.found or first is None or self._pair is None or first.keys() != self._pair[0].keys():
            return None
        before, after = self._pair
        shared = {name for name in first if same(before[name], after[name])}
        if not all(same(first[name], before[name]) for name in first.keys() - shared):
            return None
        return {name: x if name in shared else after[name] for name, x in first.items()}

    def __deepcopy__(self, memo: dict[int, Any]) -> Pairs:
        """A copy of the transformer has had no calls."""
        return Pairs()


def copied(x: Any) -> Any:
    """With tensors of its own."""
    if isinstance(x, torch.Tensor):
        return x.detach().clone()
    if isinstance(x, (list, tuple)):
        return _like(x, map(copied, x))
    return {key: copied(value) for key, value in x.items()} if isinstance(x, dict) else x


def _of_one_step(a: Inputs, b: Inputs) -> bool:
    """Whether latents, the first argument, and times are the same, and something else is not."""
    if a.keys() != b.keys():
        return False
    first = next(iter(a), None)
    of_step = {name for name in a if name in (first, "t") or name.startswith("timestep")}
    return all(same(a[name], b[name]) for name in of_step) and not all(same(a[name], b[name]) for name in a.keys() - of_step)


def same(a: Any, b: Any) -> bool:
    """Whether two arguments have the same values."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.device == b.device and a.shape == b.shape and bool(torch.equal(a, b))
    if isinstance(a, (list, tuple)) and type(a) is type(b):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return False
    try:
        return type(a) is type(b) and bool(a == b)
    except (TypeError, ValueError):  # Arrays have no truth.
        return False


def entries_of(inputs: Inputs, first: int, end: int, batch: int) -> Inputs:
    """These entries of a batch: of tensors by their first axis and of lists of others, if they are so long."""

    def part(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return x[first:end] if x.dim() and x.shape[0] == batch else x
        if isinstance(x, list) and len(x) == batch and not all(isinstance(item, torch.Tensor) and item.shape[:1] == (batch,) for item in x):
            return x[first:end]
        if isinstance(x, (list, tuple)):
            return _like(x, map(part, x))
        return {key: part(value) for key, value in x.items()} if isinstance(x, dict) else x

    return {name: part(x) for name, x in inputs.items()}


def _like(x: Any, items: Iterable[Any]) -> Any:
    """A list or tuple of the type of ``x``."""
    return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)


def tensors_of(x: Any) -> Iterator[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, (list, tuple, dict)):
        for item in x.values() if isinstance(x, dict) else x:
            yield from tensors_of(item)
