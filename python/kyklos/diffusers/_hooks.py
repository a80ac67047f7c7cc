"""Hooks that split the tokens of a module's inputs and outputs, and gather them again.

They are partial functions, since a copy of a module has copies of their arguments. They are PyTorch's own hooks of a module, not those of diffusers or accelerate, which replace ``module.forward``: so they run first
and last whatever was registered before or is registered later, and setting up offloading again does not drop them.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput

from .._errors import RequestError
from .._group import Group
from .._models.telling import told
from ._attention import Split
from ._plan import Count, Extent, Grid, Joined
from ._ways.shares import Shares

# The attribute with the function that computes a block again in backward().
_CHECKPOINT = "_gradient_checkpointing_func"


class Splitter:
    """This rank's part of tensors."""

    def __init__(
        self, group: Group, shares: Shares, whole: frozenset[str], gather: Callable[..., torch.Tensor] | None = None
    ) -> None:
        self.group, self.shares, self.whole, self.gather = group, shares, whole, gather

    def part(self, x: torch.Tensor, how: ContextParallelInput | Joined | Grid, name: str) -> torch.Tensor:
        """The tokens of this rank along ``how.split_dim``, a view; of a joined input a copy; of a grid the rows that they need."""
        if isinstance(how, Joined):
            return self._joined(x, how, name)
        if isinstance(how, Grid):
            return self._near(x, how, name)
        if how.expected_dims is not None and x.dim() != how.expected_dims:
            if name in self.whole and x.dim() < how.expected_dims:
                return x
            raise RequestError(
                f"{name} has {x.dim()} axes, the plan expects {how.expected_dims}: pass it in the shape that the pipeline of diffusers uses"
            )
        total = x.shape[how.split_dim]
        if name in self.whole and total == 1:
            return x
        self.shares.totals[name] = self._enough(total, name)
        return self._own(x, how.split_dim, total)

    def cells(self, x: torch.Tensor, how: Grid, name: str) -> torch.Tensor:
        """Of an output of the rows that :meth:`part` has chosen, the tokens of this rank."""
        first, end, own = self._rows(name)
        row, dim = math.prod(self.shares.extents[1:]), how.dims[0]
        if x.shape[dim] != end - first:
            raise RequestError(f"{name} has {x.shape[dim]} rows of a grid, of {end - first}: mend the plan")
        flat = x.flatten(dim, how.dims[-1]).narrow(dim, own[0] - first * row, own[1] - own[0])
        return flat.unflatten(dim, (own[1] - own[0], *[1] * (len(how.dims) - 1)))

    def _near(self, x: torch.Tensor, how: Grid, name: str) -> torch.Tensor:
        """The rows of this rank's tokens and those beside them."""
        first, end, _ = self._rows(name)
        if self.gather is None:
            raise RequestError(f"{name} is a grid within a list or dict: mend the plan")
        dim = how.dims[0]
        whole = self.gather(x.flatten(dim, how.dims[-1]), dim).unflatten(dim, self.shares.extents)
        return whole.narrow(dim, first, end - first).contiguous()

    def _rows(self, name: str) -> tuple[int, int, tuple[int, int]]:
        """The first row that is near the tokens of this rank, the one behind the last, and these tokens."""
        if len(self.shares.extents) < 2:
            raise RequestError(f"{name} is a grid, of which no input of its plan is an extent: mend the plan")
        row = math.prod(self.shares.extents[1:])
        own = self.shares.own(self.shares.extents[0] * row)
        return max(0, own[0] // row - 1), min(self.shares.extents[0], (own[1] - 1) // row + 2), own

    def extent(self, value: int, how: Extent, name: str) -> int:
        """That of the grid of this rank's tokens. Axes come in their order."""
        self.shares.extents = [*self.shares.extents[: how.axis], value]
        if how.axis:
            return 1
        first, end = self.shares.own(self.shares.totals.get(how.tokens, 0))
        return end - first

    def _joined(self, x: torch.Tensor, how: Joined, name: str) -> torch.Tensor:
        if x.shape[how.dim] == 1 and how.keys is None:
            return x
        lengths = self._lengths(x.shape[how.dim], how, name)
        if how.keys is not None and x.shape[how.keys] != sum(lengths):
            raise RequestError(f"{name} has {x.shape[how.keys]} keys for {sum(lengths)} tokens: mend the plan")
        times = x.shape[how.dim] // max(1, sum(lengths))
        parts = list(zip(how.parts * times, x.split(lengths * times, how.dim), strict=True))
        own = torch.cat([x if how.whole and of is None else self._own(x, how.dim, self._enough(x.shape[how.dim], name)) for of, x in parts], how.dim)
        return own if how.keys is None else own.index_select(how.keys, self._order(lengths).to(x.device))

    def _lengths(self, total: int, how: Joined, name: str) -> list[int]:
        """The tokens of the parts of an input of so many tokens, or of as many for each entry of the batch."""
        known = [None if part is None else self.shares.totals.get(part) for part in how.parts]
        left = total - sum(length for length in known if length is not None)
        unknown = [part for part, length in zip(how.parts, known, strict=True) if length is None]
        fits = left >= 0 if unknown == [None] else not unknown and total > 0 and total % max(1, total - left) == 0
        if not fits:
            raise RequestError(
                f"{name} has {total} tokens, and {', '.join(map(str, how.parts))} have {', '.join(map(str, known))}: mend the plan"
            )
        return [left if length is None else length for length in known]

    def _order(self, totals: Sequence[int]) -> torch.Tensor:
        """Positions of joined tokens in the order of the ranks: the parts of rank 0, those of rank 1, and so on."""
        starts = itertools.accumulate(totals, initial=0)
        cuts = [[start + cut for cut in self.shares.cuts(total)] for start, total in zip(starts, totals, strict=False)]
        return torch.cat([torch.arange(cut[rank], cut[rank + 1]) for rank in range(self.group.size) for cut in cuts])

    def count(self, total: int, name: str) -> int:
        """The tokens of this rank of ``total``."""
        self.shares.totals[name] = self._enough(total, name)
        first, end = self.shares.own(total)
        return end - first

    def _enough(self, total: int, name: str) -> int:
        least = self.shares.least
        if 0 < total < self.group.size * least:
            raise RequestError(
                f"{name} has {total} tokens for {self.group.size} ranks, and each needs {least}: use fewer ranks, or a longer input"
            )
        return total

    def _own(self, x: torch.Tensor, dim: int, total: int) -> torch.Tensor:
        first, end = self.shares.own(total)
        return x.narrow(dim, first, end - first)

    def parts(self, x: Any, how: Any, name: str) -> Any:
        """Of a tensor, of the tensors of a list or dict, or of a number of tokens. Anything else, such as ``None``, stays; so does what has no
        plan."""
        if how is None:
            return x
        if isinstance(x, dict):
            named = how if isinstance(how, Mapping) else dict.fromkeys(x, how)
            return {key: self.parts(item, named.get(key), f"{name}[{key!r}]") for key, item in x.items()}
        if isinstance(x, (list, tuple)):
            each = list(how) if isinstance(how, (list, tuple)) else [how] * len(x)
            if len(each) != len(x):
                raise RequestError(f"{name} has {len(x)} tensors, the plan has {len(each)}: mend the plan")
            return type(x)(self.parts(item, h, name) for item, h in zip(x, each, strict=True))
        if isinstance(how, Count):
            return self.count(x, name)
        if isinstance(how, Extent):
            return self.extent(x, how, name)
        if how is None or not isinstance(x, torch.Tensor):
            return x
        return self.part(x, how, name)


def split_inputs(module: torch.nn.Module, plan: Mapping[Any, Any], splitter: Splitter) -> Callable[..., Any] | None:
    """A pre-hook with keyword arguments that splits the named arguments of ``forward``; ``None`` if there are none."""
    names = {name: how for name, how in plan.items() if isinstance(name, str)}
    if not names:
        return None
    places = {name: index for index, name in enumerate(list(inspect.signature(type(module).forward).parameters)[1:])}
    for name in names:
        if name not in places:
            raise RequestError(
                f"{type(module).__name__}.forward has no argument {name!r}, which the plan names: mend the plan"
            )

    return functools.partial(_split_inputs, splitter, names, places)


@torch.compiler.disable
def _split_inputs(
    splitter: Splitter,
    names: dict[str, Any],
    places: dict[str, int],
    _: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if splitter.shares.whole:
        return args, kwargs
    own, given = list(args), dict(kwargs)
    with told(splitter.group):
        for name, how in names.items():
            if name in given:
                given[name] = splitter.parts(given[name], how, name)
            elif places[name] < len(own):
                own[places[name]] = splitter.parts(own[places[name]], how, name)
    return tuple(own), given


def split_outputs(module: torch.nn.Module, plan: Mapping[Any, Any], splitter: Splitter) -> Callable[..., Any] | None:
    """A hook that splits the outputs whose numbers the plan names; ``None`` if there are none."""
    outputs = {index: how for index, how in plan.items() if isinstance(index, int)}
    if not outputs:
        return None
    return functools.partial(_split_outputs, splitter, outputs)


@torch.compiler.disable
def _split_outputs(splitter: Splitter, outputs: dict[int, Any], module: torch.nn.Module, args: Any, output: Any) -> Any:
    if splitter.shares.whole:
        return output
    name = type(module).__name__
    with told(splitter.group):
        if isinstance(output, torch.Tensor):
            part = splitter.cells if isinstance(outputs[0], Grid) else splitter.part
            return part(output, outputs[0], f"the output of {name}")
        values = list(output)
        for index, how in outputs.items():
            if index >= len(values):
                raise RequestError(f"{name} has {len(values)} outputs, the plan splits number {index}: mend the plan")
            values[index] = splitter.part(values[index], how, f"output {index} of {name}")
        return tuple(values)


def is_split(module: torch.nn.Module) -> bool:
    """Whether hooks of a split are on the module or its parts."""
    return any(
        isinstance(hook, functools.partial) and hook.func in (_split_inputs, _split_outputs, _gather_outputs)
        for part in module.modules()
        for hook in (*part._forward_pre_hooks.values(), *part._forward_hooks.values())
    )


def gather_outputs(module: torch.nn.Module, plan: Any, split: Split) -> Callable[..., Any]:
    """A hook that replaces outputs by those of the tokens of all ranks, on each rank. That of a copy of the module has a copy of ``split``."""
    each = [plan] if isinstance(plan, ContextParallelOutput) else list(plan)
    return functools.partial(_gather_outputs, split, each)


@torch.compiler.disable
def _gather_outputs(split: Split, each: list[Any], module: torch.nn.Module, args: Any, output: Any) -> Any:
    if split.shares.whole:
        return output
    name = type(module).__name__
    values = [output] if isinstance(output, torch.Tensor) else list(output)
    with told(split.group):
        if len(values) != len(each):
            raise RequestError(f"{name} has {len(values)} outputs, the plan gathers {len(each)}: mend the plan")
        for index, how in enumerate(each):
            if how is None:
                continue
            if how.expected_dims is not None and values[index].dim() != how.expected_dims:
                raise RequestError(
                    f"the output of {name} has {values[index].dim()} axes, the plan expects {how.expected_dims}: mend the plan"
                )
            values[index] = split.gather(values[index], how.gather_dim)
    return values[0] if isinstance(output, torch.Tensor) else tuple(values)


class Checkpoints:
    """Blocks with gradient checkpointing, which ``backward()`` runs again: their calls of attention are those of the forward."""

    def __init__(self, transformer: torch.nn.Module, split: Split) -> None:
        self._transformer, self._split = transformer, split
        self._before: list[tuple[torch.nn.Module, Any]] = []

    def remember(self) -> None:
        """At the beginning of a forward. It may be called again without :meth:`restore`."""
        self.restore()
        for module in self._transformer.modules():
            checkpoint = getattr(module, _CHECKPOINT, None)
            if checkpoint is not None and getattr(module, "gradient_checkpointing", False):
                self._before.append((module, checkpoint))
                setattr(module, _CHECKPOINT, self._remembering(checkpoint))

    def restore(self) -> None:
        """At its end."""
        while self._before:
            module, checkpoint = self._before.pop()
            setattr(module, _CHECKPOINT, checkpoint)

    def _remembering(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        def run(block: Callable[..., Any], *args: Any) -> Any:
            position, times = self._split.position(), itertools.count()

            def again(*inputs: Any) -> Any:
                if next(times) == 0:
                    return block(*inputs)
                with self._split.repeated(position):
                    return block(*inputs)

            return checkpoint(again, *args)

        return run
