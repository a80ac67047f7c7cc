"""Forwards that single ranks compute whole, and tell the others the results."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..._rows import gather
from .._attention import Split
from .calls import Inputs, copied, entries_of, same, tensors_of
from .choice import Way, Ways
from .form import Form, has_right_entries, is_near, key_of

# Elements of a row that travels.
_ROW = 64
# Second calls that came otherwise than predicted, or could not be predicted, one after the other, before pairs are given up. And split forwards that
# check one way.
_MISSES, _CHECKS = 4, 8

#: The rank that computes it, its inputs, and the form of its output.
Call = tuple[int, Inputs, Form]


class Whole:
    """Computes forwards of a transformer whose ways are chosen. A way is used for inputs of a kind, and a state of the transformer, once a split
    forward has confirmed its result."""

    def __init__(self, split: Split, ways: Ways, transformer: torch.nn.Module, forward: Callable[..., Any]) -> None:
        self._split, self._ways, self._transformer, self._forward = split, ways, transformer, forward
        self._forms: dict[tuple[Any, ...], Form] = {}
        #: Ways that are confirmed: with the key of the inputs, and whether they are the second call of a pair.
        self._right: list[tuple[Way, tuple[Any, ...], bool]] = []
        #: What the forward that runs does instead, and what its end checks.
        self._instead: Callable[[], Any] | None = None
        self._check: Callable[[Any], None] | None = None
        #: The predicted second call with its output, and the output of the first one.
        self._kept: tuple[Inputs, Any, Any] | None = None
        self._misses, self._checks = 0, 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Whole:
        """That of a copy of the transformer."""
        split, ways = copy.deepcopy(self._split, memo), copy.deepcopy(self._ways, memo)
        return Whole(split, ways, copy.deepcopy(self._transformer, memo), copy.deepcopy(self._forward, memo))

    def begin(self, inputs: Inputs) -> None:
        """A forward begins, before any input is split."""
        ways, self._instead, self._check = self._ways, None, None
        kept, self._kept = self._kept, None
        if torch.is_grad_enabled() or not ways.whole:
            return
        way, is_second = ways.way, ways.way.pair is not None and ways.pairs.is_second
        key = key_of(self._transformer, inputs)
        form = self._forms.get(key)
        second = ways.pairs.second() if way.pair is not None else None
        form_of_second = None if second is None else self._forms.get(key_of(self._transformer, second))
        hits = kept is not None and is_second and inputs.keys() == kept[0].keys() and all(same(inputs[name], x) for name, x in kept[0].items())
        # A rank may have seen less than another one: after a fault, or by rounding.
        seen = (
            form is not None and not form.can_travel,
            form is not None and form.can_travel,
            (way, key, is_second) in self._right,
            hits,
            form_of_second is not None and form_of_second.can_travel,
            kept is not None,
        )
        rows = self._split.passes.compare([int(one) for one in seen], "whole")
        stays, known, right, hits, has_second, has_kept = (all(column) for column in zip(*rows, strict=True))
        if is_second and kept is not None and hits:
            output = kept[1]
            self._misses = 0
            if right:
                self._instead = lambda: output
                return
            self._confirm(way, key, is_second=True, check=lambda expected: self._all(is_near(output, expected, kept[2])))
        elif way.pair is not None and (is_second or not has_second):
            # Pairs begin with their first call.
            self._misses += has_kept or not is_second
            if self._misses >= _MISSES:
                ways.fail(way)
        elif stays or (known and way.cuts_batch and form is not None and not form.has_entries(sum(way.entries))):
            ways.fail(way)
        elif known and form is not None:
            calls = self._calls(way, inputs, form, second, form_of_second)
            if right:
                self._instead = lambda: self._result(way, calls, form, self._own(calls))
                return
            self._confirm(way, key, is_second=False, check=lambda expected: self._agrees(way, calls, form, expected))
        ways.split()

    def run(self, args: Sequence[Any], options: Inputs) -> Any:
        if self._instead is None or not self._split.active:
            return self._forward(*args, **options)
        instead, self._instead = self._instead, None
        return instead()

    def end(self, output: Any) -> None:
        """The forward has ended well."""
        ways = self._ways
        if torch.is_grad_enabled() or ways.whole or not ways.learns:
            return
        self._forms[key_of(self._transformer, self._split.inputs)] = Form.of(output)
        check, self._check = self._check, None
        if check is not None:
            check(output)

    def forget(self) -> None:
        """The split ends."""
        self._forms, self._right, self._kept, self._instead, self._check = {}, [], None, None, None

    def _confirm(self, way: Way, key: tuple[Any, ...], is_second: bool, check: Callable[[Any], bool]) -> None:
        """Lets the split forward that runs say whether a way is right. ``check`` is equal on all ranks."""
        self._checks += 1
        if self._checks > _CHECKS:
            self._ways.fail(way)
            return

        def confirm(output: Any) -> None:
            if check(output):
                self._right.append((way, key, is_second))
                self._checks = 0
            else:
                self._ways.fail(way)
            self._ways.leave_out()

        self._check = confirm

    def _agrees(self, way: Way, calls: Sequence[Call], form: Form, expected: Any) -> bool:
        """Whether a way computes this output, on all ranks. It may lack the memory for it."""
        self._ways.whole = True
        try:
            own = self._own(calls)
        except Exception:
            own = None
        try:
            if not self._all(own is not None):
                return False
            got = self._result(way, calls, form, own)
            if way.cuts_batch:
                return self._all(has_right_entries(got, expected, sum(way.entries)))
            return self._all(is_near(got, expected))
        finally:
            self._ways.whole = False

    def _all(self, ok: bool) -> bool:
        return all(number for (number,) in self._split.passes.compare([int(ok)], "agreement"))

    @staticmethod
    def _calls(way: Way, inputs: Inputs, form: Form, second: Inputs | None, form_of_second: Form | None) -> list[Call]:
        """The calls of a way: of a pair both, else one for each rank that has entries of the batch."""
        if way.pair is not None:
            assert second is not None and form_of_second is not None
            return [(way.pair[0], inputs, form), (way.pair[1], second, form_of_second)]
        if not way.cuts_batch:
            return [(way.entries.index(sum(way.entries)), inputs, form)]
        calls, first, batch = [], 0, sum(way.entries)
        for rank, count in enumerate(way.entries):
            if count:
                calls.append((rank, entries_of(inputs, first, first + count, batch), form.entries(count)))
            first += count
        return calls

    def _result(self, way: Way, calls: Sequence[Call], form: Form, own: list[Any] | None) -> Any:
        """The output on all ranks; of a pair that of its first call."""
        outputs = self._exchanged(calls, own)
        if way.pair is not None:
            self._kept = calls[1][1], outputs[1], outputs[0]
            return outputs[0]
        if not way.cuts_batch:
            return outputs[0]
        parts = [tree_flatten(output)[0] for output in outputs]
        joined = [torch.cat(each) if isinstance(each[0], torch.Tensor) else each[0] for each in zip(*parts, strict=True)]
        return tree_unflatten(joined, form.spec)

    def _own(self, calls: Sequence[Call]) -> list[Any]:
        """The output of this rank's call, flat; nothing if it has none."""
        for rank, inputs, form in calls:
            if rank == self._split.group.rank:
                # Some models write to their inputs.
                output = self._forward(**copied(inputs))
                if Form.of(output) != form:
                    raise RuntimeError(f"an output of {self._split.name} has another form than before, with inputs of the same shapes")
                return tree_flatten(output)[0]
        return []

    def _exchanged(self, calls: Sequence[Call], own: list[Any] | None) -> list[Any]:
        """The outputs of all calls."""
        outputs: list[list[Any]] = [[] for _ in calls]
        order = sorted(range(len(calls)), key=lambda at: calls[at][0])
        for place, leaf in enumerate(calls[0][2].leaves):
            if not isinstance(leaf, torch.dtype):
                for leaves in outputs:
                    leaves.append(leaf)
                continue
            shapes = [form.shapes[place] for _, _, form in calls]
            rows = _rows(own[place]) if own else torch.empty(1, 0, _ROW, dtype=leaf)
            whole = gather(self._split.group, rows, f"{self._split.place()}, output {place}")[0]
            lengths = [-(-math.prod(shape) // _ROW) for shape in shapes]
            cut = dict(zip(order, whole.split([lengths[at] for at in order]), strict=True))
            for at, leaves in enumerate(outputs):
                # Its own memory: one output may live longer than another.
                flat = cut[at].reshape(-1)[: math.prod(shapes[at])].clone()
                leaves.append(flat.reshape(shapes[at]).to(_device(calls[at][1])))
        return [tree_unflatten(leaves, form.spec) for leaves, (_, _, form) in zip(outputs, calls, strict=True)]


@torch.compiler.disable(recursive=False)
def run(whole: Whole, *args: Any, **options: Any) -> Any:
    """In place of ``forward`` of the transformer."""
    return whole.run(args, options)


def _rows(x: torch.Tensor) -> torch.Tensor:
    flat = x.detach().reshape(-1)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % _ROW)).reshape(1, -1, _ROW)


def _device(inputs: Inputs) -> torch.device:
    return next((x.device for x in tensors_of(inputs)), torch.device("cpu"))
