"""Tokens by the speed of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import _kyklos
from ._plan import Cluster
from ._sequence import in_sequence


@dataclass(frozen=True)
class Shares:
    """The tokens of all ranks, of :meth:`Group.share`.

    ::

        shares = group.share(tokens, heads=8, dim=64, mask="causal")
        rows = shares.queries(group.rank)                    # q, k and v are of the whole sequence
        o, lse = group.attend(q[:, rows], k[:, rows], v[:, rows], mask="causal", **shares.options)
    """

    #: For each rank the positions of its queries, in the order of its rows, as half-open ranges.
    q_tokens: list[list[tuple[int, int]]]
    #: The same of its keys.
    kv_tokens: list[list[tuple[int, int]]]
    #: The mesh that they are for, and the strategy.
    mesh: str
    strategy: str

    @property
    def options(self) -> dict[str, Any]:
        """Options of :meth:`Group.attend`."""
        return {"q_tokens": self.q_tokens, "kv_tokens": self.kv_tokens, "mesh": self.mesh, "strategy": self.strategy}

    def queries(self, rank: int) -> list[int]:
        """The positions of the queries of ``rank``, in the order of its rows."""
        return [position for first, end in self.q_tokens[rank] for position in range(first, end)]

    def keys(self, rank: int) -> list[int]:
        """The positions of the keys of ``rank``, in the order of its rows."""
        return [position for first, end in self.kv_tokens[rank] for position in range(first, end)]


class Sharing:
    """What a group has for it."""

    _core: _kyklos.Group

    @in_sequence
    def speeds(
        self, q_len: int, kv_len: int | None = None, *, heads: int, dim: int, kv_heads: int | None = None, dtype: str = "float32"
    ) -> list[int]:
        """How many pairs of a query and a key, over all heads, each rank attends to in a second, while all of them compute. Measured at
        the first call of its kind, and corrected by the calls of this group. All ranks call it with the same arguments.
        """
        return self._core.speeds(_call_of(q_len, kv_len, heads, dim, kv_heads, dtype, shares="even"))

    @in_sequence
    def cluster(
        self, q_len: int, kv_len: int | None = None, *, heads: int, dim: int, kv_heads: int | None = None, dtype: str = "float32"
    ) -> Cluster:
        """The devices of this group and the links between them, each rank as a host of its own: :meth:`speeds`, copies on the device, and
        messages between each two ranks, of all ranks at once. Takes about a tenth of a second for each pair. All ranks call it with the
        same arguments, and get the same.

        :raises RequestError: more than 64 ranks; arguments that do not fit each other or those of another rank.
        """
        return Cluster(self._core.cluster(_call_of(q_len, kv_len, heads, dim, kv_heads, dtype, shares="even")))

    @in_sequence
    def share(
        self,
        q_len: int,
        kv_len: int | None = None,
        *,
        heads: int,
        dim: int,
        kv_heads: int | None = None,
        batch: int = 1,
        dtype: str = "float32",
        shares: str | Sequence[float] = "auto",
        mask: str | None = "full",
        q_offset: int = 0,
        fixed_order: bool = False,
        strategy: str | None = None,
        mesh: str | None = None,
        placement: str | None = None,
    ) -> Shares:
        """Deals the tokens of calls of one shape among the ranks. All ranks call it with the same arguments.

        :param q_len: queries of all ranks; ``kv_len`` keys, by default as many.
        :param shares: ``"auto"`` by speed, so that all ranks end at the same time: each rank measures its device once for each
            class of calls, and then follows the calls of this group. Speeds that differ by less than a tenth give even shares,
            and shares change only where that promises a tenth less time; so call it again before each call, or keep the first
            answer. ``"even"``; or a weight for each rank, 0 for no tokens. A rank that would make the call slower gets none.
            Speed counts for queries on a ring: with Ulysses alone, a fixed order and strategies that move queries, ``"auto"`` is
            even.
        :param mask: likewise ``q_offset``, ``fixed_order``, ``strategy``, ``mesh``, ``placement``: those of the calls. Without a
            mesh a ring of all ranks.
        :raises RequestError: arguments that do not fit each other or those of another rank.
        """
        call = _call_of(
            q_len,
            kv_len,
            heads,
            dim,
            kv_heads,
            dtype,
            batch=batch,
            mask="full" if mask is None else mask,
            q_offset=q_offset,
            fixed_order=fixed_order,
            strategy=strategy,
            mesh=mesh,
            placement=placement,
            shares=shares,
        )
        return Shares(*self._core.share(call))


def _call_of(
    q_len: int, kv_len: int | None, heads: int, dim: int, kv_heads: int | None, dtype: str, **others: Any
) -> dict[str, Any]:
    """A call, as the extension module takes it."""
    default = {"batch": 1, "mask": "full", "q_offset": 0, "fixed_order": False, "strategy": None, "mesh": None, "placement": None}
    lengths = {"q_len": q_len, "kv_len": q_len if kv_len is None else kv_len}
    given = {"heads": heads, "kv_heads": heads if kv_heads is None else kv_heads, "dim": dim, "dtype": dtype}
    return {**default, **lengths, **given, **others}
