"""Caches of keys and values."""

from __future__ import annotations

from . import _kyklos


class KvCache:
    """This rank's part of a cache of keys and values, of :meth:`Group.kv_cache`. ``len(cache)`` is the number of tokens that
    were appended, on all ranks together, less those taken back."""

    def __init__(self, core: _kyklos.Cache) -> None:
        self._core = core

    def __len__(self) -> int:
        return len(self._core)

    @property
    def bytes(self) -> int:
        """Bytes of the keys and values on this rank."""
        return self._core.bytes

    def tokens(self, rank: int) -> list[tuple[int, int]]:
        """The positions that ``rank`` holds, as half-open ranges."""
        return self._core.tokens(rank)

    def truncate(self, length: int) -> None:
        """Takes back the newest tokens, so that ``length`` are left. All ranks do it before the next call."""
        self._core.truncate(length)
