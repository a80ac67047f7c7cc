"""What all ranks of a split model must have alike: which model a call is of, its weights, and the number of the pass."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch

from .._group import Group
from .._rows import gather
from .pace import Pace
from .telling import agreed
from .weights import Weights

# Models that were split over each group so far, and copies of them that have computed.
_models: WeakKeyDictionary[Group, int] = WeakKeyDictionary()
# Elements of each parameter that ranks compare.
_SAMPLES = 8


class Passes:
    """The passes of one model."""

    def __init__(self, group: Group, model: str = "a new model") -> None:
        self.group = group
        #: Beginning of the labels of all calls of this model. The ranks agree on a number of it.
        self.model = model
        self._numbered = False
        self._count = 0
        self._refused = group._refused
        self._weights = Weights()

    def __deepcopy__(self, memo: dict[int, object]) -> Passes:
        """Those of a copy of the model. The ranks need not make copies alike: one that only some ranks have must not compute."""
        return Passes(self.group, f"a copy of {self.model}" if self._numbered else self.model)

    def next(self, module: torch.nn.Module, learns: bool) -> int:
        """The number of the pass that begins. After a call that failed, the ranks agree on it again: some may have counted it and others
        not. The first pass of a copy compares the weights of ``module``, and so does one in which it ``learns``."""
        copied = not self._numbered
        if copied:
            self._agree([_models.get(self.group, 0)], "first pass")
        if self._refused != self.group._refused:
            high, low = divmod(self._count, 1 << 20)
            rows = self.compare([high, low], "passes after an error")
            self._count = max((high << 20) + low for high, low in rows)
            self._refused = self.group._refused
        self._count += 1
        if copied or learns:
            self._weights.compare(self.group, module, f"{self.model}, pass {self._count},")
        return self._count

    def compare(self, numbers: Sequence[int], what: str) -> list[list[int]]:
        """The numbers of each rank, by rank. All ranks pass as many, from 0 to 2^24, which float32 holds exactly."""
        own = torch.tensor(numbers, dtype=torch.float32)[None, None]
        return [[int(n) for n in row] for row in gather(self.group, own, f"{self.model}, {what}")[0].tolist()]

    def pace(self, token_ns: int, pairs_per_s: Sequence[int], whole_ns: int = 0) -> Pace:
        """The pace of all ranks, of which this one needs ``token_ns`` for a token of its own, and ``whole_ns`` for each token of all ranks."""
        own = [half for ns in (token_ns, whole_ns) for half in divmod(min(ns, (1 << 48) - 1), 1 << 24)]
        rows = self.compare(own, "pace")
        tokens, whole = ([(row[n] << 24) + row[n + 1] for row in rows] for n in (0, 2))
        return Pace.of(tokens, pairs_per_s, (), whole)

    def check_weights(self, module: torch.nn.Module) -> None:
        """Refuses parameters that have other names, shapes, types or values on some rank; compares 8 values of each.

        :raises RequestError: on all ranks.
        """
        rows = self._agree([_models.get(self.group, 0), *halves(_fingerprint(module))], "weights")
        for rank, row in enumerate(rows):
            if row[1:] != rows[0][1:]:
                raise agreed(
                    rank,
                    f"rank {rank} has other weights of {type(module).__name__} than rank 0: load the same checkpoint and adapters on "
                    "all ranks; weights made at random need the same seed, and ranks that are threads share PyTorch's",
                )

    def _agree(self, numbers: Sequence[int], what: str) -> list[list[int]]:
        """As :meth:`compare`, and numbers the model: one more than any rank has, since a model may have failed on some of them."""
        rows = self.compare(numbers, what)
        self._refused = self.group._refused
        _models[self.group] = max(row[0] for row in rows) + 1
        self.model, self._numbered = f"model {_models[self.group]}", True
        return rows


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
    x = x if x.dim() else x[None]
    places = torch.linspace(0, x.numel() - 1, count, dtype=torch.float64).long()
    return x.detach()[torch.unravel_index(places.to(x.device), x.shape)].to("cpu", torch.float32).nan_to_num()
