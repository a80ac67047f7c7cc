"""The strategies of a split model's passes, by predicted time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._plan import Cluster
from .pace import Reach


class Strategies:
    """Chooses how attention runs in passes of each length. All ranks choose the same, without a message.

    :param call: heads, key/value heads, head dim and type of the calls.
    :param attention: query heads of all layers that reach so far, for each reach.
    :param wire: the format of keys and values on their way.
    """

    def __init__(self, cluster: Cluster, call: dict[str, Any], attention: Sequence[tuple[int, Reach]], wire: str | None) -> None:
        self._cluster, self._call, self._attention, self._wire = cluster, call, attention, wire
        self._chosen: dict[tuple[int, int, bool], dict[str, Any]] = {}

    def of(self, batch: int, counts: Sequence[int], gradients: bool) -> dict[str, Any]:
        """Options of :meth:`Group.attend` for so many tokens of each rank. Lengths up to the same power of two have the same."""
        key = batch, sum(counts).bit_length(), gradients
        if key not in self._chosen:
            self._chosen[key] = self._fastest(batch, counts, gradients)
        return self._chosen[key]

    def _fastest(self, batch: int, counts: Sequence[int], gradients: bool) -> dict[str, Any]:
        seconds: dict[tuple[str, str], float] = {}
        for heads, (left, right) in self._attention:
            mask = f"window:{-1 if left is None else left},{-1 if right is None else right}"
            asked = {**self._call, "batch": batch, "mask": mask, "wire": self._wire, "gradients": gradients}
            for choice in self._cluster.choices(counts, **asked):
                way = choice.strategy, choice.mesh
                seconds[way] = seconds.get(way, 0.0) + choice.seconds * heads / self._call["heads"]
        strategy, mesh = min(seconds, key=lambda way: seconds[way])
        return {"mesh": mesh, "strategy": strategy, "wire": self._wire}
