"""A VAE whose methods compute a part of the rows on each rank."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

from ..._errors import RequestError
from ..._group import Group
from ..._models.agreement import Passes
from ..._models.execution import checked_shares
from ..._models.telling import agreed, told
from ..._rows import without_backward
from .._hooks import bounds
from .._inputs import compare
from .._shares import _whole
from .band import ALONE, Band
from .layers import Layers
from .trial import Trial

_METHODS = ("decode", "encode")


class VaeHandle:
    """A split VAE. :meth:`remove` makes it whole again; as a context manager it does so at the end of the block."""

    def __init__(self, vae: torch.nn.Module) -> None:
        self._vae = vae
        self._before: dict[str, Any] = {}
        self._removed = False
        #: The methods that are computed in parts: ``decode``, and ``encode`` where its layers are known.
        self.methods: tuple[str, ...] = ()
        #: Why ``encode`` is not one of them.
        self.why_whole: str | None = None

    def _set(self, method: str, run: Any) -> None:
        self._before[method] = vars(self._vae).get(method)
        setattr(self._vae, method, run)
        self.methods = tuple(self._before)

    def remove(self) -> None:
        """Gives the methods of the VAE back. No rank waits for another, and the group may have ended."""
        self._removed = True
        while self._before:
            method, before = self._before.popitem()
            if before is None:
                delattr(self._vae, method)
            else:
                setattr(self._vae, method, before)

    def __enter__(self) -> VaeHandle:
        return self

    def __exit__(self, *error: Any) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"kyklos.diffusers.VaeHandle({type(self._vae).__name__}, {'removed' if self._removed else ' and '.join(self.methods)})"


def split_vae(vae: torch.nn.Module, group: Group, *, shares: Sequence[float] | None = None) -> VaeHandle:
    """Splits the rows of ``vae.decode`` and ``vae.encode`` over the ranks of ``group``. All ranks call it alike, then call the VAE, or its pipeline,
    with the same inputs; every rank gets the whole result, which is that of one process but for rounding.

    A rank computes its rows of each layer. Convolutions get the rows at the border from the neighbours, group norms sum over all ranks, and
    attention is exact over all pixels. So there are no seams, and the memory of the layers is divided. Weights stay whole on each rank.

    :param vae: the VAE of a pipeline, such as ``pipe.vae``, in the type in which it computes.
    :param shares: for each rank its share of the rows, relative to the others; by default equal ones.
    :returns: a handle, whose ``remove()`` undoes it.
    :raises RequestError: a VAE that gives another result in parts than whole, which both compute here once of a few rows. Calls of the VAE raise it for
        inputs that differ between ranks, tiling, rows that are too few, and gradients.
    """
    with told(group):
        name = type(vae).__name__
        if isinstance(shares, str):
            raise RequestError(f"shares {shares!r} of a VAE are not known: give a number for each rank")
        if isinstance(vars(vae).get("decode"), functools.partial):
            raise RequestError(f"{name} is split by kyklos already: call remove() of its handle first")
        split = _Split(group, name, _whole(checked_shares(shares, group.size)))
        split.passes.check_weights(vae)
        trial = Trial(vae, split.rows_of_trial())
        handle = VaeHandle(vae)
        for method in _METHODS:
            why = split.verify(vae, method, trial)
            if why is None:
                handle._set(method, functools.partial(_call, split, vae, method))
            elif method == "decode":
                raise agreed(group.rank, why)
            else:
                handle.why_whole = why
        return handle
