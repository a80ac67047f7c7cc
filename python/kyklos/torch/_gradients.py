"""Gradients of parameters that every rank has, summed over the ranks."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

import torch

from .._group import Group
from .._rows import gather, sum_rows
from .._arrays.torch import is_sharded, readable

# Elements of a row, and rows that are exchanged at once: 16 MiB of float32.
_WIDTH, _ROWS = 1024, 4096
_TYPES = (torch.float32, torch.float16, torch.bfloat16)


def sum_gradients(parameters: Iterable[torch.nn.Parameter], group: Group) -> None:
    """Replaces the gradient of each parameter by its sum over the ranks. All ranks call it together, after ``backward()``.

    A rank's tokens give it a part of the gradient of each parameter, since it has a copy of them all. The sums are added in
    float64, each on one rank, and rounded once, so all ranks get the same bytes. Nothing is divided by the number of ranks. If
    some ranks have no gradient of a parameter, theirs counts as 0; if none has one, it stays ``None``.

    :param parameters: such as ``model.parameters()``, in the same order on all ranks; those with ``requires_grad=False`` are
        left out.
    :raises RequestError: parameters of other shapes or types than on another rank, on all ranks; gradients that are sparse or
        of other types than float32, float16 and bfloat16; parameters that ``fully_shard`` has sharded, whose gradients are sums already.
    """
    wanted = [parameter for parameter in parameters if parameter.requires_grad]
    if any(map(is_sharded, wanted)):
        raise group.refuse(
            "sum_gradients over parameters that are sharded (DTensor)", "leave them out: fully_shard sums their gradients in backward()"
        )
    refused = next((reason for reason in map(_refused, wanted) if reason), None)
    if refused is not None:
        raise group.refuse(f"sum_gradients over {refused}", "use float32, float16 or bfloat16, and dense gradients")
    if not wanted or group.size == 1:
        return
    text = " ".join(f"{tuple(parameter.shape)} {parameter.dtype}" for parameter in wanted)
    label = f"gradients of {len(wanted)} parameters {zlib.crc32(text.encode()):08x}"
    own = torch.tensor([[[float(parameter.grad is not None) for parameter in wanted]]])
    anywhere = gather(group, own, label)[0].amax(0) > 0
    with torch.no_grad():
        gradients = [_present(parameter) for parameter, found in zip(wanted, anywhere.tolist(), strict=True) if found]
        for number, pieces in enumerate(_buckets(gradients)):
            flat = torch.cat(readable(group, *pieces))
            total = _sum(group, flat, f"{label}, part {number}")
            for piece, part in zip(pieces, total.split([len(piece) for piece in pieces]), strict=True):
                piece.copy_(part)


def _present(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Its gradient on one axis, over the memory of ``parameter.grad``."""
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    # Zeros are like the parameter, which may be transposed in memory; so may be a gradient.
    parameter.grad = gradient.contiguous()
    return parameter.grad.view(-1)


def _refused(parameter: torch.nn.Parameter) -> str | None:
    gradient = parameter.grad
    if parameter.dtype not in _TYPES:
        return f"parameters of {parameter.dtype}"
    if gradient is not None and (gradient.layout != torch.strided or gradient.dtype != parameter.dtype):
        return f"gradients of {gradient.dtype} in the layout {gradient.layout}, of parameters of {parameter.dtype}"
    return None


def _buckets(gradients: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Views of all elements, in lists of one type, of at most so many elements as are exchanged at once."""
    bucket: list[torch.Tensor] = []
    room = _WIDTH * _ROWS
    for gradient in gradients:
        for piece in gradient.split(_WIDTH * _ROWS):
            if bucket and (len(piece) > room or piece.dtype != bucket[0].dtype):
                yield bucket
                bucket, room = [], _WIDTH * _ROWS
            bucket.append(piece)
            room -= len(piece)
    if bucket:
        yield bucket


def _sum(group: Group, flat: torch.Tensor, label: str) -> torch.Tensor:
    """Each rank sums a part of the rows, and then all ranks get all parts."""
    rows = torch.nn.functional.pad(flat, (0, -len(flat) % _WIDTH)).view(1, -1, _WIDTH)
    cuts = [rows.shape[1] * rank // group.size for rank in range(group.size + 1)]
    counts = [end - first for first, end in zip(cuts, cuts[1:], strict=False)]
    own = sum_rows(group, rows, counts, f"{label} of rank")
    return gather(group, own, f"{label}, sums").view(-1)[: len(flat)]
