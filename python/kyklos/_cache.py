"""Caches of keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import _kyklos
from ._arrays import like


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

    def __reduce__(self) -> Any:
        raise TypeError("a cache over ranks cannot be copied or pickled: take tokens back instead, or fill another cache")


class CachedCalls:
    """One call on each of several caches after one vote: the layers of a step. :meth:`Group.cached_calls` makes it.

    All ranks make all of these calls, the n-th on the n-th cache, and no other call before the last one. A rank that does
    not ends the group on all ranks: at the end of a ``with`` block, or by :meth:`close`.
    """

    def __init__(
        self, group: _kyklos.Group, call: _kyklos.Call, caches: Sequence[KvCache], q: Any, k: Any, v: Any
    ) -> None:
        if not all(isinstance(cache, KvCache) for cache in caches):
            raise group.refuse("something else among the caches of calls", "pass those that Group.kv_cache has made")
        self._core = _kyklos.CachedCalls(group, call, [cache._core for cache in caches], q, k, v)
        #: Calls that have not been made.
        self.remaining = len(caches)

    def attend(self, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """The call on the next cache, as :meth:`Group.attend_cached`, with arrays of the shapes and the type that were announced.

        :raises RequestError: other arrays, or a call too many; on this rank only, which can make the call again. On all ranks for
            elements beyond the range of ``wire="f16"``: all make the call again, or none.
        :raises GroupError: the group has ended.
        """
        o, lse = self._core.attend(q, k, v)
        self.remaining -= 1
        return like(q, o), like(q, lse)

    def close(self) -> None:
        """Ends the calls. If some are missing, that ends the group on all ranks."""
        self._core.close()

    def __enter__(self) -> CachedCalls:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
