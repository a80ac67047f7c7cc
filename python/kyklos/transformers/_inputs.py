"""The inputs of a split model, and this rank's part of them."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from transformers import PreTrainedModel

from .._errors import RequestError
from . import _checks as checks
from ._cache import CACHE_NAMES

# Inputs with an axis of tokens, which is axis 1.
_OF_TOKENS = ("input_ids", "inputs_embeds", "token_type_ids")
# What a vision-language model adds to the states of image tokens in some layers: which tokens they are, and for each layer their rows.
_IMAGES, _ROWS = "visual_pos_masks", "deepstack_visual_embeds"
#: Inputs that a split model knows.
KNOWN = {*_OF_TOKENS, "position_ids", "attention_mask", *CACHE_NAMES, "use_cache", "return_dict", _IMAGES, _ROWS, "num_items_in_batch"}
# Rows of position_ids of three axes: time, height and width, with the place in the text before them or without.
_AXES = (3, 4)


def positions(base: PreTrainedModel, inputs: dict[str, Any], past: int, shape: tuple[int, int]) -> torch.Tensor:
    """``position_ids [batch or 1, tokens]``, or with axes of images ``[3 or 4, batch or 1, tokens]``; those that the model makes where
    none are given. ``shape``: batch and tokens."""
    given = inputs.get("position_ids")
    if given is None:
        return checks.default_positions(base, inputs.get("input_ids"), past, shape)
    of_images = given.dim() == 3 and given.shape[0] in _AXES and "mrope_section" in str(getattr(base.config, "rope_parameters", ""))
    if not (given.dim() == 2 or of_images) or given.shape[-2] not in (1, shape[0]) or given.shape[-1] != shape[1]:
        raise RequestError(
            f"position_ids of shape {tuple(given.shape)} for {shape[0]} texts of {shape[1]} tokens: pass [batch, tokens], or "
            "[3, batch, tokens] for a model with positions of images"
        )
    return given


def places(positions: torch.Tensor) -> torch.Tensor:
    """The places in the text ``[batch or 1, tokens]``, by which a model tells packed documents apart."""
    if positions.dim() == 2:
        return positions
    # Without them the model does not look for documents.
    return positions[0] if positions.shape[0] == _AXES[1] else torch.arange(positions.shape[-1])[None]


def part(inputs: dict[str, Any], first: int, end: int) -> dict[str, Any]:
    """What the tokens from ``first`` to ``end`` need of the inputs of all tokens."""
    own = {name: inputs[name][:, first:end] for name in _OF_TOKENS if name in inputs}
    images, rows = inputs.get(_IMAGES), inputs.get(_ROWS)
    if images is not None:
        own[_IMAGES] = images[:, first:end]
        if rows is not None:
            # Rows are in the order of the image tokens, one batch entry after the other.
            numbers = (images.flatten().cumsum(0) - 1).view(images.shape)[:, first:end][own[_IMAGES]]
            own[_ROWS] = [of_layer[numbers.to(of_layer.device)] for of_layer in rows]
    return own


def embeddings(inputs: dict[str, Any]) -> dict[str, torch.Tensor | None]:
    """The inputs that a network has computed."""
    rows = inputs.get(_ROWS) or []
    return {"inputs_embeds": inputs.get("inputs_embeds"), **{f"{_ROWS} {layer}": each for layer, each in enumerate(rows)}}


def digest(*tensors: torch.Tensor | None) -> str:
    """A short text that is equal on ranks with equal inputs. Floating-point values are left out, which devices may round differently:
    :func:`compare_rows` compares them."""
    crc = 0
    for tensor in tensors:
        if tensor is None:
            continue
        crc = zlib.crc32(str(tuple(tensor.shape)).encode(), crc)
        if not tensor.is_floating_point():
            crc = zlib.crc32(tensor.detach().to("cpu", torch.int64).contiguous().numpy().tobytes(), crc)
    return f"{crc:08x}"
