"""``generate()`` on split models: one cache over the ranks, and rank 0 chooses the tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode

from .._errors import RequestError
from .._models.telling import told
from .._rows import broadcast
from ._cache import CACHE, SplitCache, given_cache
from ._hooks import Undo, replace
from ._split import SplitModel
from ._stacks import SplitStacks

_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
# What models name as their default; a cache of ranks takes its place.
_CACHES = (None, "dynamic", "hybrid")
# float32 holds integers up to 2^24 exactly.
_BASE = 1 << 16


class RankZeroDecides(StoppingCriteriaList):
    """Stopping criteria after which all ranks have the tokens that rank 0 has chosen, and stop where rank 0 stops.

    Random generators, rounding and clocks differ between ranks; a rank with another token would ask another question.
    """

    def __init__(self, split: SplitModel | SplitStacks, criteria: StoppingCriteriaList) -> None:
        super().__init__(criteria)
        self._split = split
        self._steps = 0

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> Any:
        group = self._split.group
        batch = input_ids.shape[0]
        numbers = [0] * (3 * batch)
        if group.rank == 0:
            done = super().__call__(input_ids, scores, **kwargs).tolist()
            tokens = input_ids[:, -1].tolist()
            numbers = (
                [token // _BASE for token in tokens] + [token % _BASE for token in tokens] + [int(end) for end in done]
            )
        self._steps += 1
        numbers = broadcast(group, numbers, f"token {self._steps}")
        high, low, done = numbers[:batch], numbers[batch : 2 * batch], numbers[2 * batch :]
        # generate() goes on with this tensor.
        input_ids[:, -1] = torch.tensor(
            [first * _BASE + rest for first, rest in zip(high, low, strict=True)], device=input_ids.device
        )
        return torch.tensor([bool(end) for end in done], device=input_ids.device)


def install(split: SplitModel | SplitStacks, undo: Undo) -> None:
    """Makes ``generate()`` of the model use the ranks, until the functions of ``undo`` are called."""
    model: Any = split.model
    if not getattr(model, "can_generate", lambda: False)():
        return
    functions: dict[str, Any] = {
        "generate": _generate,
        "_prepare_cache_for_generation": _prepare_cache,
        "_get_stopping_criteria": _stopping_criteria,
    }
    # What Whisper decides by numbers, which unlike devices round in other ways.
    decided = {"_need_fallback": _fallback, "detect_language": _language}
    for name, function in (functions | {name: function for name, function in decided.items() if hasattr(model, name)}).items():
        before = getattr(model, name)
        replace(model, name, functools.update_wrapper(functools.partial(function, split, before), before), undo)


def _fallback(split: SplitModel | SplitStacks, decide: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return tuple(map(bool, broadcast(split.group, [int(one) for one in decide(*args, **kwargs)], "fallback")))


def _language(split: SplitModel | SplitStacks, detect: Callable[..., torch.Tensor], /, *args: Any, **kwargs: Any) -> torch.Tensor:
    own = detect(*args, **kwargs)
    return torch.tensor(broadcast(split.group, own.flatten().tolist(), "languages")).to(own).reshape(own.shape)


def _generate(split: SplitModel | SplitStacks, generate: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    before, split.generating = split.generating, True
    try:
        with told(split.group):
            if kwargs.get("streamer") is not None and split.group.rank > 0:
                raise RequestError(
                    f"a streamer on rank {split.group.rank}, which sees tokens before rank 0 has chosen: pass it on rank 0 only"
                )
            return generate(*args, **kwargs)
    finally:
        split.generating = before


def _prepare_cache(
    split: SplitModel | SplitStacks,
    prepare: Callable[..., Any],
    generation_config: Any,
    model_kwargs: dict[str, Any],
    generation_mode: Any,
    batch_size: int,
    max_cache_length: int,
) -> None:
    if generation_mode not in _MODES:
        mode = getattr(generation_mode, "value", generation_mode)
        raise RequestError(f"{mode} on a split model: use greedy search or sampling, with num_beams=1")
    implementation = generation_config.cache_implementation
    if implementation not in _CACHES:
        raise RequestError(
            f"cache_implementation {implementation!r} on a split model, whose cache is over the ranks: leave it out"
        )
    if isinstance(split, SplitStacks):
        prepare(generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)
        return
    cache = given_cache(model_kwargs)
    if cache is not None and not isinstance(cache, SplitCache):
        raise RequestError(
            f"a {type(cache).__name__} as past_key_values of a split model: make one with handle.cache()"
        )
    if cache is None and generation_config.use_cache is not False:
        if not split.traits.caches:
            raise RequestError(f"{type(split.model).__name__} makes no cache: call generate() with use_cache=False")
        model_kwargs[CACHE] = split.cache()


def _stopping_criteria(
    split: SplitModel | SplitStacks, criteria: Callable[..., StoppingCriteriaList], /, *args: Any, **kwargs: Any
) -> StoppingCriteriaList:
    return RankZeroDecides(split, criteria(*args, **kwargs))
