"""What all ranks of a split model must have alike: which model a call is of, its weights, and the number of the pass."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch

from ._errors import RequestError
from ._group import Group
from ._rows import gather

# Models that were split over each group so far.
_models: WeakKeyDictionary[Group, int] = WeakKeyDictionary()
# Elements of each parameter that ranks compare.
_SAMPLES = 8


class Passes:
    """The passes of one model. All ranks split their models in the same order, so the n-th model of a group is the same one."""

    def __init__(self, group: Group) -> None:
        self.group = group
        _models[group] = _models.get(group, 0) + 1
        #: Beginning of the labels of all calls of this model.
        self.model = f"model {_models[group]}"
        self._count = 0
        self._doubtful = False

    def next(self) -> int:
        """The number of the pass that begins. After a pass that failed, the ranks agree on it again: some may have counted it and
        others not."""
        if self._doubtful:
            high, low = divmod(self._count, 1 << 20)
            rows = self.compare([high, low], "passes after an error")
            self._count = max((high << 20) + low for high, low in rows)
            self._doubtful = False
        self._count += 1
        return self._count

    def failed(self) -> None:
        """The current pass has failed on this rank."""
        self._doubtful = True

    def compare(self, numbers: Sequence[int], what: str) -> list[list[int]]:
        """The numbers of each rank, by rank. All ranks pass as many, from 0 to 2^24, which float32 holds exactly."""
        own = torch.tensor(numbers, dtype=torch.float32)[None, None]
        return [[int(n) for n in row] for row in gather(self.group, own, f"{self.model}, {what}")[0].tolist()]

    def check_weights(self, module: torch.nn.Module) -> None:
        """Refuses parameters that have other names, shapes, types or values on some rank; compares 8 values of each.

        :raises RequestError: on all ranks.
        """
        rows = self.compare(halves(_fingerprint(module)), "weights")
        for rank, row in enumerate(rows):
            if row != rows[0]:
                raise RequestError(
                    f"rank {rank} has other weights of {type(module).__name__} than rank 0: load the same checkpoint and adapters on "
                    "all ranks; weights made at random need the same seed, and ranks that are threads share PyTorch's"
                )


def halves(crc: int) -> list[int]:
    """A number of 32 bits as two that float32 holds exactly."""
    return [crc >> 16, crc & 0xFFFF]


def _fingerprint(module: torch.nn.Module) -> int:
    crc = 0
    for name, parameter in module.named_parameters():
        crc = zlib.crc32(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode(), crc)
        # Offloaded parameters have no values here, and types of other libraries have their own rules for access.
        if parameter.device.type != "meta" and type(parameter) is torch.nn.Parameter and parameter.numel():
            crc = zlib.crc32(bytes(samples(parameter, _SAMPLES).numpy()), crc)
    return crc


def samples(x: torch.Tensor, count: int) -> torch.Tensor:
    """Values of ``x`` at equal distances, ``[count]``, float32 on the CPU. ``x`` has elements."""
    places = torch.linspace(0, x.numel() - 1, count, dtype=torch.float64).long()
    return x.detach()[torch.unravel_index(places.to(x.device), x.shape)].to("cpu", torch.float32).nan_to_num()
