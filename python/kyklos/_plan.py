"""Plans: what a call would do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from . import _kyklos
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
