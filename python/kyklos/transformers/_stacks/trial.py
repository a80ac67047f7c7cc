"""Encoders and decoders that cannot be split, by name; and trials that show how one attends."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..._errors import RequestError
from ..._group import Group
from .. import _checks as checks
from .._attention import NAME, entered
from .._masks import CAUSAL
from .passes import StackPass


@dataclass(frozen=True)
class StackTraits:
    """How a stack attends, as its trial call shows."""

    #: Modules that attend, in their order.
    calls: list[str]
    #: Those of them that attend to the states of the encoder.
    cross: frozenset[str]
    #: The first layer.
    first: torch.nn.Module
    #: Its own attention gets masks.
    masked: bool


def refuse_unsplittable(model: PreTrainedModel, stack: PreTrainedModel) -> None:
    """Refuses stacks whose layers do not attend through the attention interface of the library."""

    def refuse(why: str, remedy: str = "run it on one rank") -> None:
        raise RequestError(f"{type(model).__name__} cannot be split over ranks: {why}; {remedy}")

    if not isinstance(stack, PreTrainedModel):
        refuse(f"its {type(stack).__name__} is no model of its own")
    if not {"input_ids", "input_features"} & inspect.signature(stack.forward).parameters.keys():
        refuse(f"its {type(stack).__name__} takes neither input_ids nor input_features")
    if not stack._can_set_attn_implementation():
        refuse("its attention does not go through AttentionInterface")
    if NAME in (stack.config._attn_implementation, model.config._attn_implementation):
        refuse("it is split already", "call remove() of its handle first")


def inputs_of(stack: PreTrainedModel, size: int, of_decoder: bool) -> dict[str, Any]:
    """Inputs of a trial, the same on all ranks: two texts, one with padding on the left, or one sound."""
    takes = inspect.signature(stack.forward).parameters
    if not of_decoder and "input_features" in takes:
        return {"input_features": _sound(stack)}
    inputs: dict[str, Any] = checks.trial_inputs(stack, size)
    if of_decoder:
        batch, tokens = inputs["input_ids"].shape
        # A length of its own, by which cross-attention is known.
        inputs["encoder_hidden_states"] = _random(stack, batch, tokens + 1, stack.config.hidden_size)
        if "encoder_attention_mask" in takes:
            mask = torch.ones(batch, tokens + 1, dtype=torch.long, device=inputs["input_ids"].device)
            mask[1, -2:] = 0
            inputs["encoder_attention_mask"] = mask
        inputs["use_cache"] = False
    return inputs


def _sound(stack: PreTrainedModel) -> torch.Tensor:
    """Whisper takes sounds of one length."""
    config, strides = stack.config, [part.stride[0] for part in stack.children() if isinstance(part, torch.nn.Conv1d)]
    if not strides or not hasattr(config, "num_mel_bins") or not hasattr(config, "max_source_positions"):
        raise RequestError(f"{type(stack).__name__} cannot be split over ranks: it takes sounds otherwise than Whisper; run it on one rank")
    frames = config.max_source_positions * int(torch.tensor(strides).prod())
    return _random(stack, 1, config.num_mel_bins, frames)


def _random(stack: PreTrainedModel, *shape: int) -> torch.Tensor:
    numbers = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    return numbers.to(stack.device, stack.dtype)


def visible(inputs: dict[str, Any], output: torch.Tensor) -> torch.Tensor:
    """``[batch, tokens]``, where an output of these inputs counts."""
    mask = inputs.get("attention_mask")
    return torch.ones(output.shape[:2], dtype=torch.bool) if mask is None else mask


def run(stack: PreTrainedModel, forward: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """The states ``[batch, tokens, width]`` that a trial ends with.

    :raises RequestError: whatever it ends with otherwise.
    """
    try:
        with torch.no_grad():
            return forward(**inputs, return_dict=True).last_hidden_state
    except RequestError:
        raise
    except Exception as error:
        raise RequestError(
            f"{type(stack).__name__} cannot be split over ranks: a trial pass ends with {type(error).__name__}: {error}; run this model on one rank"
        ) from error


def traits_of(forward: Any, stack: PreTrainedModel, group: Group, names: dict[torch.nn.Module, str], of_decoder: bool) -> StackTraits:
    """Runs a stack once on this rank, with attention that only records its calls."""

    def refuse(why: str) -> None:
        raise RequestError(f"{type(stack).__name__} cannot be split over ranks: {why}; run this model on one rank")

    record = StackPass(group, names, "trial", None, 0, trial=True)
    lists = {names[child]: child for child in stack.children() if isinstance(child, torch.nn.ModuleList) and len(child)}
    given: dict[str, list[Any]] = {}
    hooks = [
        layers[0].register_forward_pre_hook(functools.partial(_record, given.setdefault(path, [])), with_kwargs=True)
        for path, layers in lists.items()
    ]
    try:
        with entered(record):
            tokens = run(stack, forward, inputs_of(stack, 1, of_decoder)).shape[1]
    finally:
        for hook in hooks:
            hook.remove()
    inside = [path for path in lists if all(call.startswith(f"{path}.") for call in record.attended)]
    if len(inside) != 1 or not record.attended:
        refuse(f"its attention is not in one list of layers ({', '.join(record.attended) or 'no calls of AttentionInterface'})")
    if any(isinstance(one, torch.Tensor) and one.dim() > 1 and one.shape[1] == tokens for one in given[inside[0]]):
        refuse("its layers get more of each token than its states, such as rotary positions")
    layers = lists[inside[0]]
    calls = list(zip(record.attended, record.keys, record.rules, record.masked, strict=True))
    own = [call for call in calls if call[1] == tokens]
    cross = [call for call in calls if call[1] != tokens]
    for kind, some in (("its own tokens", own), *([("the states of the encoder", cross)] if of_decoder else [])):
        each = Counter(int(call[0].removeprefix(f"{inside[0]}.").split(".")[0]) for call in some)
        if each != Counter(range(len(layers))):
            refuse(f"it has {len(layers)} layers, and {len(some)} calls of AttentionInterface attend to {kind}")
    if not of_decoder and (cross or any(rule == CAUSAL for _, _, rule, _ in own)):
        refuse("it is a decoder that takes no position_ids, so a rank cannot say which tokens it has")
    return StackTraits(record.attended, frozenset(call[0] for call in cross), layers[0], all(masked for *_, masked in own))


def _record(given: list[Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """What a layer gets beside its states."""
    for value in (*args[1:], *(value for name, value in kwargs.items() if name != "hidden_states")):
        given.extend(value if isinstance(value, (tuple, list)) else [value])
