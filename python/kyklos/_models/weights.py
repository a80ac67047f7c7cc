"""Weights of a split model in training: each step must be the same on all ranks, but for rounding."""

from __future__ import annotations

import sys
import zlib

import torch

from .._group import Group
from .projections import exchange, mean, signs
from .telling import agreed

# Projections of each parameter, beside its norm.
_OF_WEIGHTS = 8
# The difference between the steps of two ranks that may be, relative to the larger step; relative to the parameter; and in last bits of elements
# of average size, to the root of so many. Rounding leaves 1e-6 of a step. A parameter of 16 bits has elements at a tie, which fall on either
# side: 1e-5 of the parameter, and one of them may be all that a small one moves by. A rank's own gradients make a step of its own.
_OTHER_STEP, _ROUNDING, _LAST_BITS = 0.25, 3e-5, 4
# At the first comparison the step is the parameter itself, which may have drifted apart by rounding.
_OTHER_WEIGHTS = 0.01
# Elements that are converted to float32 at once.
_AT_ONCE = 1 << 22


class Weights:
    """What the ranks have compared of the weights of one model.

    They compare the steps since the last comparison, not the weights: on unlike devices these may drift apart slowly by rounding, as long
    as no step does.
    """

    def __init__(self) -> None:
        #: Projections and norm of each parameter, with the version of the parameter that they are of.
        self._known: dict[str, tuple[tuple[int, int], torch.Tensor]] = {}
        #: Projections at the last comparison.
        self._before: dict[str, torch.Tensor] = {}

    @torch.compiler.disable
    def compare(self, group: Group, module: torch.nn.Module, label: str) -> None:
        """Refuses trainable parameters that some rank has changed in another way since the last call. All ranks call it.

        Those of ``fully_shard`` are left out: each element has one owner, from which all ranks get it.

        :raises RequestError: on all ranks.
        """
        sharded = _sharded(module)
        parameters = {name: one for name, one in module.named_parameters() if _compared(one) and not name.startswith(sharded)}
        if not parameters or group.size == 1:
            return
        now = torch.stack([self._projected(name, one) for name, one in parameters.items()])
        zero = torch.zeros(_OF_WEIGHTS, dtype=torch.float64)
        steps = now[:, :_OF_WEIGHTS] - torch.stack([self._before.get(name, zero) for name in parameters])
        text = " ".join(f"{name} {tuple(one.shape)} {one.dtype} {name in self._before}" for name, one in parameters.items())
        label = f"{label} {len(parameters)} weights {zlib.crc32(text.encode()):08x}"
        found = exchange(group, torch.cat([steps, now[:, _OF_WEIGHTS:]], 1), label)
        steps, norms = found[:, :, :_OF_WEIGHTS], found[:, :, _OF_WEIGHTS]
        sizes = mean(steps)
        rounding = [_ROUNDING + _LAST_BITS * torch.finfo(one.dtype).eps / one.numel() ** 0.5 for one in parameters.values()]
        share = torch.tensor([_OTHER_STEP if name in self._before else _OTHER_WEIGHTS for name in parameters]).double()
        bounds = share * sizes.maximum(sizes[:1]) + norms.maximum(norms[:1]) * torch.tensor(rounding).double()
        excess = mean(steps - steps[:1]) - bounds
        if (excess > 0).any():
            rank, worst = divmod(int((excess / bounds).nan_to_num().argmax()), len(parameters))
            raise agreed(
                rank,
                f"rank {rank} has other weights of {type(module).__name__} than rank 0 since the last pass, such as "
                f"{list(parameters)[worst]}: call kyklos.torch.sum_gradients(model.parameters(), group) after backward(), before each step of the "
                "optimizer, and change weights on all ranks alike",
            )
        self._before = {name: part[:_OF_WEIGHTS] for name, part in zip(parameters, now, strict=True)}

    def _projected(self, name: str, parameter: torch.nn.Parameter) -> torch.Tensor:
        """As :func:`_project`, unless the parameter is as it was."""
        version = (parameter._version, parameter.data_ptr())
        known = self._known.get(name)
        if known is None or known[0] != version:
            known = self._known[name] = (version, _project(parameter.detach()))
        return known[1]


def _compared(parameter: torch.nn.Parameter) -> bool:
    """Whether a parameter learns, and its values are here: types of other libraries have their own rules for access."""
    return (
        type(parameter) is torch.nn.Parameter
        and parameter.requires_grad
        and parameter.is_floating_point()
        and parameter.numel() > 0
        and parameter.device.type != "meta"
        and not parameter.is_inference()
    )


def _sharded(module: torch.nn.Module) -> tuple[str, ...]:
    """Beginnings of the names of parameters that ``fully_shard`` has sharded. While a module computes, its parameters are usual ones in buffers
    that are filled again and again."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    return tuple(f"{name}." if name else "" for name, part in module.named_modules() if isinstance(part, kind))


def _project(x: torch.Tensor) -> torch.Tensor:
    """8 projections of a tensor and its norm, about, in float64. It is read once: the signs are products of one for each row and one for each
    column."""
    matrix = x.reshape(-1, 1) if x.dim() < 2 else x.reshape(-1, x.shape[-1])
    if matrix.shape[0] < matrix.shape[1]:
        matrix = matrix.T
    rows, columns = matrix.shape
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        vector = signs(columns, 1)[:, 0].to(x.device)
        parts = [torch.mv(part.float(), vector) for part in matrix.split(max(1, _AT_ONCE // columns))]
        sums = torch.cat(parts).to("cpu", torch.float64)
    return torch.cat([sums @ signs(rows, _OF_WEIGHTS).double(), sums.norm()[None]])
