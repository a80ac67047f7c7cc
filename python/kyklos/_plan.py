"""Plans: what a call would do, and how long it would take on a machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import _kyklos
from ._errors import RequestError
from ._options import CallOptions, Unpack, complete


class Plan:
    """What a call would do, before any rank is there. ``str()`` is a table for people."""

    def __init__(self, text: str, json_text: str) -> None:
        self._text = text
        self._json = json_text

    @property
    def steps(self) -> dict[str, Any]:
        """Problem, mesh, strategy, and for each rank its tokens, buffers, steps and bytes: as ``kyklos plan --json``."""
        return json.loads(self._json)

    def __str__(self) -> str:
        return self._text


def plan(
    q_counts: Sequence[int],
    kv_counts: Sequence[int] | None = None,
    *,
    heads: int,
    dim: int,
    kv_heads: int | None = None,
    batch: int = 1,
    dtype: str = "float32",
    rank: int | None = None,
    **options: Unpack[CallOptions],
) -> Plan:
    """The plan of :meth:`Group.attend` with these options: what each rank computes, sends and holds.

    :param q_counts: number of queries of each rank; ``kv_counts`` of keys, by default the same.
    :param rank: show the steps of this rank only.
    """
    extents = {
        "batch": batch,
        "heads": heads,
        "kv_heads": heads if kv_heads is None else kv_heads,
        "dim": dim,
        "dtype": dtype,
        "q_counts": list(q_counts),
        "kv_counts": list(q_counts if kv_counts is None else kv_counts),
        "rank": rank,
    }
    return Plan(*_kyklos.plan(complete(options), extents))


@dataclass(frozen=True)
class Choice:
    """A way to run a call, and its prediction."""

    strategy: str
    mesh: str
    #: From the common start to the end of the last rank.
    seconds: float
    #: The most that a rank sends, in bytes, and the most that its buffers hold.
    sent_bytes: int
    memory_bytes: int


class Cluster:
    """Devices and links of a group: measured by :meth:`kyklos.Group.cluster`, or described in TOML as in ``clusters/`` of the repository.

    ::

        cluster = group.cluster(4096, heads=8, dim=64)
        for choice in cluster.choices([2048, 2048], heads=8, dim=64, mask="causal"):
            print(choice.strategy, choice.mesh, choice.seconds)
        Path("home.toml").write_text(str(cluster))  # kyklos plan --explain --hardware home.toml
    """

    def __init__(self, toml: str) -> None:
        self._toml = toml

    def choices(
        self,
        counts: Sequence[int],
        *,
        heads: int,
        dim: int,
        kv_heads: int | None = None,
        batch: int = 1,
        dtype: str = "float32",
        mask: str = "full",
        wire: str | None = None,
        mesh: str | None = None,
        strategy: str | None = None,
        gradients: bool = False,
    ) -> list[Choice]:
        """The ways to attend to consecutive tokens of each rank, the fastest first. No rank waits for another.

        :param counts: tokens of each rank.
        :param wire: the format of keys and values on their way, as in :meth:`kyklos.Group.attend`.
        :param mesh: only this mesh; likewise ``strategy``.
        :param gradients: count :meth:`kyklos.Group.backward`, too.
        :raises RequestError: a call that does not fit itself or the cluster, in any way.
        """
        asked = {
            "batch": batch,
            "heads": heads,
            "kv_heads": heads if kv_heads is None else kv_heads,
            "dim": dim,
            "dtype": dtype,
            "mask": mask,
            "counts": list(counts),
            "wire": wire,
            "mesh": mesh,
            "strategy": strategy,
            "gradients": gradients,
        }
        priced = _kyklos.choices(self._toml, asked)
        fitting = [Choice(strategy, mesh, found[0] / 1e9, *found[1:]) for strategy, mesh, found, _ in priced if found is not None]
        if not fitting:
            raise RequestError(next((refusal for *_, refusal in priced if refusal), "no mesh fits the ranks: use fewer"))
        return fitting

    def __str__(self) -> str:
        return self._toml
