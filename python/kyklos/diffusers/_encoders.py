"""Prompts that one rank encodes for all."""

from __future__ import annotations

import functools
import json
import math
import zlib
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

from .._errors import RequestError
from .._group import Group
from .._models.telling import agreed, told
from .._rows import broadcast, gather

# Elements of a row that travels, and types that travel as they are.
_ROW = 64
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
#: Whole numbers below travel as float32.
_MOST = 1 << 24


class EncoderHandle:
    """Makes every rank encode prompts again: :meth:`remove`, or the end of a ``with`` block."""

    def __init__(self, pipe: Any, run: Any) -> None:
        self._pipe, self._run = pipe, run

    def remove(self) -> None:
        """No rank waits for another, and the group may have ended."""
        if vars(self._pipe).get("encode_prompt") is self._run:
            del self._pipe.encode_prompt

    def __enter__(self) -> EncoderHandle:
        return self

    def __exit__(self, *error: Any) -> None:
        self.remove()


def encode_once(pipe: Any, group: Group) -> EncoderHandle:
    """Lets rank 0 alone run ``pipe.encode_prompt``, and gives the other ranks its results. They need no text encoders:
    ``pipe.text_encoder = None`` there saves their memory.

    All ranks call it alike, and the pipeline with the same prompts. Outputs that are tensors of float32, float16 or bfloat16, bools, whole numbers below
    2^24, and anything that JSON has, in lists, tuples and dicts, reach the other ranks.

    :raises RequestError: a pipeline without ``encode_prompt``; in calls, ranks with other prompts, and outputs of other kinds.
    """
    with told(group):
        encode = getattr(pipe, "encode_prompt", None)
        if not callable(encode) or "encode_prompt" in vars(pipe):
            raise RequestError(
                f"{type(pipe).__name__} has no encode_prompt of its class: remove what has replaced it, or let every rank encode its prompts"
            )
        run = functools.partial(_encode, pipe, group, encode)
        pipe.encode_prompt = functools.update_wrapper(run, encode)
        return EncoderHandle(pipe, run)


def _encode(pipe: Any, group: Group, encode: Any, *args: Any, **options: Any) -> Any:
    with told(group):
        texts = [x for x in tree_flatten((args, sorted(options.items())))[0] if isinstance(x, (str, bool, int, float))]
        crc = zlib.crc32(repr(texts).encode())
        own = torch.tensor([[[crc >> 16, crc & 0xFFFF]]], dtype=torch.float32)
        rows = gather(group, own, "prompts to encode")[0]
        for rank in range(1, group.size):
            if not torch.equal(rows[rank], rows[0]):
                raise agreed(rank, f"rank {rank} has other prompts than rank 0: give the pipeline the same arguments on all ranks")
        leaves, head = _described(encode(*args, **options)) if group.rank == 0 else ([], b"")
        (length,) = broadcast(group, [len(head)], "encoded prompts, length")
        text = bytes(broadcast(group, list(head) or [0] * length, "encoded prompts, form")).decode()
        form = json.loads(text)
        device = next((x.device for x in leaves if isinstance(x, torch.Tensor)), None) or pipe._execution_device
        values = [
            _sent(group, leaves[place] if leaves else None, leaf, device, f"encoded prompts {place}") if isinstance(leaf, dict) else leaf
            for place, leaf in enumerate(form["leaves"])
        ]
        return tree_unflatten(values, treespec_loads(form["spec"]))


def _described(output: Any) -> tuple[list[Any], bytes]:
    """The leaves of an output, and their description."""
    leaves, spec = tree_flatten(output)
    described = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            described.append(leaf)
            continue
        is_whole = not leaf.is_floating_point() and not leaf.is_complex()
        if leaf.dtype not in _FLOATS and not (is_whole and (leaf.numel() == 0 or int(leaf.abs().max() if leaf.dtype != torch.bool else 1) < _MOST)):
            raise RequestError(f"encoded prompts of {leaf.dtype}, which do not travel: let every rank encode its prompts")
        described.append({"shape": list(leaf.shape), "dtype": str(leaf.dtype).removeprefix("torch.")})
    try:
        return leaves, json.dumps({"spec": treespec_dumps(spec), "leaves": described}).encode()
    except (TypeError, NotImplementedError) as error:
        raise RequestError(f"encoded prompts that do not travel: {error}; let every rank encode its prompts") from error


def _sent(group: Group, x: torch.Tensor | None, form: dict[str, Any], device: torch.device, label: str) -> torch.Tensor:
    """The tensor of rank 0."""
    dtype, number = getattr(torch, form["dtype"]), math.prod(form["shape"])
    if number == 0:
        return torch.empty(form["shape"], dtype=dtype, device=device)
    travels = dtype if dtype in _FLOATS else torch.float32
    flat = torch.empty(0, dtype=travels) if x is None else x.detach().reshape(-1).to(travels)
    rows = torch.nn.functional.pad(flat, (0, -flat.numel() % _ROW)).reshape(1, -1, _ROW)
    whole = gather(group, rows, label).reshape(-1)[:number].reshape(form["shape"])
    return whole.to(device, dtype)
