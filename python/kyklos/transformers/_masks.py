"""Masks of transformers as rules of global positions.

The library describes a mask by functions of indices, which on a shard would be local ones. Here a mask function is recognised
by its code, and becomes a rule; the padding of the caller and packed documents are added from the global inputs. Blocks of tokens that
see each other, such as images, are no rule of distances: a model around the language model knows the blocks of all tokens, so each rank
asks the library's function for the rows of its own queries. What is not recognised is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
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
    #: A query sees keys of its own chunk of so many tokens only.
    chunk: int | None = None
    #: Numbers ``[batch, keys]`` of blocks whose tokens see each other, negative outside of them: then distances are only bounds.
    blocks: tuple[torch.Tensor, ...] = field(default=(), compare=False)
    #: The mask itself where distances are bounds: of queries from one number to another a bool tensor ``[batch, 1, queries, keys]``.
    rows: Callable[[int, int], torch.Tensor] | None = None
    #: Models ask a mask for the number of its axes, to see whether it is one for each query and key.
    ndim = 0

    def __str__(self) -> str:
        if self.right is None and self.left is None:
            return "full"
        if self.left is None and self.right == 0:
            return "causal"
        left, right = (-1 if extent is None else extent for extent in (self.left, self.right))
        return f"window:{left},{right}"

    @property
    def window(self) -> int | None:
        """Keys that a query of a causal model sees at most, its own included, where only the distance counts."""
        return self.left + 1 if self.left is not None and self.right == 0 and self.chunk is None else None

    def to(self, *_: Any) -> MaskRule:
        """This rule: models ask a mask for another type."""
        return self


FULL = MaskRule(None, None)
CAUSAL = MaskRule(None, 0)
# Of functions that are known by their names; the second one lets all tokens of an encoder see each other.
_KNOWN_FILES = (masking_utils.__name__, "transformers.models.gemma3.modeling_gemma3")


def rule_of(
    *,
    whole: bool,
    mask_function: Callable[..., Any],
    batch_size: int,
    q_offset: int,
    kv_length: int,
    device: Any = "cpu",
    **_: Any,
) -> MaskRule:
    """The rule of a mask function of the library, which attention gets as its mask.

    :param whole: the function was made with the inputs of all tokens, and not with those of one rank.
    :raises RequestError: a function that is not known, or blocks of which this rank knows its tokens only.
    """
    rule = _rule(mask_function)
    if not rule.blocks:
        return rule
    if not whole:
        raise _refused("blockwise_overlay")

    def rows(first: int, end: int) -> torch.Tensor:
        axes = (batch_size, 1, end - first, kv_length)
        places = (torch.arange(count, device=device) for count in axes)
        batch, head, query, key = (each.view([-1 if axis == own else 1 for axis in range(4)]) for own, each in enumerate(places))
        return mask_function(batch, head, query + q_offset + first, key).expand(axes)

    return replace(rule, rows=rows)


def _refused(part: str) -> RequestError:
    return RequestError(
        f"the model's mask has the part {part}, which is made from the tokens of one rank or is not known, and a group takes causal, bidirectional, "
        "sliding-window and chunked masks with padding, packed documents or images: run the model on one rank"
    )


def _rule(function: Callable[..., Any]) -> MaskRule:
    if function is masking_utils.causal_mask_function:
        return CAUSAL
    if function is masking_utils.bidirectional_mask_function:
        return FULL
    name = getattr(function, "__qualname__", repr(function))
    of_library = getattr(function, "__module__", None) in _KNOWN_FILES
    code = getattr(function, "__code__", None)
    held = (
        dict(zip(code.co_freevars, (cell.cell_contents for cell in function.__closure__ or ()), strict=True))
        if code
        else {}
    )
    match name if of_library else "":
        case "sliding_window_overlay.<locals>.inner_mask":
            return MaskRule(held["sliding_window"] - 1, None)
        case "Gemma3TextModel.forward.<locals>.<lambda>":
            return FULL
        case "_bidirectional_window_overlay.<locals>.inner_mask":
            return MaskRule(held["sliding_window"] - 1, held["sliding_window"] - 1)
        case "sliding_window_bidirectional_overlay.<locals>.inner_mask":
            return MaskRule(held["sliding_window"], held["sliding_window"])
        case "chunked_overlay.<locals>.inner_mask":
            # Where the first chunk begins is told from the padding of all tokens.
            return MaskRule(held["chunk_size"] - 1, held["chunk_size"] - 1, chunk=held["chunk_size"])
        case "packed_sequence_mask_function.<locals>.inner_mask":
            return MaskRule(None, None, packed=True)
        case "remap_positions_for_packed_sequence.<locals>.inner_mask":
            return _rule(held["mask_function"])
        case "blockwise_overlay.<locals>.inner_mask":
            reach = _longest(held["block_sequence_ids"])
            return MaskRule(reach, reach, blocks=(held["block_sequence_ids"],))
        case "and_masks.<locals>.and_mask":
            rules = [_rule(part) for part in held["mask_functions"]]
            return MaskRule(
                min((rule.left for rule in rules if rule.left is not None), default=None),
                min((rule.right for rule in rules if rule.right is not None), default=None),
                any(rule.packed for rule in rules),
                min((rule.chunk for rule in rules if rule.chunk is not None), default=None),
                sum((rule.blocks for rule in rules), ()),
            )
        case "or_masks.<locals>.or_mask":
            rules = [_rule(part) for part in held["mask_functions"]]
            # Blocks of one token change nothing.
            rules = [rule for rule in rules if not (rule.blocks and (rule.left, rule.right) == (0, 0))] or rules
            if len(rules) == 1:
                return rules[0]
            blocks = sum((rule.blocks for rule in rules), ())
            # Two distances are one: both have the token itself. Chunks and documents are none, and then only the rows know.
            if blocks or not any(rule.packed or rule.chunk for rule in rules):
                lefts, rights = [rule.left for rule in rules], [rule.right for rule in rules]
                return MaskRule(_farthest(lefts), _farthest(rights), blocks=blocks)
    raise _refused(name)


def _farthest(distances: list[int | None]) -> int | None:
    return None if None in distances else max(each for each in distances if each is not None)


def _longest(blocks: torch.Tensor) -> int:
    """The largest distance of two tokens of one block, of their numbers ``[batch, keys]``."""
    numbers = blocks.to("cpu", torch.int64)
    tokens = numbers.shape[1]
    places = torch.arange(tokens).expand_as(numbers)
    of_block, inside = numbers.clamp(min=0), numbers >= 0
    count = int(of_block.max()) + 1
    first = torch.full((len(numbers), count), tokens).scatter_reduce(1, of_block, places.masked_fill(~inside, tokens), "amin")
    last = torch.full((len(numbers), count), -1).scatter_reduce(1, of_block, places.masked_fill(~inside, -1), "amax")
    return int((last - first).clamp(min=0).max())


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


def places(attention_mask: torch.Tensor | None, batch: int, keys: int) -> torch.Tensor:
    """By which chunks count the tokens of texts that are not packed: from the first one that is no padding, ``[batch, keys]``."""
    numbers = torch.arange(keys)[None].expand(batch, -1)
    return numbers if attention_mask is None else numbers - (attention_mask.to("cpu").cumsum(-1) == 0).sum(-1, keepdim=True)


def chunks(size: int, places: torch.Tensor, boundaries: list[list[int]] | None) -> list[list[int]]:
    """The boundaries of chunks of ``size`` tokens, as :func:`documents`; and those of documents.

    :param places: ``[batch, keys]``, the numbers of all tokens in their text.
    """
    keys = places.shape[1]
    begins = [[0, keys, *(row % size == 0).nonzero().flatten().tolist()] for row in places]
    return [sorted({*row, *(() if boundaries is None else boundaries[entry])}) for entry, row in enumerate(begins)]


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
