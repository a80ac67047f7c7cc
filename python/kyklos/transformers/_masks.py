"""Masks of transformers as rules of global positions.

The library describes a mask by functions of indices, which on a shard would be local ones. Here a mask function is recognised
by its code, and becomes a rule; the padding of the caller and packed documents are added from the global inputs. What is not
recognised is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import masking_utils

from .._errors import RequestError


@dataclass(frozen=True)
class MaskRule:
    """Which keys a query sees, by distance: up to ``left`` earlier ones and ``right`` later ones, ``None`` for all of them."""

    left: int | None
    right: int | None
    #: The model keeps packed documents apart.
    packed: bool = False

    def __str__(self) -> str:
        if self.right is None and self.left is None:
            return "full"
        if self.left is None and self.right == 0:
            return "causal"
        left, right = (-1 if extent is None else extent for extent in (self.left, self.right))
        return f"window:{left},{right}"

    @property
    def window(self) -> int | None:
        """Keys that a query of a causal model sees at most, its own included."""
        return self.left + 1 if self.left is not None and self.right == 0 else None


FULL = MaskRule(None, None)
CAUSAL = MaskRule(None, 0)


def rule_of(*, mask_function: Callable[..., Any], **_: Any) -> MaskRule:
    """The mask function that the library calls for ``attn_implementation="kyklos"``. Attention gets its value as its mask."""
    return _rule(mask_function)


def _rule(function: Callable[..., Any]) -> MaskRule:
    if function is masking_utils.causal_mask_function:
        return CAUSAL
    if function is masking_utils.bidirectional_mask_function:
        return FULL
    name = getattr(function, "__qualname__", repr(function))
    of_library = getattr(function, "__module__", None) == masking_utils.__name__
    code = getattr(function, "__code__", None)
    held = (
        dict(zip(code.co_freevars, (cell.cell_contents for cell in function.__closure__ or ()), strict=True))
        if code
        else {}
    )
    match name if of_library else "":
        case "sliding_window_overlay.<locals>.inner_mask":
            return MaskRule(held["sliding_window"] - 1, None)
        case "sliding_window_bidirectional_overlay.<locals>.inner_mask":
            return MaskRule(held["sliding_window"], held["sliding_window"])
        case "packed_sequence_mask_function.<locals>.inner_mask":
            return MaskRule(None, None, packed=True)
        case "remap_positions_for_packed_sequence.<locals>.inner_mask":
            return _rule(held["mask_function"])
        case "and_masks.<locals>.and_mask":
            rules = [_rule(part) for part in held["mask_functions"]]
            return MaskRule(
                min((rule.left for rule in rules if rule.left is not None), default=None),
                min((rule.right for rule in rules if rule.right is not None), default=None),
                any(rule.packed for rule in rules),
            )
    raise RequestError(
        f"the model's mask has the part {name}, as those of image tokens that see each other, and a group takes causal, bidirectional and "
        "sliding-window masks with padding or packed documents: leave out the images, or run the model on one rank"
    )


def padding(attention_mask: torch.Tensor | None, keys: int) -> str | torch.Tensor | None:
    """The padding of a batch: ``None`` without any, ``valid:…`` if it is all on the right, else a bool tensor ``[batch, keys]`` in
    which false hides a key.

    :param attention_mask: ``[batch, keys]``, 0 for padding.
    """
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2 or attention_mask.shape[1] != keys:
        raise RequestError(
            f"an attention_mask of shape {tuple(attention_mask.shape)} for {keys} tokens, those of the cache included: pass "
            "[batch, tokens], with 0 for padding"
        )
    visible = attention_mask.to("cpu", torch.bool)
    if visible.all():
        return None
    counts = visible.sum(-1)
    if torch.equal(visible, torch.arange(keys)[None] < counts[:, None]):
        return "valid:" + ",".join(str(count) for count in counts.tolist())
    return visible


def documents(position_ids: torch.Tensor) -> list[list[int]] | None:
    """For each batch entry the boundaries of its documents, from 0 to the number of tokens: a document begins where positions do
    not go up by one. ``None`` if each entry is one document.

    :param position_ids: ``[batch, tokens]``, of all ranks.
    """
    positions = position_ids.to("cpu")
    begins = positions.diff(dim=-1) != 1
    if not begins.any():
        return None
    return [[0, *(row.nonzero().flatten() + 1).tolist(), positions.shape[1]] for row in begins]


def mask_text(rule: MaskRule, boundaries: list[list[int]] | None, right_padding: str | None) -> str:
    """The notation of :meth:`kyklos.Group.attend`."""
    parts = [str(rule)]
    if right_padding is not None:
        parts = [right_padding] if parts == ["full"] else [*parts, right_padding]
    text = "+".join(parts)
    if boundaries is None:
        return text
    base = "" if text == "full" else f"{text}+"
    entries = [f"{base}documents:{','.join(map(str, row))}" for row in boundaries]
    return entries[0] if all(entry == entries[0] for entry in entries) else "//".join(entries)
