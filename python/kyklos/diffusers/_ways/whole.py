"""Forwards that single ranks compute whole, and tell the others the results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..._rows import gather
from .._attention import Split
from .calls import Inputs, entries_of, same, tensors_of
from .choice import Way, Ways

# Elements of a row that travels.
_ROW = 64
_TYPES = (torch.float32, torch.float16, torch.bfloat16)
# How far results of entries alone may be from those of the batch, relative to their norm: another order of sums, in each layer.
_ROUNDING = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}
# Second calls that came otherwise than predicted, one after the other, before pairs are given up.
_MISSES = 3


@dataclass(frozen=True)
class Form:
    """What outputs of forwards with inputs of some shapes are like."""

    spec: TreeSpec
    #: The types of tensors, and other leaves as they are; the shapes of tensors, and nothing.
    leaves: tuple[Any, ...]
    shapes: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(output: Any) -> Form:
        leaves, spec = tree_flatten(output)
        kept = tuple(leaf.dtype if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        return Form(spec, kept, tuple(tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else () for leaf in leaves))

    @property
    def can_travel(self) -> bool:
        return all(not isinstance(leaf, torch.dtype) or leaf in _TYPES for leaf in self.leaves)

    def has_entries(self, batch: int) -> bool:
        """Whether each tensor has the entries of the batch along its first axis."""
        tensors = (shape for shape, leaf in zip(self.shapes, self.leaves, strict=True) if isinstance(leaf, torch.dtype))
        return all(len(shape) > 0 and shape[0] == batch for shape in tensors)

    def entries(self, count: int) -> Form:
        shapes = (
            (count, *shape[1:]) if isinstance(leaf, torch.dtype) else shape
            for shape, leaf in zip(self.shapes, self.leaves, strict=True)
        )
        return Form(self.spec, self.leaves, tuple(shapes))


#: The rank that computes it, its inputs, and the form of its output.
Call = tuple[int, Inputs, Form]


class Whole:
    """Computes forwards of a transformer whose ways are chosen."""

    def __init__(self, split: Split, ways: Ways, forward: Callable[..., Any]) -> None:
        self._split, self._ways, self._forward = split, ways, forward
        self._forms: dict[tuple[Any, ...], Form] = {}
        #: What the forward that runs does instead.
        self._instead: Callable[[], Any] | None = None
        #: The predicted second call, and its output.
        self._kept: tuple[Inputs, Any] | None = None
        self._misses = 0
        #: Ways that cut the batch: whose results were right, and the one whose result this forward shows.
        self._right: list[Way] = []
        self._checking: tuple[Way, Inputs, Form] | None = None

    def begin(self, inputs: Inputs) -> None:
        """A forward begins, before any input is split."""
        ways, self._instead, self._checking = self._ways, None, None
        kept, self._kept = self._kept, None
        if torch.is_grad_enabled():
            return
        if kept is not None:
            output = kept[1]
            if ways.pairs.is_second and inputs.keys() == kept[0].keys() and all(same(inputs[name], x) for name, x in kept[0].items()):
                self._misses, ways.whole, self._instead = 0, True, lambda: output
                return
            self._misses += 1
            if self._misses >= _MISSES:
                ways.fail(ways.pair_way)
        if ways.whole:
            form = self._forms.get(_key(inputs))
            self._instead = self._computed(inputs, form) if form is not None and form.can_travel else None
            if self._instead is None:
                ways.split()

    def run(self, args: Sequence[Any], options: Inputs) -> Any:
        if self._instead is None or not self._split.active:
            return self._forward(*args, **options)
        instead, self._instead = self._instead, None
        return instead()

    def end(self, output: Any) -> None:
        """The forward has ended well."""
        if torch.is_grad_enabled() or self._ways.whole:
            return
        self._forms[_key(self._split.inputs)] = Form.of(output)
        if self._checking is None:
            return
        # Which inputs have entries of the batch is a guess, which the split forward must confirm.
        (way, inputs, form), self._checking = self._checking, None
        self._ways.whole = True
        calls = self._cut(inputs, form, way)
        try:
            own = self._own(calls)
        except Exception:
            own = None
        if self._all(own is not None) and self._all(_near(self._joined(calls, form, own), output)):
            self._right.append(way)
        else:
            self._ways.fail(way)
        self._ways.leave_out()

    def _all(self, ok: bool) -> bool:
        return all(number for (number,) in self._split.passes.compare([int(ok)], "entries"))

    def _computed(self, inputs: Inputs, form: Form) -> Callable[[], Any] | None:
        """What gives the output for these inputs; nothing if they are to be split after all."""
        way = self._ways.way
        pair = way.pair
        if pair is not None:
            second = self._ways.pairs.second()
            form_of_second = None if second is None else self._forms.get(_key(second))
            if second is None or form_of_second is None or not form_of_second.can_travel:
                return lambda: self._shared([(pair[0], inputs, form)])[0]
            return lambda: self._both(pair, (inputs, form), (second, form_of_second))
        batch = sum(way.entries)
        if not way.cuts_batch:
            return lambda: self._shared([(way.entries.index(batch), inputs, form)])[0]
        if not form.has_entries(batch):
            self._ways.fail(way)
            return None
        if way in self._right:
            calls = self._cut(inputs, form, way)
            return lambda: self._joined(calls, form, self._own(calls))
        self._checking = way, inputs, form
        return None

    def _both(self, pair: tuple[int, int], first: tuple[Inputs, Form], second: tuple[Inputs, Form]) -> Any:
        output, kept = self._shared([(pair[0], *first), (pair[1], *second)])
        self._kept = second[0], kept
        return output

    @staticmethod
    def _cut(inputs: Inputs, form: Form, way: Way) -> list[Call]:
        """A call for each rank that has entries of the batch."""
        calls, first, batch = [], 0, sum(way.entries)
        for rank, count in enumerate(way.entries):
            if count:
                calls.append((rank, entries_of(inputs, first, first + count, batch), form.entries(count)))
            first += count
        return calls

    def _joined(self, calls: Sequence[Call], form: Form, own: list[Any] | None) -> Any:
        parts = [tree_flatten(output)[0] for output in self._exchanged(calls, own)]
        joined = [torch.cat(each) if isinstance(each[0], torch.Tensor) else each[0] for each in zip(*parts, strict=True)]
        return tree_unflatten(joined, form.spec)

    def _shared(self, calls: Sequence[Call]) -> list[Any]:
        """The outputs of calls on all ranks."""
        return self._exchanged(calls, self._own(calls))

    def _own(self, calls: Sequence[Call]) -> list[Any]:
        """The output of this rank's call, flat; nothing if it has none."""
        for rank, inputs, form in calls:
            if rank == self._split.group.rank:
                output = self._forward(**inputs)
                if Form.of(output) != form:
                    raise RuntimeError(f"an output of {self._split.name} has another form than before, with inputs of the same shapes")
                return tree_flatten(output)[0]
        return []

    def _exchanged(self, calls: Sequence[Call], own: list[Any] | None) -> list[Any]:
        outputs: list[list[Any]] = [[] for _ in calls]
        for place, leaf in enumerate(calls[0][2].leaves):
            if not isinstance(leaf, torch.dtype):
                for leaves in outputs:
                    leaves.append(leaf)
                continue
            shapes = [form.shapes[place] for _, _, form in calls]
            rows = _rows(own[place]) if own else torch.empty(1, 0, _ROW, dtype=leaf)
            whole = gather(self._split.group, rows, f"{self._split.place()}, output {place}")[0]
            lengths = [-(-math.prod(shape) // _ROW) for shape in shapes]
            order = sorted(range(len(calls)), key=lambda at: calls[at][0])
            cut = dict(zip(order, whole.split([lengths[at] for at in order]), strict=True))
            for at, leaves in enumerate(outputs):
                flat = cut[at].reshape(-1)[: math.prod(shapes[at])]
                leaves.append(flat.reshape(shapes[at]).to(self._device(calls[at][1])))
        return [tree_unflatten(leaves, form.spec) for leaves, (_, _, form) in zip(outputs, calls, strict=True)]

    @staticmethod
    def _device(inputs: Inputs) -> torch.device:
        return next((x.device for x in tensors_of(inputs)), torch.device("cpu"))


@torch.compiler.disable(recursive=False)
def run(whole: Whole, *args: Any, **options: Any) -> Any:
    """In place of ``forward`` of the transformer."""
    return whole.run(args, options)


def _rows(x: torch.Tensor) -> torch.Tensor:
    flat = x.detach().reshape(-1)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % _ROW)).reshape(1, -1, _ROW)


def _key(inputs: Inputs) -> tuple[Any, ...]:
    """What the form of an output depends on."""
    shapes = ((name, tuple(x.shape for x in tensors_of(given))) for name, given in inputs.items())
    return tuple(shapes), repr(inputs.get("return_dict", True))


def _near(a: Any, b: Any) -> bool:
    """Whether outputs are alike but for rounding."""

    def near(x: torch.Tensor, y: torch.Tensor) -> bool:
        difference, norm = (x.double() - y.double()).norm().item(), y.double().norm().item()
        return difference <= _ROUNDING[y.dtype] * norm

    return all(near(x, y) for x, y in zip(tensors_of(a), tensors_of(b), strict=True))
