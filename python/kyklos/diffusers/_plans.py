"""How the tokens of each known transformer of diffusers are split, and which transformers are refused."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers.models._modeling_parallel import ContextParallelInput as Input
from diffusers.models._modeling_parallel import ContextParallelOutput as Output

from .._errors import RequestError


@dataclass(frozen=True)
class SplitPlan:
    """Where a transformer's tokens are split and gathered.

    :param modules: as ``_cp_plan`` of diffusers: for the name of a module (``""`` is the transformer, one ``*`` stands for all
        entries of a list) the inputs or outputs that are split, or the outputs that are gathered.
    :param attention: patterns of the attention modules whose keys are split over the ranks. Each makes one call in a forward.
        Attention to tokens that every rank has, such as an unsplit prompt, is not among them.
    :param whole: inputs that stay whole where they have another number of axes than ``modules`` says, or one token.
    """

    modules: Mapping[str, Any]
    attention: tuple[str, ...] = ("*",)
    whole: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Known:
    """What the tests have verified of one class."""

    plan: SplitPlan
    #: Classes of attention processors.
    processors: frozenset[str]
    #: Arguments of ``forward`` that must be absent or ``None``, with the reason.
    refused: Mapping[str, str] = field(default_factory=dict)


def _tokens(axes: int, dim: int = 1) -> Input:
    return Input(split_dim=dim, expected_dims=axes, split_output=False)


def _rope(axes: int, dim: int) -> dict[int, Input]:
    return {index: Input(split_dim=dim, expected_dims=axes, split_output=True) for index in (0, 1)}


_OUT = {"proj_out": Output(gather_dim=1, expected_dims=3)}
# [batch, tokens, dim] or [batch, heads, tokens, dim], by the configuration.
_ROPE_BEFORE_LAST = {index: Input(split_dim=-2, expected_dims=None, split_output=True) for index in (0, 1)}
_PER_TOKEN_TIME = frozenset({"timestep"})

# The prompt stays whole in cross-attention: every rank has all its keys, so these calls are local and need no mask of others.
_WAN = Known(
    SplitPlan(
        {"": {"timestep": _tokens(2)}, "rope": _rope(4, 1), "blocks.0": {"hidden_states": _tokens(3)}, **_OUT},
        attention=("blocks.*.attn1",),
        whole=_PER_TOKEN_TIME,
    ),
    frozenset({"WanAttnProcessor"}),
)

_FLUX_ATTENTION = ("transformer_blocks.*.attn", "single_transformer_blocks.*.attn")

KNOWN: dict[str, Known] = {
    "WanTransformer3DModel": _WAN,
    "ChronoEditTransformer3DModel": Known(_WAN.plan, frozenset({"WanAttnProcessor"})),
    "FluxTransformer2DModel": Known(
        SplitPlan(
            {
                "": {
                    "hidden_states": _tokens(3),
                    "encoder_hidden_states": _tokens(3),
                    "img_ids": _tokens(2, 0),
                    "txt_ids": _tokens(2, 0),
                    "controlnet_block_samples": _tokens(3),
                    "controlnet_single_block_samples": _tokens(3),
                },
                **_OUT,
            },
            attention=_FLUX_ATTENTION,
        ),
        frozenset({"FluxAttnProcessor"}),
    ),
    "Flux2Transformer2DModel": Known(
        SplitPlan(
            {
                "": {
                    "hidden_states": _tokens(3),
                    "encoder_hidden_states": _tokens(3),
                    "img_ids": _tokens(3),
                    "txt_ids": _tokens(3),
                },
                **_OUT,
            },
            attention=_FLUX_ATTENTION,
        ),
        frozenset({"Flux2AttnProcessor", "Flux2ParallelSelfAttnProcessor"}),
        {"kv_cache_mode": "the cache of reference tokens counts them from the first token of the whole sequence"},
    ),
    "QwenImageTransformer2DModel": Known(
        SplitPlan(
            {
                "": {"controlnet_block_samples": _tokens(3)},
                "transformer_blocks.0": {"hidden_states": _tokens(3), "encoder_hidden_states": _tokens(3)},
                "transformer_blocks.*": {"modulate_index": _tokens(2), "encoder_hidden_states_mask": _tokens(2)},
                "pos_embed": _rope(2, 0),
                **_OUT,
            },
            attention=("transformer_blocks.*.attn",),
        ),
        frozenset({"QwenDoubleStreamAttnProcessor2_0"}),
    ),
    "LTXVideoTransformer3DModel": Known(
        SplitPlan(
            {"": {"hidden_states": _tokens(3), "timestep": _tokens(2)}, "rope": _rope(3, 1), **_OUT},
            attention=("transformer_blocks.*.attn1",),
            whole=_PER_TOKEN_TIME,
        ),
        frozenset({"LTXVideoAttnProcessor"}),
    ),
    # Sound is whole on each rank, as are its keys; the sound's queries of the video's keys are the same on all ranks.
    "LTX2VideoTransformer3DModel": Known(
        SplitPlan(
            {
                "": {
                    "hidden_states": _tokens(3),
                    "timestep": _tokens(2),
                    "video_keyframes_mask": _tokens(3),
                },
                "rope": _ROPE_BEFORE_LAST,
                "cross_attn_rope": _ROPE_BEFORE_LAST,
                **_OUT,
            },
            attention=("transformer_blocks.*.attn1", "transformer_blocks.*.video_to_audio_attn"),
            whole=_PER_TOKEN_TIME,
        ),
        frozenset({"LTX2AudioVideoAttnProcessor"}),
        {"video_self_attention_mask": "its attention pads the rows of a mask to the number of tokens of this rank"},
    ),
    "SkyReelsV2Transformer3DModel": Known(
        SplitPlan(
            {"rope": _rope(4, 1), "blocks.0": {"hidden_states": _tokens(3)}, **_OUT}, attention=("blocks.*.attn1",)
        ),
        frozenset({"SkyReelsV2AttnProcessor"}),
    ),
}


def attention_modules(transformer: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The modules that have an attention processor, by name."""
    return {
        name: module for name, module in transformer.named_modules() if getattr(module, "processor", None) is not None
    }


