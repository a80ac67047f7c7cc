"""The machine of a group, and the ways to run a call on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from . import _kyklos
from ._errors import RequestError


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
