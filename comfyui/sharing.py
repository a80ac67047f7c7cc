"""The helpers of this process, and what became of its calls."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

#: Reasons that the page shows, at most.
MOST_REASONS = 20


@dataclass
class Counts:
    """What became of the calls of all models that use the same helpers."""

    #: Calls of which helpers computed heads.
    shared: int = 0
    #: Calls that this machine computed alone, by reason.
    alone: dict[str, int] = field(default_factory=dict)
    #: The last failure, in words; empty once helpers have worked again.
    error: str = ""

    def local(self, reason: str) -> None:
        if reason not in self.alone and len(self.alone) >= MOST_REASONS:
            reason = "other reasons"
        self.alone[reason] = self.alone.get(reason, 0) + 1

    def failed(self, error: Exception) -> None:
        self.error = f"{type(error).__name__}: {error}"
        self.local("helpers failed")


@dataclass(frozen=True)
class Opened:
    """Helpers that are open in this process."""

    helpers: Any
    counts: Counts = field(default_factory=Counts)


#: By names, devices and wire format.
_opened: dict[tuple[tuple[str, ...], tuple[str, ...], str], Opened] = {}
_lock = threading.Lock()


def open_helpers(names: str = "", devices: str = "", wire: str = "same") -> Opened:
    """Helpers, which are opened once in a process.

    :param names: of invitations, separated by commas; all that this user has made if there are none.
    :param devices: of this machine, separated by commas, that help too: ``wgpu:1``, ``cuda:1``, ``cpu``.
    :param wire: ``same``, or ``f16`` or ``int8``, which round what is sent.
    :raises RuntimeError: Kyklos is not installed, or has no helpers.
    :raises kyklos.RequestError: a name without an invitation, a device or a wire format that there is not.
    """
    key = (_list(names), _list(devices), wire)
    with _lock:
        if key not in _opened:
            _opened[key] = Opened(_kyklos().helpers(names=list(key[0]) or None, devices=list(key[1]), wire=wire))
        return _opened[key]


def _list(text: str) -> tuple[str, ...]:
    return tuple(sorted({part.strip() for part in text.split(",")} - {""}))


def status() -> dict[str, Any]:
    """What the page shows: helpers, each once, and counts of calls."""
    with _lock:
        opened = list(_opened.values())
    helpers: dict[str, dict[str, Any]] = {}
    errors = []
    for one in opened:
        try:
            # A helper that two nodes name is shown as the one that works.
            for helper in one.helpers.status():
                if helper["name"] not in helpers or helper["calls"] > helpers[helper["name"]]["calls"]:
                    helpers[helper["name"]] = dict(helper)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    alone: dict[str, int] = {}
    for one in opened:
        for reason, count in list(one.counts.alone.items()):
            alone[reason] = alone.get(reason, 0) + count
    errors += [one.counts.error for one in opened if one.counts.error]
    return {
        "open": bool(opened),
        "helpers": list(helpers.values()),
        "shared": sum(one.counts.shared for one in opened),
        "alone": alone,
        "error": errors[-1] if errors else "",
    }


def close_helpers() -> None:
    """Closes everything. The next node opens it again."""
    with _lock:
        opened = list(_opened.values())
        _opened.clear()
    for one in opened:
        one.helpers.close()


def _kyklos() -> Any:
    try:
        import kyklos
    except ImportError as error:
        raise RuntimeError("Kyklos is not installed in ComfyUI's Python: see the README of this pack") from error
    if not hasattr(kyklos, "helpers"):
        raise RuntimeError(f"the installed Kyklos {getattr(kyklos, '__version__', '')} has no helpers: install a newer one")
    return kyklos
