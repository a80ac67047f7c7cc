"""The calls of split attention in a forward: as many as the plan says, or the keys of some module are not those of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._errors import RequestError


class Calls:
    """Those of one transformer.

    :param always: calls in each forward, of the whole batch or of each of its entries.
    :param where_given: calls in forwards that are given the input of this name, likewise.
    """

    def __init__(self, name: str, always: int, where_given: Mapping[str, int] | None = None, each_entry: bool = False) -> None:
        self._name, self.always, self.where_given, self._each_entry = name, always, dict(where_given or {}), each_entry
        #: Of the forward that runs: calls so far, and all.
        self.made, self._due = 0, always

    def begin(self, inputs: Mapping[str, Any]) -> None:
        """A forward begins."""
        self.made, self._due = 0, self.always
        self._due += sum(calls for name, calls in self.where_given.items() if inputs.get(name) is not None)
        if self._each_entry:
            self._due *= inputs["hidden_states"].shape[0]

    def next(self) -> int:
        """The number of the call that begins.

        :raises RequestError: one too many.
        """
        self.made += 1
        if self.made > self._due:
            raise RequestError(
                f"{self._name} makes more than the {self._due} calls of split attention that its plan has in a forward: name in "
                "plan.attention the modules whose keys are split, and unload adapters that attend to other tokens"
            )
        return self.made

    def end(self) -> None:
        """A forward ends.

        :raises RequestError: an attention call is missing: it ran on the tokens of this rank alone, or not at all.
        """
        if self.made != self._due:
            raise RequestError(
                f"{self._name} made {self.made} calls of split attention in a forward, its plan has {self._due}: call parallelize "
                "again after a change of attention processors, and name in plan.attention the modules whose keys are split"
            )
