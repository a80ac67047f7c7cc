"""The strategies of a split model's passes, by predicted time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from .._errors import RequestError
from .._plan import Cluster
from .pace import Reach


class Strategies:
    """Chooses how attention runs in passes of some lengths. All ranks choose the same, without a message.

    :param call: heads, key/value heads, head dim and type of the calls.
    :param attention: query heads of all layers that reach so far, for each reach.
    :param wire: the format of keys and values on their way.
    """

    def __init__(self, cluster: Cluster, call: dict[str, Any], attention: Sequence[tuple[int, Reach]], wire: str | None) -> None:
        self._cluster, self._call, self._attention, self._wire = cluster, call, attention, wire
        self._chosen: dict[tuple[int, tuple[int, ...], bool], dict[str, Any]] = {}

    def of(self, batch: int, counts: Sequence[int], gradients: bool) -> dict[str, Any]:
        """Options of :meth:`Group.attend` for so many tokens of each rank."""
        key = batch, tuple(counts), gradients
        if key not in self._chosen:
            self._chosen[key] = self._fastest(batch, counts, gradients)
        return self._chosen[key]

    def _fastest(self, batch: int, counts: Sequence[int], gradients: bool) -> dict[str, Any]:
        seconds: dict[tuple[str, str], float] = {}
        reaches: Counter[tuple[str, str]] = Counter()
        for heads, (left, right) in self._attention:
            mask = f"window:{-1 if left is None else left},{-1 if right is None else right}"
            asked = {**self._call, "batch": batch, "mask": mask, "wire": self._wire, "gradients": gradients}
            for choice in self._cluster.choices(counts, **asked):
                way = choice.strategy, choice.mesh
                seconds[way] = seconds.get(way, 0.0) + choice.seconds * heads / self._call["heads"]
                reaches[way] += 1
        # What does not fit one kind of layers is no way.
        fitting = [way for way in seconds if reaches[way] == len(self._attention)]
        if not fitting:
            raise RequestError(f"no strategy fits passes of {sum(counts)} tokens: use fewer, or name one")
        strategy, mesh = min(fitting, key=lambda way: seconds[way])
        return {"mesh": mesh, "strategy": strategy, "wire": self._wire}