def choose(transformer: torch.nn.Module, plan: SplitPlan | Mapping[str, Any] | None) -> Known:
    """The plan of this transformer.

    :raises RequestError: a transformer that is not known and has no ``plan``, or whose attention is out of reach.
    """
    name = type(transformer).__name__
    modules = attention_modules(transformer)
    for place, module in modules.items():
        if not hasattr(module.processor, "_parallel_config"):
            raise RequestError(
                f"{name} calls PyTorch's attention directly in {type(module.processor).__name__} of {place}, so that each rank would see "
                f"its own keys only: use one of {', '.join(KNOWN)}, or set processors that call dispatch_attention_fn"
            )
    if isinstance(plan, SplitPlan):
        return Known(plan, frozenset())
    if plan is not None:
        return Known(SplitPlan(plan), frozenset())
    known = KNOWN.get(name)
    if known is None:
        also = "has a _cp_plan that is not verified" if getattr(transformer, "_cp_plan", None) else "has no plan"
        raise RequestError(
            f"{name} {also}, verified are {', '.join(KNOWN)}: pass plan=kyklos.diffusers.SplitPlan(...) and compare with the unsplit model"
        )
    for place, module in modules.items():
        processor = type(module.processor).__name__
        if processor not in known.processors:
            raise RequestError(
                f"{place} of {name} has the processor {processor}, verified are {', '.join(sorted(known.processors))}: "
                "unload the adapter that set it, or pass plan=kyklos.diffusers.SplitPlan(...)"
            )
    return known


def split_attention_modules(transformer: torch.nn.Module, plan: SplitPlan) -> list[torch.nn.Module]:
    """The attention modules that ``plan.attention`` names, in the order of the model."""
    modules = attention_modules(transformer)
    chosen = {name: m for name, m in modules.items() if any(fnmatch.fnmatchcase(name, p) for p in plan.attention)}
    for pattern in plan.attention:
        if not fnmatch.filter(modules, pattern):
            raise RequestError(
                f"no attention module of {type(transformer).__name__} matches {pattern!r}, it has {_some(modules)}: mend plan.attention"
            )
    others = {id(m.processor): name for name, m in modules.items() if name not in chosen}
    for name, module in chosen.items():
        if id(module.processor) in others:
            raise RequestError(
                f"{name} and {others[id(module.processor)]} share one processor, but only the keys of the first are split: "
                "give each module a processor of its own"
            )
    return list(chosen.values())


def find(transformer: torch.nn.Module, pattern: str) -> list[torch.nn.Module]:
    """The modules with this name, in which ``*`` stands for all entries of a list."""
    if pattern == "":
        return [transformer]
    found = [module for name, module in transformer.named_modules() if name and _same_path(name, pattern)]
    if not found:
        raise RequestError(
            f"{type(transformer).__name__} has no module {pattern!r}, which the plan names: mend the plan"
        )
    return found


def _same_path(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(w in ("*", p) for p, w in zip(parts, wanted, strict=True))


def _some(names: Mapping[str, Any]) -> str:
    first = list(names)[:4]
    return (", ".join(first) + (" ..." if len(names) > 4 else "")) or "none"
