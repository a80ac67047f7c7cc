"""The inputs of a forward, which all ranks of a split transformer must have alike."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import torch

from .._group import Group
from .._models.agreement import halves, samples
from .._models.telling import agreed
from .._rows import gather

#: Axes and values of each input that ranks compare, and the relative difference that unlike devices may have.
_AXES, _SAMPLES, _DRIFT = 8, 8, 0.25
#: The same for inputs that no network has computed.
_ROUNDING = 1e-4


def compare(group: Group, inputs: dict[str, Any], place: str) -> None:
    """Shapes and some values of each input, of all ranks: ranks with another seed or prompt would give plausible nonsense.

    :param place: beginning of the label of the call.
    :raises RequestError: on all ranks.
    """
    tensors = {where: x for name, given in inputs.items() for where, x in _tensors(given, name)}
    plain = {name: zlib.crc32(_text(x).encode()) for name, x in inputs.items() if name not in tensors}
    others = torch.tensor([half for crc in plain.values() for half in halves(crc)], dtype=torch.float32)
    row = torch.cat([torch.zeros(1), others, *(torch.cat([_shape(x), _sample(x)]) for x in tensors.values())])
    label = f"{place}, inputs {zlib.crc32(' '.join([*plain, '', *tensors]).encode()):x}"
    whole = gather(group, row[None, None], label)[0, :, 1:]
    for name, part in zip(plain, whole[:, : len(others)].unflatten(1, (len(plain), 2)).unbind(1), strict=True):
        for rank in range(1, group.size):
            if not torch.equal(part[rank], part[0]):
                raise agreed(
                    rank, f"rank {rank} has another {name} than rank 0: give the pipeline the same arguments on all ranks"
                )
    whole = whole[:, len(others) :].unflatten(1, (len(tensors), _AXES + _SAMPLES))
    for name, part in zip(tensors, whole.unbind(1), strict=True):
        for rank in range(1, group.size):
            own, first = part[rank], part[0]
            if not torch.equal(own[:_AXES], first[:_AXES]):
                sizes = [[int(n) for n in axes[:_AXES] if n >= 0] for axes in (own, first)]
                raise agreed(
                    rank,
                    f"rank {rank} has {name} of shape {sizes[0]}, rank 0 of {sizes[1]}: give the pipeline the same inputs on all ranks",
                )
            own, first = own[_AXES:], first[_AXES:]
            drift = _ROUNDING if _is_setting(name, tensors[name]) else _DRIFT
            drift = drift if tensors[name].is_floating_point() else 0
            if (own - first).norm() > drift * (own.norm() + first.norm()):
                raise agreed(
                    rank,
                    f"rank {rank} has other values of {name} than rank 0: give the pipeline the same inputs on all ranks, and "
                    "a generator with the same seed",
                )


def _tensors(x: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of an argument, also in lists and dicts, with their places."""
    if isinstance(x, torch.Tensor):
        yield name, x
    elif isinstance(x, (list, tuple, dict)):
        for key, item in x.items() if isinstance(x, dict) else enumerate(x):
            yield from _tensors(item, f"{name}[{key!r}]")


def _shape(x: torch.Tensor) -> torch.Tensor:
    """The extents of the first 8 axes, then -1."""
    return torch.tensor([*x.shape, *[-1] * _AXES][:_AXES], dtype=torch.float32)


def _sample(x: torch.Tensor) -> torch.Tensor:
    """Values of x at equal distances, ``[8]``; zeros if it has no elements."""
    return samples(x, _SAMPLES) if x.numel() else torch.zeros(_SAMPLES)


def _is_setting(name: str, x: torch.Tensor) -> bool:
    """Whether an input is not computed by a network, so that only its rounding may differ between devices."""
    return (
        x.dim() <= 1 or not x.is_floating_point() or "timestep" in name or "guidance" in name or name.endswith("_ids")
    )


def _text(x: object) -> str:
    """An argument that is no tensor, as far as ranks compare it: numbers and texts, also in lists and dicts."""
    if isinstance(x, dict):
        return "{" + ", ".join(f"{key}: {_text(value)}" for key, value in sorted(x.items(), key=str)) + "}"
    if isinstance(x, (list, tuple)):
        return "[" + ", ".join(map(_text, x)) + "]"
    return repr(x) if x is None or isinstance(x, (bool, int, float, str)) else type(x).__name__
