"""Layers that mix tokens in another way than by attention, as hybrid models have them: every rank computes them whole.

A recurrence or a convolution goes from token to token. So each rank gathers the states of all tokens before such a layer, computes it for all
of them, and keeps the rows of its own tokens. What a recurrence remembers for the next call is then whole on every rank. In ``backward()`` a
rank has the gradient of its own rows, and the gather sums over the ranks what they have for a token.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from .._rows import gather
from ._attention import Forward, current
from ._hooks import Undo
from ._steps import label

# Modules whose first argument, or ``hidden_states``, has all that they need of the tokens, beside ``attention_mask`` and ``position_ids``.
_MIXERS = {
    # State spaces (Mamba).
    "BambaMixer",
    "FalconH1Mixer",
    "GraniteMoeHybridMambaLayer",
    "JambaMambaMixer",
    "NemotronHMamba2Mixer",
    "ZambaMambaMixer",
    "Zamba2MambaMixer",
    # The gated delta rule.
    "BailingHybridDeltaAttention",
    "KimiLinearDeltaAttention",
    "OlmoHybridGatedDeltaNet",
    "Qwen3NextGatedDeltaNet",
    "Qwen3_5GatedDeltaNet",
    "Qwen3_5MoeGatedDeltaNet",
    # Lightning attention.
    "MiniMaxLightningAttention",
    # Gated linear recurrences.
    "RecurrentGemmaRecurrentBlock",
    # Short convolutions.
    "Lfm2ShortConv",
    "Lfm2MoeShortConv",
    "Lfm3ShortConv",
}


def kinds(base: PreTrainedModel) -> list[str]:
    """The kind of each layer."""
    return list(getattr(base.config, "layer_types", None) or ["full_attention"] * base.config.num_hidden_layers)


def mixers(base: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules of ``base`` that are known to mix tokens without attention."""
    return [module for module in base.modules() if any(_is_mixer(cls) for cls in type(module).__mro__)]


def _is_mixer(cls: type) -> bool:
    return cls.__name__ in _MIXERS and cls.__module__.startswith("transformers.")


def whole_mixers(base: torch.nn.Module, undo: Undo) -> None:
    """Gives mixers the states of all tokens, and takes of their output the rows of this rank."""
    for module in mixers(base):
        undo.append(module.register_forward_pre_hook(_all_tokens, with_kwargs=True).remove)
        undo.append(module.register_forward_hook(_own_tokens).remove)


@torch.compiler.disable
def _all_tokens(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    forward = current()
    if forward is None:
        return None
    name = forward.names.get(module, type(module).__name__)
    forward.mixed.append(name)
    if not _has_other_tokens(forward):
        return None
    given = "hidden_states" in kwargs
    own = kwargs["hidden_states"] if given else args[0]
    states = own[:, :1] if forward.trial else gather(forward.group, own, label(forward.label, f"input of {name}"))
    kwargs = {**kwargs, **{argument: value for argument, value in forward.whole.items() if argument in kwargs}}
    return (args, {**kwargs, "hidden_states": states}) if given else ((states, *args[1:]), kwargs)


@torch.compiler.disable
def _own_tokens(_: torch.nn.Module, args: Any, output: Any) -> Any:
    forward = current()
    if forward is None or not _has_other_tokens(forward):
        return None
    rows, *others = output if isinstance(output, tuple) else (output,)
    if forward.trial:
        rows = rows.expand(-1, forward.own, -1)
    else:
        first = sum((forward.counts or [])[: forward.group.rank])
        rows = rows[:, first : first + forward.own]
    return (rows, *others) if isinstance(output, tuple) else rows


def _has_other_tokens(forward: Forward) -> bool:
    """Whether a mixer gets other tokens than those of this rank."""
    return forward.skips_mixers if forward.trial else forward.counts is not None
