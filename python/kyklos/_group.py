"""Groups of ranks."""

from __future__ import annotations

import atexit
import json
import weakref
from collections.abc import Sequence
from typing import Any

from . import _kyklos
from ._arrays import is_tensor, like, records_gradients
from ._backward import Differentiable
from ._cache import CachedCalls, KvCache
from ._errors import GroupError, RequestError
from ._forming import Forming
from ._options import CallOptions, Unpack, complete
from ._plan import Plan, plan
from ._sequence import in_sequence
from ._shares import Sharing

# Groups that the end of the interpreter closes: a rank that just ends looks to the others as if it had died.
_open: weakref.WeakSet[Group] = weakref.WeakSet()


class Group(Forming, Sharing, Differentiable):
    """One rank of a group, with its device.

    All ranks make the same calls in the same order; each passes its own tokens and gets the rows of its own queries. A call
    begins with a vote: if the ranks disagree, each gets a :class:`RequestError` and the group stays usable. If a rank fails,
    the calls of all ranks end with a :class:`GroupError` that names it. A rank that leaves out a call, because it failed before the
    vote, is an error of all ranks at its next call.

    A group is a context manager: leaving the block closes it, and an exception that leaves the block ends it on all ranks.

    ::

        with kyklos.Group.from_env() as group:
            o, lse = group.attend(q, k, v, mask="causal")
    """

    def __init__(self, core: _kyklos.Group, deadline_s: float = 60.0) -> None:
        self._core = core
        #: Longest time of a message or a vote, in seconds.
        self.deadline_s = deadline_s
        self._closed = False
        #: Calls that a vote has refused so far.
        self._refused = 0
        _open.add(self)

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        return self._core.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._core.size

    @property
    def device(self) -> str:
        """Name of this rank's device."""
        return self._core.device

    @property
    def gpu(self) -> int | None:
        """Index of this rank's NVIDIA GPU, whose arrays are read in place; ``None`` on another device."""
        return self._core.gpu

    @property
    def torch_device(self) -> str | None:
        """PyTorch's name of this rank's device, whose tensors are read in place, as ``"cuda:0"``; ``None`` if the device is not one
        of PyTorch."""
        return self._core.torch_device

    def kernel(self, dim: int, dtype: str = "float32") -> str:
        """The kernels that attend on this rank's device, for heads of ``dim`` elements and many queries. ``docs/kernels.md`` explains
        them."""
        return self._core.kernel(dim, dtype)

    @property
    def network(self) -> str | None:
        """The network path of this rank in one line; ``None`` within one process."""
        return self._core.network

    @property
    def collective(self) -> str:
        """How keys, values and states go between the ranks, such as ``"NCCL 2.28.9"`` or ``"torch.distributed (nccl)"``; if NCCL
        is not used, why: ``"host memory; NCCL is not used: rank 1: …"``."""
        return self._core.collective

    @property
    def report(self) -> dict[str, Any]:
        """Figures of the last call on this rank: times in nanoseconds (``…_ns``), traffic in bytes."""
        return json.loads(self._core.report)

    @in_sequence
    def attend(self, q: Any, k: Any, v: Any, *, lse_pair: bool = False, **options: Unpack[CallOptions]) -> tuple[Any, Any]:
        """Exact attention over the tokens of all ranks: ``softmax(scale · q kᵀ, masked) v``.

        ``q``, ``k`` and ``v`` are this rank's tokens: NumPy arrays, tensors of PyTorch, or anything else with DLPack, of
        float32, float16 or bfloat16, in host memory, on the NVIDIA GPU :attr:`gpu` or on :attr:`torch_device`. Ranks may hold any numbers of tokens, zero included; they tell each other. Arrays are
        read in place, whatever the strides of batch, tokens and heads (on :attr:`torch_device` dense ones; others are copied there). Do not write to them before the call returns. Before any element
        is read, the axes and types of all arrays are compared with each other and with the calls of the other ranks.

        Shapes, with ``layout="bshd"``: ``q [batch, tokens, heads, dim]``, ``k`` and ``v [batch, tokens, kv_heads, dim]``, where
        ``heads`` is a multiple of ``kv_heads``.

        :param mask: which keys a query sees, by global position: ``"full"``, ``"causal"``, ``"window:LEFT,RIGHT"`` (``-1``:
            unbounded), ``"valid:N,…"`` (keys of each batch entry), ``"documents:0,END,…"``; joined by ``+``, one mask for each
            batch entry joined by ``//``. The notation is that of ``kyklos attend --mask``.
        :param scale: factor on q·k; by default ``1/√dim``.
        :param softcap: logits become ``softcap · tanh(logit / softcap)``.
        :param sinks: one logit without a value for each query head.
        :param bias: a row for each of this rank's queries, with axes of extent 1 where batch entries or heads share it: bool
            ``[batch, tokens, heads, keys]`` (false hides a key), or of the type of q, added to the logits. ``keys`` are the
            keys of all ranks, by position. With ``layout="bhsd"``: ``[batch, heads, tokens, keys]``. Numbers may be on the GPU
            :attr:`gpu`, if rows end on a 4-byte boundary: they are copied there once. All other biases are in host memory; numbers in
            rows that end on a 4-byte boundary are read in place, others are packed in each call.
        :param key_bias: the same for all queries: ``[batch, keys]`` or ``[batch, heads, keys]``, equal on all ranks.
        :param q_offset: position of the first query; key 0 is at position 0.
        :param layout: ``"bshd"``, or ``"bhsd"`` for ``[batch, heads, tokens, dim]``, also of the output. Tensors of PyTorch need it, since
            models have both and the wrong one gives wrong numbers. Other arrays are ``"bshd"`` by default.
        :param label: a text that must be the same on all ranks, such as ``"layer 3"``.
        :param strategy: how keys, values or queries travel; by default what sends the fewest bytes. ``docs/strategies.md`` has
            the names.
        :param mesh: ``"UxR"``: Ulysses groups of U ranks, in a ring of R.
        :param placement: ``"contiguous"``, ``"zigzag"``, ``"striped"`` or ``"per-document"``; the last three need ``mesh``.
        :param q_tokens: for each rank the global positions of its queries, in the order of its rows, as half-open ranges; with
            ``kv_tokens`` for its keys. They replace ``placement``.
        :param wire: format in which keys and values travel: ``"f16"`` or ``"int8"`` round them; ``"same"`` by default. With ``"f16"``,
            finite elements beyond ±65,504 are an error of all ranks.
        :param fixed_order: sums in an order that does not depend on the mesh.
        :param inference: no :meth:`backward` follows: calls with few queries are then faster. Calls with a cache or ``same_queries`` need
            not say so.
        :param replicated: positions ``(first, end)`` of keys that every rank passes, first in its k and v. That they are the
            same on all ranks is not checked.
        :param same_queries: all ranks pass the same queries, and each gets all rows: decoding. That they are the same is not
            checked.
        :param results: the ranks that get rows: ``"owner"``, ``"all"``, or the number of one rank, which gets all. All rows are
            those of rank 0, then those of rank 1, and so on, also with ``q_tokens``.
        :param lse_pair: ``lse`` has a last axis of 2: two numbers whose sum it is to about 14 digits, for :meth:`backward`.
        :returns: ``o`` like ``q``, on its device, and ``lse``, the natural logarithm of the sum of exponentials, float32 ``[batch, tokens,
            heads]`` (``"bhsd"``: ``[batch, heads, tokens]``). They are arrays of the library of ``q``.
        :raises RequestError: ranks that disagree, wrong shapes or options; the same on all ranks.
        :raises GroupError: the group has ended.
        :raises DeviceError: the device failed.
        """
        o, lse = self._core.attend(self._call(options, q, k, v), q, k, v, lse_pair)
        return like(q, o), like(q, lse)

    def _call(self, options: CallOptions, *arrays: Any) -> _kyklos.Call:
        """The options of a call, checked. A fault of this rank becomes the error of all ranks: otherwise their next calls would
        meet another one of this rank."""
        try:
            whole = complete(options)
        except (TypeError, ValueError) as error:
            raise self.refuse(str(error), "help(kyklos.Group.attend) has the options") from None
        if any(records_gradients(array) for array in arrays):
            raise self.refuse(
                "a tensor that requires a gradient", "detach it, or use kyklos.torch.attention, which has gradients"
            )
        if "layout" not in options and any(is_tensor(array) for array in arrays):
            raise self.refuse(
                "tensors of PyTorch without a layout",
                'pass layout="bshd" if they are [batch, tokens, heads, dim], layout="bhsd" if they are [batch, heads, tokens, dim], as '
                "kyklos.torch.attention takes by default",
            )
        return self._core.call(whole)

    @in_sequence
    def kv_cache(
        self,
        heads: int,
        dim: int,
        *,
        batch: int = 1,
        dtype: str = "float32",
        max_bytes: int | None = None,
        share: float = 1.0,
        window: int | None = None,
        rollback: int = 0,
        block: int = 256,
    ) -> KvCache:
        """A cache of keys and values that the ranks share. All ranks make it together; a model has one for each layer.

        :param heads: key/value heads.
        :param dim: elements of a head.
        :param batch: batch entries.
        :param dtype: ``"float32"``, ``"float16"`` or ``"bfloat16"``.
        :param max_bytes: most bytes on this rank; a call for which there is no room is refused and changes nothing.
        :param share: this rank's share of tokens that all ranks pass, relative to the others; 0 for none.
        :param window: queries see at most so many last keys; older ones are dropped. The calls then need
            ``mask="window:N,0"``, where N is less than ``window``.
        :param rollback: with a window, how many tokens :meth:`KvCache.truncate` can take back.
        :param block: so many consecutive tokens that all ranks pass go to one rank.
        """
        settings = {
            "batch": batch,
            "heads": heads,
            "dim": dim,
            "dtype": dtype,
            "max_bytes": max_bytes,
            "share": share,
            "window": window,
            "rollback": rollback,
            "block": block,
        }
        return KvCache(self._core.cache(settings))

    @in_sequence
    def attend_cached(self, cache: KvCache, q: Any, k: Any, v: Any, **options: Unpack[CallOptions]) -> tuple[Any, Any]:
        """Appends ``k`` and ``v`` to the cache and attends from ``q`` to all of it. A query has the position of its token, so
        ``mask="causal"`` hides later tokens.

        A prompt: each rank passes its own part. Decoding: all ranks pass the same new tokens with ``same_queries=True``; one
        of them keeps each key, and every rank gets the output. Options and results are those of :meth:`attend`.
        """
        call = self._call(options, q, k, v)
        if not isinstance(cache, KvCache):
            raise self.refuse(f"a {type(cache).__name__} as cache", "pass one that Group.kv_cache has made")
        o, lse = self._core.attend_cached(call, cache._core, q, k, v)
        return like(q, o), like(q, lse)

    @in_sequence
    def cached_calls(
        self, caches: Sequence[KvCache], q: Any, k: Any, v: Any, **options: Unpack[CallOptions]
    ) -> CachedCalls:
        """Agrees in one vote on one :meth:`attend_cached` on each of ``caches``: the layers of a step. The caches have had the same
        calls. Every call has arrays like ``q``, ``k`` and ``v``, whose elements are not read, and these options."""
        return CachedCalls(self._core, self._call(options, q, k, v), caches, q, k, v)

    def plan(
        self,
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
        """:func:`kyklos.plan` for the ranks of this group. No rank waits for another."""
        if len(q_counts) != self.size:
            raise ValueError(f"counts of {len(q_counts)} ranks for a group of {self.size}")
        return plan(
            q_counts, kv_counts, heads=heads, dim=dim, kv_heads=kv_heads, batch=batch, dtype=dtype, rank=rank, **options
        )

    def refuse(self, reason: str, remedy: str) -> RequestError:
        """Votes against the next call, on this rank alone: the calls of the other ranks raise a :class:`RequestError` with
        ``reason`` and ``remedy``, and the group stays usable. Returns this rank's exception, to be raised by the caller."""
        self._refused += 1
        return self._core.refuse(reason, remedy)

    def abort(self, reason: str) -> None:
        """Ends the group on all ranks: their calls raise a :class:`GroupError` that names this rank and ``reason``. May be
        called from any thread, also during a call."""
        self._core.abort(reason)

    def close(self) -> None:
        """Leaves the group in order. Waits until the other ranks have taken all messages, at most ``leave_s``."""
        if not self._closed:
            self._closed = True
            self._core.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        """The same group: copies of what holds it attend through it, too."""
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "a group cannot be pickled, nor can a model that is split over it: save model.state_dict(), or the model after "
            "remove() of its handle"
        )

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and not isinstance(error, GroupError):
            self.abort(f"{type(error).__name__}: {error}")
        self.close()

    def __repr__(self) -> str:
        return f"kyklos.Group(rank={self.rank}, size={self.size}, device={self.device!r})"


def identities(size: int) -> list[str]:
    """New identities for the ranks of one group, by rank, as PEM texts for :meth:`Group.connect`. Each is the secret of its rank:
    carry it to that process only, over a channel that you trust."""
    return _kyklos.identities(size)


@atexit.register
def _close_all() -> None:
    for group in list(_open):
        group.close()
