"""The key/value cache of a split model, as a cache of transformers."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import torch
from transformers import cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer
from transformers.modeling_outputs import BaseModelOutputWithPast

from .._errors import RequestError
from .._group import Group, KvCache
from .._models.telling import tell, told
from ._steps import LayerCall

#: What transformers calls a cache among inputs and outputs, the name that it uses first: from 5.24 on ``cache``, which also takes the
#: other one from callers.
CACHE_NAMES = ("cache", "past_key_values")
CACHE = next(name for name in CACHE_NAMES if name in {field.name for field in dataclasses.fields(BaseModelOutputWithPast)})

#: Kinds of layers in ``config.layer_types`` that attend, and that mix tokens in another way; ``hybrid`` ones do both.
ATTENDS = {"full_attention", "sliding_attention", "chunked_attention", "hybrid"}
MIXES = {"linear_attention", "conv", "hybrid"}
#: With those that do neither, all kinds of models that can be split.
KINDS = ATTENDS | MIXES | {"moe", "mlp"}


def given_cache(inputs: dict[str, Any]) -> Any:
    """The cache among the inputs of a model, under either name."""
    return next((inputs[name] for name in CACHE_NAMES if inputs.get(name) is not None), None)


class SplitCache(Cache):
    """Keys and values of a model's layers, spread over the ranks: :meth:`kyklos.transformers.Handle.cache` makes it.

    Lengths are those of the whole sequence. All ranks use the cache with the same calls. It cannot be reordered (beam search). What recurrences
    and convolutions of hybrid models remember is whole on every rank.
    """

    def __init__(self, group: Group, kinds: Sequence[str], share: float, rollback: int) -> None:
        self.group = group
        #: Those of the model's layers.
        self.kinds = kinds
        self.share = share
        #: Tokens that :meth:`crop` can take back although a window has dropped keys.
        self.rollback = rollback
        #: Tokens of all ranks.
        self.length = 0
        #: Keys behind a window are kept, since there is padding, which windows of caches do not go with.
        self.keeps_all = False
        #: The layer whose attention call follows, and its number of new tokens.
        self.pending: tuple[SplitLayer, int] | None = None
        #: The calls of the last step that all ranks computed, which the next step repeats; ``None`` if it may not: after a call that
        #: failed, layers may have unlike room.
        self.last_step: list[LayerCall] | None = []
        #: A call that failed has changed what recurrences remember.
        self.spoiled = False
        layers = [_layer(self, kind) for kind in kinds]
        self.parts = [layer for layer in layers if isinstance(layer, SplitLayer)]
        self.states = [layer for layer in layers if isinstance(layer, StateLayer)]
        super().__init__(layers=layers)

    def take(self, name: str, tokens: int) -> SplitLayer:
        """The layer that has handed over the keys to which attention at ``name`` attends. Models with a compressed cache make keys
        from what they put into it, one for each token."""
        pending, self.pending = self.pending, None
        if pending is None or pending[1] != tokens:
            raise RequestError(
                f"attention at {name} has not put its keys into the cache: a model that shares keys between layers cannot be "
                "split; use_cache=False computes without a cache"
            )
        return pending[0]

    def check(self) -> None:
        """Refuses a cache whose layers do not have the same tokens."""
        if self.spoiled:
            raise RequestError("a cache of a hybrid model whose states a call that failed has changed: make a new cache, or reset() this one")
        stores = [layer.store for layer in self.parts]
        lengths = sorted({0 if store is None else len(store) for store in stores})
        if lengths != [self.length]:
            raise RequestError(
                f"a cache of {self.length} tokens whose layers have {lengths}, since a call on it failed: make a new cache"
            )

    def restore(self) -> None:
        """Takes back what a failed call has appended. Where a window has dropped keys, or states have changed, that may be impossible:
        then :meth:`check` refuses the next call."""
        self.pending = None
        self.last_step = None
        self.spoiled = bool(self.states)
        with contextlib.suppress(RequestError):
            self._truncate(self.length)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last ``-tokens_to_remove`` tokens. All ranks do the same before the next call.

        :raises RequestError: keys behind a window that the next token would see are dropped, or states have seen the tokens; the cache is as
            it was.
        """
        with told(self.group):
            if tokens_to_remove > 0:
                raise RequestError(f"crop({tokens_to_remove}) of a cache: pass a negative number of tokens to remove")
            length = max(0, self.length + tokens_to_remove)
            if self.states and 0 < length < self.length:
                raise RequestError(
                    f"crop({tokens_to_remove}) of a cache of a hybrid model, whose states cannot forget a part of {self.length} tokens: make a new "
                    "cache, or reset() this one"
                )
            try:
                self._truncate(length)
            except RequestError as error:
                raise RequestError(
                    f"crop({tokens_to_remove}) of a cache of {self.length} tokens that has dropped keys behind its windows, and was "
                    f"made to take back {self.rollback} tokens: make it with handle.cache(rollback={-tokens_to_remove}), or a new one"
                ) from error
            self.length = length

    def _truncate(self, length: int) -> None:
        # Those that may refuse come first: the smallest window.
        for layer in sorted(self.parts, key=lambda layer: layer.window or sys.maxsize):
            if layer.store is not None and len(layer.store) > length:
                layer.store.truncate(length)
        if length == 0:
            for states in self.states:
                LinearAttentionLayer.reset(states)
            self.spoiled = False

    def reset(self) -> None:
        """Empties the cache."""
        self.crop(-self.length)

    def tokens(self, rank: int, layer: int = 0) -> list[tuple[int, int]]:
        """The positions whose keys ``rank`` holds in a layer, as half-open ranges."""
        store = self.parts[layer].store
        return [] if store is None else store.tokens(rank)

    @property
    def bytes(self) -> int:
        """Bytes of the keys and values of all layers on this rank, without what recurrences remember."""
        return sum(layer.store.bytes for layer in self.parts if layer.store is not None)


