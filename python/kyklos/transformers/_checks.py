"""Models that cannot be split, by name; and a trial that shows how a model attends."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import DynamicCache, PreTrainedModel

from .._errors import RequestError
from .._group import Group
from .._models import pace
from .._models.pace import Reach, wait_for
from . import _eager as eager
from ._attention import NAME, Forward, entered
from ._cache import ATTENDS, CACHE, KINDS, MIXES
from ._mixers import kinds, mixers

# Tokens of each rank in the trial calls.
_TRIAL_TOKENS = 6


@dataclass(frozen=True)
class Traits:
    """How a model attends, as its trial call shows."""

    #: Modules that attend, in their order.
    layers: list[str]
    #: Modules that mix tokens in another way.
    mixers: list[str]
    #: The model keeps packed documents apart, if it gets no attention_mask and no cache.
    packs: bool
    #: It makes a cache if it is told to, or by default.
    caches: bool
    caches_by_default: bool
    #: What :meth:`Group.speeds` is to be asked: ``heads``, ``kv_heads``, ``dim`` and ``dtype`` of the first layer.
    call: dict[str, Any]
    #: Query heads of all layers that see so far, for each reach.
    attention: list[tuple[int, Reach]]

    def check(self, forward: Forward) -> None:
        """Refuses a pass in which a layer did not see the tokens of all ranks, or ran twice."""
        for calls, expected, what in (
            (forward.attended, self.layers, "attention calls"),
            (forward.mixed, self.mixers, "calls of recurrences or convolutions"),
        ):
            if calls != expected:
                missing = [name for name in expected if name not in calls]
                raise RequestError(
                    f"{len(calls)} {what} in a pass over {len(expected)} layers"
                    + (f"; {', '.join(missing)} attended to the tokens of this rank only" if missing else "")
                    + ": do not change the model's layers after parallelize()"
                )


def body_of(model: PreTrainedModel) -> PreTrainedModel:
    """The part of a model that ends with hidden states: of OPT, whose head calls it, the decoder inside of the body; of a model that takes
    images or sounds too, its language model."""
    body = cast(PreTrainedModel, model.base_model)
    if body.config.sub_configs and body.config.get_text_config() is not body.config and not body.config.is_encoder_decoder:
        language = model.get_decoder()
        if not isinstance(language, PreTrainedModel) or language is model:
            return body
        # Of Llama 4 it has a head.
        return body_of(language)
    inner = [part for part in body.children() if isinstance(part, PreTrainedModel)]
    return inner[0] if len(inner) == 1 and not body.config.sub_configs else body


def refuse_unsplittable(model: PreTrainedModel, base: PreTrainedModel) -> None:
    """Refuses models whose layers do not all attend through the attention interface of the library."""

    def refuse(why: str, remedy: str) -> None:
        raise RequestError(f"{type(model).__name__} cannot be split over ranks: {why}; {remedy}")

    alone = "run it on one rank"
    config = base.config
    if model.config.is_encoder_decoder:
        refuse("it is an encoder-decoder whose encoder and decoder are not two models", alone)
    parameters = inspect.signature(base.forward).parameters
    if (config.sub_configs and config.get_text_config() is not config) or "input_ids" not in parameters:
        refuse(
            "it is made of several models or takes no input_ids", "split its language model, as in model.language_model"
        )
    unknown = sorted(set(kinds(base)) - (KINDS if mixers(base) else KINDS - MIXES))
    if unknown:
        refuse(f"it has layers of the kinds {', '.join(unknown)}", alone)
    if not ATTENDS & set(kinds(base)):
        refuse("none of its layers attends", alone)
    if getattr(config, "num_kv_shared_layers", 0):
        refuse("layers share the keys of other layers", alone)
    if not (base._can_set_attn_implementation() or eager.is_known(base)):
        refuse("its attention does not go through AttentionInterface", alone)
    if not ("position_ids" in parameters or eager.needs_no_positions(base)):
        refuse("it takes no position_ids, so a rank cannot say which tokens it has", alone)
    if NAME in (config._attn_implementation, model.config._attn_implementation):
        refuse("it is split already", "call remove() of its handle first")


def trial_inputs(base: PreTrainedModel, size: int) -> dict[str, torch.Tensor]:
    """Two texts, one with padding on the left. The same on all ranks."""
    tokens = _TRIAL_TOKENS * size
    vocabulary, device = _embeddings(base).shape[0], _embeddings(base).device
    padding = getattr(base.config, "pad_token_id", None)
    ids = (torch.arange(2 * tokens) * 7919 + 13).reshape(2, tokens) % vocabulary
    if padding is not None:
        ids[ids == padding] = (padding + 1) % vocabulary
    mask = torch.ones(2, tokens, dtype=torch.long)
    mask[1, :2] = 0
    ids[1, :2] = 0 if padding is None else padding
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def _embeddings(base: PreTrainedModel) -> torch.Tensor:
    """``[vocabulary, width]``."""
    return cast(torch.Tensor, base.get_input_embeddings().weight)


def traits_of(base: PreTrainedModel, forward: Any, group: Group, names: dict[torch.nn.Module, str]) -> Traits:
    """Runs the model once on this rank, with attention that only records its calls."""
    inputs = trial_inputs(base, 1)
    ids = inputs["input_ids"]
    half = torch.arange(ids.shape[1], device=ids.device) % (ids.shape[1] // 2)
    packed, plain = (Forward(group, names, "trial", None, ids.shape[1], trial=True) for _ in range(2))
    try:
        with entered(packed), torch.no_grad():
            forward(input_ids=ids, position_ids=half[None].expand(2, -1), return_dict=True, **without_cache(base))
        with entered(plain), torch.no_grad():
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
            output = forward(**inputs, position_ids=positions, return_dict=True, **_use_cache(base, True))
    except RequestError:
        raise
    except Exception as error:
        raise RequestError(
            f"{type(base).__name__} cannot be split over ranks: a trial pass, whose masks are rules instead of tensors, ends with "
            f"{type(error).__name__}: {error}; run it on one rank"
        ) from error
    packs = any(rule.packed for rule in packed.rules)
    for calls, of, what in (
        (plain.attended, ATTENDS, "attention calls came through AttentionInterface"),
        (plain.mixed, MIXES, "layers mixed tokens in another way that is known"),
    ):
        expected = sum(kind in of for kind in kinds(base))
        if len(calls) != expected:
            raise RequestError(
                f"{type(base).__name__} has {expected} layers, and {len(calls)} {what} ({', '.join(calls) or 'none'}): the others would see "
                "the tokens of one rank only; run it on one rank"
            )
    # A class of its own keeps what SplitCache does not.
    caches = type(getattr(output, CACHE, None)) is DynamicCache
    # Where tokens see later ones, those of a cache are not what they would be with the next token.
    caches = caches and all(rule.right == 0 for rule in plain.rules)
    heads: Counter[Reach] = Counter()
    for rule, shape in zip(plain.rules, plain.shapes, strict=True):
        heads[rule.left, rule.right] += shape[0]
    attention = [(count, reach) for reach, count in heads.items()]
    by_default = caches and bool(getattr(base.config, "use_cache", False))
    (first, kv_heads, dim, dtype), *_ = plain.shapes
    call = {"heads": first, "kv_heads": kv_heads, "dim": dim, "dtype": str(dtype).removeprefix("torch.")}
    return Traits(plain.attended, plain.mixed, packs, caches, by_default, call, attention)


def token_ns(base: PreTrainedModel, forward: Any, group: Group, names: dict[torch.nn.Module, str]) -> tuple[int, int]:
    """Nanoseconds of this rank for a token in all layers, without attention and what mixes tokens in another way; and with how many tokens
    that was measured."""
    return _token_ns(base, forward, group, names, skips_mixers=True)


def whole_ns(base: PreTrainedModel, forward: Any, group: Group, names: dict[torch.nn.Module, str]) -> int:
    """Nanoseconds of this rank for a token in what mixes tokens without attention, which every rank computes for all tokens."""
    if not mixers(base):
        return 0
    both, own = (_token_ns(base, forward, group, names, skips)[0] for skips in (False, True))
    return max(0, both - own)


def _token_ns(
    base: PreTrainedModel, forward: Any, group: Group, names: dict[torch.nn.Module, str], skips_mixers: bool
) -> tuple[int, int]:
    vocabulary, device = _embeddings(base).shape[0], _embeddings(base).device

    def run(tokens: int) -> None:
        places = torch.arange(tokens, device=device)[None]
        trial = Forward(group, names, "pace", None, tokens, trial=True, skips_mixers=skips_mixers, whole={"position_ids": places[:, :1]})
        with entered(trial), torch.no_grad():
            forward(input_ids=places * 7919 % vocabulary, position_ids=places, return_dict=True, **without_cache(base))
        wait_for(device)

    return pace.token_ns(run, getattr(base.config, "max_position_embeddings", None) or 1 << 20)


@contextmanager
def rotary_state_kept(base: PreTrainedModel) -> Iterator[None]:
    """Restores what rotary embeddings with ``dynamic`` scaling remember of the longest text so far."""
    parts = [part for part in base.modules() if hasattr(part, "rope_type")]
    attributes = [dict(part.__dict__) for part in parts]
    buffers = [{name: (one, one.clone()) for name, one in part.named_buffers(recurse=False)} for part in parts]
    try:
        yield
    finally:
        for part, own, held in zip(parts, attributes, buffers, strict=True):
            part.__dict__.update(own)
            for name, (tensor, values) in held.items():
                part._buffers[name] = tensor.copy_(values)


def without_cache(base: PreTrainedModel) -> dict[str, bool]:
    """The argument that tells a model to make no cache, where it takes one."""
    return _use_cache(base, False)


def _use_cache(base: PreTrainedModel, use: bool) -> dict[str, bool]:
    return {"use_cache": use} if "use_cache" in inspect.signature(base.forward).parameters else {}


def default_positions(
    base: PreTrainedModel, input_ids: torch.Tensor | None, past: int, shape: tuple[int, int]
) -> torch.Tensor:
    """The ``position_ids`` that the model itself would use for ``shape`` = (batch, tokens) after ``past`` tokens."""
    device = _embeddings(base).device
    embeddings: Any = getattr(base, "embeddings", None)
    of_ids = getattr(embeddings, "create_position_ids_from_input_ids", None)
    if of_ids is None:
        return torch.arange(past, past + shape[1], device=device)[None]
    # RoBERTa and its family count tokens that are not padding, from padding_idx + 1.
    if input_ids is not None:
        return of_ids(input_ids, embeddings.padding_idx, past)
    first = embeddings.padding_idx + 1 + past
    return torch.arange(first, first + shape[1], device=device)[None]


@dataclass(frozen=True)
class States:
    """What the body of a model returns: ``[batch, tokens, width]``, and the pooled rows ``[batch, width]`` of some encoders."""

    hidden: torch.Tensor
    pooled: torch.Tensor | None = None

    @staticmethod
    def of(output: Any) -> States:
        return States(output.last_hidden_state, getattr(output, "pooler_output", None))

    def compare(self, whole: States, visible: torch.Tensor) -> tuple[bool, str]:
        """As :func:`compare`. Of pooled rows the first text counts, which has no padding."""
        equal, error = compare(self.hidden, whole.hidden, visible)
        if equal and self.pooled is not None and whole.pooled is not None:
            return compare(self.pooled[:1, None], whole.pooled[:1, None], visible[:1, :1])
        return equal, error


def compare(split: torch.Tensor, whole: torch.Tensor, visible: torch.Tensor) -> tuple[bool, str]:
    """Whether two outputs ``[batch, tokens, width]`` are equal where ``visible``, up to rounding; and the error in words.

    In 16-bit types rounding may send a token to another expert, so a quarter of the rows may differ.
    """
    rows = visible.to(torch.bool).to(split.device)
    a, b = split[rows].float(), whole[rows].float()
    errors = (a - b).abs().amax(-1)
    scale = b.abs().amax()
    exact = split.dtype == torch.float32
    error = errors.amax() if exact else errors.quantile(0.75)
    bound = (1e-3 if exact else 0.1) * scale
    # A comparison with NaN is false.
    return bool(error <= bound), f"{float(error):.2g} of {float(scale):.2g}"
