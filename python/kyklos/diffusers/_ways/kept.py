"""Ways that were chosen, in a file for the next run."""

from __future__ import annotations

import json
import math
import os
import zlib
from pathlib import Path
from typing import Any

from ..._errors import RequestError
from ..._models.agreement import Passes, halves
from ..._rows import broadcast
from .choice import Estimate, Way

# Of the text of a file that ranks tell each other.
_MOST_BYTES = 1 << 20


class Kept:
    """The file at ``path`` of rank 0, which the other ranks do not read. It may have ways of other transformers and groups.

    :raises RequestError: a file that cannot be read, or is not of this kind; on all ranks.
    """

    def __init__(self, path: str | os.PathLike[str], name: str, passes: Passes) -> None:
        self._path, self._name, self._group = Path(path), name, passes.group
        # A way is good for the devices on which it was the fastest.
        self._devices = passes.compare(halves(zlib.crc32(passes.group.device.encode())), "devices of kept ways")
        text = self._of_rank_0()
        self._entries: list[dict[str, Any]] = json.loads(text) if text else []

    def estimates(self) -> dict[tuple[Any, ...], Estimate]:
        """The ways of this transformer on this group, by the shapes of the latents."""
        own = (entry for entry in self._entries if self._is_own(entry))
        return {tuple(map(tuple, entry["latents"])): _estimate(entry) for entry in own}

    def add(self, latents: tuple[Any, ...], estimate: Estimate) -> None:
        """Keeps a way, on rank 0. Ways that other processes have written to the file since stay.

        :raises OSError: a file that cannot be written.
        """
        if self._group.rank:
            return
        entry = _entry(estimate) | {"transformer": self._name, "devices": self._devices, "latents": [list(shape) for shape in latents]}
        others = _checked(self._path) if self._path.exists() else []
        others = [other for other in others if not (self._is_own(other) and other["latents"] == entry["latents"])]
        part = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        part.write_text(json.dumps([*others, entry], indent=1) + "\n", encoding="utf-8")
        os.replace(part, self._path)

    def _is_own(self, entry: dict[str, Any]) -> bool:
        return entry["transformer"] == self._name and entry["devices"] == self._devices

    def _of_rank_0(self) -> str:
        """The text of the file, on all ranks."""
        text = b""
        if self._group.rank == 0 and self._path.exists():
            own = [entry for entry in _checked(self._path) if self._is_own(entry)]
            text = json.dumps(own).encode()
        label = f"{self._name[:40]}, kept ways"
        (number,) = broadcast(self._group, [min(len(text), _MOST_BYTES + 1)], f"{label}, length")
        if number > _MOST_BYTES:
            raise RequestError(f"{self._path} has more than {_MOST_BYTES} bytes of ways for this transformer: delete it")
        return bytes(broadcast(self._group, list(text) or [0] * number, label)).decode() if number else ""


def _checked(path: Path) -> list[dict[str, Any]]:
    """The entries of a file."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"ways kept in {path}: {error}: give another file, or delete it") from error
    fields = {"transformer": str, "devices": list, "latents": list, "name": str, "seconds": float}
    is_right = isinstance(entries, list) and all(
        isinstance(entry, dict) and all(isinstance(entry.get(field), kind) for field, kind in fields.items()) for entry in entries
    )
    if not is_right or not all(_fits(entry, len(entry["devices"])) for entry in entries):
        raise RequestError(f"{path} has no ways as this release keeps them: give another file, or delete it")
    return entries


def _fits(entry: dict[str, Any], size: int) -> bool:
    def are_counts(values: Any, length: int) -> bool:
        return isinstance(values, list) and len(values) in (0, length) and all(type(value) is int and value >= 0 for value in values)

    shares, entries, pair = entry.get("shares"), entry.get("entries"), entry.get("pair")
    is_one = sum(map(bool, (shares, entries, pair))) == 1
    in_range = pair is None or are_counts(pair, 2) and len(set(pair)) == 2 and max(pair) < size
    shapes = all(isinstance(shape, list) and are_counts(shape, len(shape)) for shape in entry["latents"])
    execution = entry.get("execution")
    names = isinstance(execution, dict) and all(value is None or isinstance(value, str) for value in execution.values())
    some = (not shares or min(shares) > 0) and (not entries or sum(entries) > 0)
    # Neither infinite nor NaN.
    took = 0 < entry["seconds"] < math.inf
    return is_one and in_range and shapes and names and some and took and are_counts(shares, size) and are_counts(entries, size)


def _entry(estimate: Estimate) -> dict[str, Any]:
    way = estimate.way
    return {
        "name": way.name,
        "seconds": float(estimate.measured_s or estimate.predicted_s),
        "shares": list(way.shares),
        "execution": dict(way.execution),
        "entries": list(way.entries),
        "pair": None if way.pair is None else list(way.pair),
    }


def _estimate(entry: dict[str, Any]) -> Estimate:
    pair = entry["pair"]
    way = Way(
        entry["name"],
        tuple(entry["shares"]),
        {name: entry["execution"].get(name) for name in ("mesh", "strategy", "wire")},
        tuple(entry["entries"]),
        None if pair is None else (pair[0], pair[1]),
    )
    return Estimate(way, entry["seconds"], tried_s=[entry["seconds"]] * 4)
