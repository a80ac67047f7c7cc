"""A pass through the layers of an encoder or a decoder, whose tokens are cut before the first layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..._errors import RequestError
from ..._rows import gather
from .. import _masks as masks
from .._attention import Forward, checked, current
from .._masks import FULL, MaskRule


@dataclass
class StackPass(Forward):
    """One pass of an encoder or a decoder. What comes before its layers is computed on every rank for all tokens.

    Where :attr:`counts` is ``None`` this rank computes all tokens, and its layers attend here, as cross-attention always does: every rank
    has the states of all tokens of the encoder.
    """

    #: Tokens of each rank of a pass over so many; ``None`` where all ranks compute all of them.
    deal: Callable[[int], list[int] | None] = lambda tokens: None
    #: Modules that attend to the states of the encoder.
    cross: frozenset[str] = frozenset()
    #: Keys of the caller, ``[batch, keys]`` with 0 for padding: those of this stack with the cached ones, and those of the encoder.
    visible: torch.Tensor | None = None
    cross_visible: torch.Tensor | None = None
    #: Tokens in the decoder's cache.
    past: int = 0
    #: The ranks compare their inputs also where no layer is a call of the group.
    compared: bool = True
    #: Of a trial the keys of each call, and whether it had a mask.
    keys: list[int] = field(default_factory=list)
    masked: list[bool] = field(default_factory=list)

    @property
    def rows(self) -> tuple[int, int]:
        """This rank's tokens, as a half-open range."""
        if self.counts is None:
            return 0, self.tokens
        first = sum(self.counts[: self.group.rank])
        return first, first + self.counts[self.group.rank]

    def begin(self, tokens: int) -> None:
        """The states of so many tokens come to the first layer. Layers that are computed again for ``backward()`` come here twice."""
        if self.tokens:
            return
        self.tokens, self.counts = tokens, self.deal(tokens)
        self.padding = masks.padding(self.visible, self.past + tokens)
        if self.counts is None and self.compared:
            gather(self.group, torch.zeros(1, 1, 1), self.label)

    def attend(self, module: torch.nn.Module, states: list[torch.Tensor], mask: Any, options: dict[str, Any]) -> torch.Tensor:
        name = self.names.get(module, type(module).__name__)
        if not self.trial and isinstance(mask, masks.MaskRule) and (mask.packed or mask.chunk or mask.rows is not None):
            raise RequestError(f"attention at {name} has packed documents, chunks or blocks: run this model on one rank")
        if self.trial:
            self.keys.append(states[1].shape[2])
            self.masked.append(mask is not None)
        elif self.counts is None or name in self.cross:
            return self._here(name, module, states, mask, options)
        return super().attend(module, states, mask, options)

    def _here(self, name: str, module: torch.nn.Module, states: list[torch.Tensor], mask: Any, options: dict[str, Any]) -> torch.Tensor:
        rule = checked(name, module, mask, options)
        self.attended.append(name)
        if options.get("softcap") is not None or options.get("s_aux") is not None:
            raise RequestError(f"attention at {name} has a softcap or sinks, which only split layers have: run this model on one rank")
        query, key, value = states
        if name in self.cross:
            if rule != FULL:
                raise RequestError(f"attention at {name} to the states of the encoder has the mask {rule}: run this model on one rank")
            padding = self.cross_visible if masks.padding(self.cross_visible, key.shape[2]) is not None else None
        else:
            padding = self.visible if self.padding is not None else None
        if mask is None and padding is not None:
            raise RequestError(f"attention at {name} gets no mask, and the batch has padding: pass texts of one length")
        seen = dense(rule, query.shape[2], key.shape[2], padding, query.device)
        bias = options.get("position_bias")
        o, _ = sdpa_attention_forward(module, query, key, value, seen, scaling=options.get("scaling"), is_causal=False, position_bias=bias)
        return o


def dense(rule: MaskRule, queries: int, keys: int, visible: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    """Which keys the last ``queries`` tokens see, ``[batch or 1, 1, queries or 1, keys]``; ``None`` for all of them. ``visible``: ``[batch,
    keys]``, or with earlier keys in front, which a cache has dropped."""
    seen = None if visible is None else visible[:, None, None, -keys:].to(device, torch.bool)
    if rule.left is not None or rule.right is not None:
        places = torch.arange(keys, device=device)
        distance = places[None, :] - places[-queries:, None]
        near = torch.ones_like(distance, dtype=torch.bool)
        if rule.left is not None:
            near &= distance >= -rule.left
        if rule.right is not None:
            near &= distance <= rule.right
        seen = near[None, None] if seen is None else seen & near
    return seen


def own_states(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Before the first layer: the states of this rank's tokens, of ``[batch, tokens, width]``."""
    running = current()
    if not isinstance(running, StackPass) or running.trial:
        return None
    states = args[0] if args else kwargs["hidden_states"]
    running.begin(states.shape[1])
    first, end = running.rows
    own = states[:, first:end]
    return ((own, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": own})


def bias_of_own_rows(
    compute: Callable[..., torch.Tensor], query_length: int, key_length: int, device: Any = None, past_seen_tokens: int = 0
) -> torch.Tensor:
    """``compute_bias`` of T5 and its kin, ``[1, heads, queries, keys]``: for this rank's queries and the keys of all ranks."""
    running = current()
    if not isinstance(running, StackPass) or running.counts is None:
        return compute(query_length, key_length, device=device, past_seen_tokens=past_seen_tokens)
    first, end = running.rows
    bias = compute(end - first, running.tokens, device=device, past_seen_tokens=first)
    # As the group reads it, for all layers.
    return bias.transpose(1, 2).contiguous().transpose(1, 2)
