"""Splits the rows of an image or a video in a VAE of diffusers over the ranks of a group."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ..._errors import RequestError
from ..._group import Group
from ..._models.execution import checked_shares
from ..._models.telling import agreed, told
from .split import Split

__all__ = ["VaeHandle", "split_vae"]


class VaeHandle:
    """A split VAE. :meth:`remove` makes it whole again; as a context manager it does so at the end of the block."""

    def __init__(self, vae: torch.nn.Module, split: Split) -> None:
        self._vae, self._split = vae, split
        #: Why a method is computed whole on each rank, as it was: ``encode``, if it has layers that are not known.
        self.whole: dict[str, str] = {}

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that are computed in parts."""
        return tuple(self._split.units)

    def remove(self) -> None:
        """Gives the methods of the VAE back. No rank waits for another, and the group may have ended."""
        for method in self._split.units:
            run = vars(self._vae).get(method)
            if isinstance(run, functools.partial) and run.args[:1] == (self._split,):
                delattr(self._vae, method)
        # Others may have wrapped the methods since.
        self._split.units.clear()

    def __enter__(self) -> VaeHandle:
        return self

    def __exit__(self, *error: Any) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"kyklos.diffusers.VaeHandle({self._split.name}, {' and '.join(self.methods) or 'removed'})"


def split_vae(vae: torch.nn.Module, group: Group, *, shares: Sequence[float] | None = None) -> VaeHandle:
    """Splits the rows of ``vae.decode`` and ``vae.encode`` over the ranks of ``group``. All ranks call it alike, then call the VAE, or its
    pipeline, with the same inputs; every rank gets the whole result, which is that of one process but for rounding.

    A rank computes its rows of each layer. Convolutions get the rows at the border from the neighbours, group norms sum over all ranks, and
    attention is exact over all pixels. So there are no seams, and the memory of the layers is divided. Weights stay whole on each rank.

    Both ways are compared here on a few rows: ``decode`` must agree. ``encode`` stays whole if it does not, and :attr:`VaeHandle.whole` says why.

    :param vae: the VAE of a pipeline, such as ``pipe.vae``, in the type in which it computes.
    :param shares: for each rank its share of the rows, relative to the others; by default equal ones. Each rank gets at least one row of latents.
    :returns: a handle, whose ``remove()`` undoes it.
    :raises RequestError: a VAE that gives another result in parts. Its calls raise it for inputs that differ between ranks, tiling, rows that are too
        few, and heights that the VAE does not divide.
    """
    with told(group):
        name = type(vae).__name__
        for method in ("decode", "encode"):
            run = vars(vae).get(method)
            if isinstance(run, functools.partial) and isinstance(run.args[0], Split):
                raise RequestError(f"{name} is split by kyklos already: call remove() of its handle first")
            if run is not None:
                raise RequestError(f"{name}.{method} was replaced, such as by torch.compile: split the VAE before")
        if isinstance(shares, str):
            raise RequestError(f"shares {shares!r} of a VAE are not known: give a number for each rank")
        split = Split(group, name, checked_shares(shares, group.size))
        split.passes.check_weights(vae)
        handle = VaeHandle(vae, split)
        latents = split.latents(vae)
    picture = split.verify(vae, "decode", latents)
    if isinstance(picture, str):
        raise agreed(group.rank, picture)
    found = split.verify(vae, "encode", [(picture, {})])
    if isinstance(found, str):
        handle.whole["encode"] = found
    for method in split.units:
        setattr(vae, method, functools.partial(_call, split, vae, method))
    return handle


@torch.compiler.disable
def _call(split: Split, vae: torch.nn.Module, method: str, *args: Any, **options: Any) -> Any:
    if method not in split.units:
        return getattr(type(vae), method)(vae, *args, **options)
    with told(split.group):
        return split.call(vae, method, args, options)
