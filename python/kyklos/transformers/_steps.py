"""One vote for the layers of a step that all ranks compute, as decoding does.

A step repeats the attention calls of the one before it: the same layers in the same order, with the same mask rules and options.
So at the first of consecutive calls that are alike, the ranks vote on all of them. The vote has the names of the layers and their
caches. Afterwards each rank compares each of its calls with what it announced, so the n-th calls of all ranks are of one layer.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .._cache import CachedCalls, KvCache
from .._errors import RequestError
from .._group import Group

# What a label of a call may have at most.
_LABEL_BYTES = 128


@dataclass(frozen=True)
class LayerCall:
    """An attention call of a step."""

    name: str
    store: KvCache
    #: What calls after one vote have in common: options, and shapes without the axis of tokens.
    kind: tuple[Any, ...]


class Step:
    """The attention calls of one pass with a cache, of which all ranks compute all tokens."""

    def __init__(self, group: Group, label: str, last: Sequence[LayerCall]) -> None:
        self._group = group
        self._label = label
        #: The calls of the last step with this cache; empty if a vote for each call is needed.
        self._last = last
        #: The calls of this step so far.
        self.calls: list[LayerCall] = []
        self._open: CachedCalls | None = None

    def attend(self, call: LayerCall, states: list[torch.Tensor], options: dict[str, Any]) -> torch.Tensor:
        """The output of ``states``, which are q, k and v as :meth:`Group.attend_cached` takes them."""
        if self._open is None:
            alike = self._alike(call)
            if len(alike) < 2:
                self.calls.append(call)
                options = {**options, "label": label(self._label, call.name)}
                return self._group.attend_cached(call.store, *states, **options)[0]
            # The vote has the order of the caches; a number stands for the names, which may be long.
            names = zlib.crc32(" ".join(each.name for each in alike).encode())
            options = {**options, "label": label(self._label, f"{len(alike)} layers {names:08x} from {call.name}")}
            self._open = self._group.cached_calls([each.store for each in alike], *states, **options)
        elif call != self._last[len(self.calls)]:
            raise RequestError(
                f"attention at {call.name}, where the step before had {self._last[len(self.calls)].name}, or the same with other "
                "options: the ranks have voted on calls like those of the step before; do not change the model during a text"
            )
        output = self._open.attend(*states)[0]
        self.calls.append(call)
        if self._open.remaining == 0:
            self._open = None
        return output

    def end(self, error: BaseException) -> None:
        """Ends a step that failed. If calls are missing on which the ranks have voted, that ends the group on all ranks."""
        if self._open is not None:
            self._group.abort(f"{type(error).__name__} in the middle of a step: {error}")
            self._open.close()
            self._open = None

    def _alike(self, call: LayerCall) -> Sequence[LayerCall]:
        """This call and those after it that are of its kind, if this step has been as the last one so far."""
        first = len(self.calls)
        if call not in self._last[first : first + 1]:
            self._last = ()
        end = first
        while end < len(self._last) and self._last[end].kind == call.kind:
            end += 1
        return self._last[first:end]


def label(beginning: str, name: str) -> str:
    """A label of a call; of a long name its end."""
    return f"{beginning} {name[len(beginning) - _LABEL_BYTES + 1 :]}"
