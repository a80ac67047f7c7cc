"""Numbers that tell whether tensors of unlike devices are the same but for rounding.

A tensor is projected on a few vectors of pseudo-random signs. The root of the mean square of its projections is about its norm, and
projections are linear: those of two ranks differ by about the norm of the difference of their tensors, wherever it is. So a few numbers
stand for a tensor, and a difference is held against the norm. Rounding leaves 1e-2 of it at most, another token or step about all of it.
"""

from __future__ import annotations

import functools

import torch

from .._group import Group
from .._rows import gather
from .telling import agreed

# Numbers are exchanged in rows of this width, which attention takes as one head.
_WIDTH = 64
# Of each row of an input: with the norm, 8 rows for each row of the exchange.
_OF_ROW = 7
# A difference of inputs, relative to the norm of the row. Networks in 16 bits leave 1e-2 to 3e-2 on unlike devices; embeddings of two tokens
# differ by 0.5 or more.
_OTHER_ROW = 0.1


@torch.compiler.disable
def compare_rows(group: Group, given: dict[str, torch.Tensor | None], place: str) -> None:
    """Refuses inputs of which some row, along the last axis, differs between ranks by more than rounding. Those without numbers of
    floating point are not looked at. ``place`` is a text that has the shapes of all of them.

    :raises RequestError: on all ranks.
    """
    inputs = {name: x for name, x in given.items() if x is not None and x.is_floating_point() and x.dim() and x.numel()}
    if not inputs:
        return
    rows = [x.detach().reshape(-1, x.shape[-1]) for x in inputs.values()]
    found = exchange(group, torch.cat([_of_rows(part) for part in rows]), f"{place} values of {', '.join(inputs)}")
    difference = mean(found[:, :, :_OF_ROW] - found[:1, :, :_OF_ROW])
    wrong = difference > _OTHER_ROW * found[:, :, _OF_ROW].maximum(found[:1, :, _OF_ROW])
    if not wrong.any():
        return
    rank, row = wrong.nonzero()[0].tolist()
    for (name, x), part in zip(inputs.items(), rows, strict=True):
        if row < len(part):
            where = [int(axis) for axis in torch.unravel_index(torch.tensor(row), x.shape[:-1])] if x.dim() > 1 else ""
            raise agreed(
                rank,
                f"rank {rank} has other values of {name}{where} than rank 0: give all ranks the same inputs, and where "
                "a model around the split one chooses tokens, as generate() of a vision-language model does, all ranks the same seed",
            )
        row -= len(part)


def exchange(group: Group, numbers: torch.Tensor, label: str) -> torch.Tensor:
    """``[ranks, rows, columns]`` in float64, of the finite ``numbers [rows, columns]`` of each rank, which travel as float32."""
    flat = numbers.to("cpu", torch.float32).nan_to_num().flatten()
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % _WIDTH)).view(1, -1, _WIDTH)
    whole = gather(group, padded, label).view(group.size, -1)
    return whole[:, : len(flat)].double().view(group.size, *numbers.shape)


def _of_rows(rows: torch.Tensor) -> torch.Tensor:
    """The projections and the norm of each row."""
    with torch.no_grad(), torch.autocast(rows.device.type, enabled=False):
        projected = rows @ signs(rows.shape[1], _OF_ROW).to(rows)
        norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=torch.float32)
    return torch.cat([projected.float(), norms], 1).cpu()


def mean(x: torch.Tensor) -> torch.Tensor:
    """The root of the mean square along the last axis."""
    return x.square().mean(-1).sqrt()


@functools.lru_cache(maxsize=64)
def signs(count: int, columns: int) -> torch.Tensor:
    """``[count, columns]`` of ±1, the same on all ranks, whatever random generators they have."""
    x = torch.arange(1, count * columns + 1, device="cpu") * 0x9E3779B97F4A7C1
    for shift, factor in ((30, 0x3F58476D1CE4E5B9), (27, 0x14D049BB133111EB)):
        x = (x ^ (x >> shift)) * factor
    return ((x >> 31 & 1) * 2 - 1).float().view(count, columns)