class _PartOfCache:
    """What is done with the whole of a :class:`SplitCache` only."""

    cache: SplitCache

    def crop(self, tokens_to_remove: int) -> None:
        self._refuse("crop one layer")

    def reset(self) -> None:
        self._refuse("reset one layer")

    def offload(self) -> None:
        self._refuse("offload")

    def prefetch(self) -> None:
        self._refuse("prefetch")

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._refuse("reorder batch entries of (beam search)")

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._refuse("repeat batch entries of")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._refuse("select batch entries of")

    def _refuse(self, what: str) -> None:
        error = RequestError(
            f"cannot {what} a cache that is split over ranks: use greedy search or sampling, and crop the whole cache"
        )
        raise tell(self.cache.group, error)


class SplitLayer(_PartOfCache, CacheLayerMixin):
    """A layer of a :class:`SplitCache`, to which attention appends keys and values."""

    is_croppable = True
    is_sliding = False

    def __init__(self, cache: SplitCache) -> None:
        CacheLayerMixin.__init__(self)
        self.cache = cache
        self.store: KvCache | None = None
        #: Keys that the store keeps at most, if it drops those behind a window.
        self.window: int | None = None

    def make(self, key: torch.Tensor, window: int | None) -> KvCache:
        """The cache of the ranks, made at the first call. ``key``: ``[batch, kv_heads, tokens, dim]``."""
        if self.store is None:
            batch, heads, _, dim = key.shape
            dtype = str(key.dtype).removeprefix("torch.")
            self.window = None if self.cache.keeps_all else window
            self.store = self.cache.group.kv_cache(
                heads,
                dim,
                batch=batch,
                dtype=dtype,
                share=self.cache.share,
                window=self.window,
                rollback=self.cache.rollback,
            )
            self.is_initialized = True
        return self.store

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the first attention call makes the store."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gives this rank's new keys and values back, ``[batch, kv_heads, tokens, dim]``: attention appends them."""
        self.cache.pending = (self, key_states.shape[2])
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.cache.length

    def get_max_length(self) -> int:
        return -1


class StateLayer(_PartOfCache, LinearAttentionLayer):
    """What a recurrence or a convolution remembers, whole on every rank."""

    def __init__(self, cache: SplitCache) -> None:
        LinearAttentionLayer.__init__(self)
        self.cache = cache


class _HybridLayer(StateLayer, SplitLayer):
    """Both, of a layer that attends and mixes in another way."""

    is_compileable = False
    lazy_initialization = LinearAttentionLayer.lazy_initialization  # type: ignore[assignment]

    def __init__(self, cache: SplitCache) -> None:
        SplitLayer.__init__(self, cache)
        StateLayer.__init__(self, cache)


def _layer(cache: SplitCache, kind: str) -> Any:
    """The layer of a cache for a layer of this kind. ``kind``: one of :data:`KINDS`."""
    if kind in ATTENDS:
        return _HybridLayer(cache) if kind in MIXES else SplitLayer(cache)
    # Before transformers 5.23 layers that remember nothing have states, too, which stay empty.
    return StateLayer(cache) if kind in MIXES else getattr(cache_utils, "DummyLayer", LinearAttentionLayer)()
