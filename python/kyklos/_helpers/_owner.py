"""The helpers of this process, and the block in which they help."""

from __future__ import annotations

import functools
import json
import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .._errors import RequestError
from .._kyklos import Owner
from ._invitation import Invitation, invite

if TYPE_CHECKING:
    import torch

# The collector of garbage may close helpers while others are being opened, on the same thread.
_lock = threading.RLock()
#: The owner of this process: each invitation has one port, which one owner listens on. It stays until the process ends, or until
#: helpers with other settings are asked for.
_core: Owner | None = None
_users = 0
_local: set[str] = set()
_settings: tuple[bool, bool] = (True, False)


def helpers(
    names: Sequence[str] | None = None,
    *,
    devices: Sequence[str] = (),
    wire: str = "same",
    check: bool = True,
    _always: bool = False,
) -> Helpers:
    """The helpers of this process. They compute a share of its attention where that makes a call faster.

    ::

        print(kyklos.helpers().invite("kitchen").command)   # run this on the other machine, once

        with kyklos.helpers():
            image = pipeline(prompt).images[0]               # any model, as it is

    In the block, ``F.scaled_dot_product_attention`` shares its heads with helpers, also in other threads and where libraries call it:
    transformers with ``attn_implementation="sdpa"``, diffusers with any backend, modules of PyTorch. Results are exact, to
    rounding. A helper gets q, k and v of its heads and nothing else. One that is gone or late costs its share of one call, which this process
    computes. The first calls of a kind stay local, while their time and the helpers' is measured.

    :param names: of invitations whose helpers may join; all of this user by default. Those without a helper wait in the background.
    :param devices: other devices of this machine that help: ``"wgpu:1"``, ``"cuda:1"``, ``"cpu"``.
    :param wire: ``"same"``; or ``"f16"`` or ``"int8"``, which send rounded q, k, v and results over slow links.
    :param check: compute a row of a helper's results again, and let one go whose row is wrong.
    :raises RequestError: for a name without an invitation, and other settings than those of helpers that are in use.
    """
    return Helpers(names, devices, wire, check, _always)


class Helpers:
    """What :func:`helpers` returns."""

    def __init__(
        self, names: Sequence[str] | None, devices: Sequence[str], wire: str, check: bool, always: bool
    ) -> None:
        if wire not in ("same", "f16", "int8"):
            raise RequestError(f"{wire!r} on the wire is not known: use \"same\", \"f16\" or \"int8\"")
        self._wire = wire
        self._captures: list[Any] = []
        self._core = _opened_core(names, devices, check, always)
        self._closed, self._process = False, os.getpid()
        # Without names: all that have an invitation, also those of later.
        self._names = None if names is None else [*names, *map(_of_this_machine, devices)]

    def invite(self, name: str, address: str | None = None, port: int | None = None) -> Invitation:
        """An invitation for one helper, whose door is open from now on.

        :param name: letters, digits, ``-`` and ``_``. If there is an invitation of this name, it is returned, at the other place if one is given: its token
            is the same but for that.
        :param address: at which the helper reaches this machine; found out by default.
        :param port: UDP, which a firewall must let in; the first from 29700 on that no invitation has.
        """
        invitation = invite(name, address, port)
        with _lock:
            self._core.open(name)
        if self._names is not None and name not in self._names:
            self._names.append(name)
        return invitation

    def status(self) -> list[dict[str, Any]]:
        """The helpers by name: ``name``, ``state`` (``waiting``, ``measuring``, ``ready``, ``working``, ``lost`` or ``lied``), ``device``, ``share``
        (of the last call, 0 to 1), ``calls``, ``bytes_sent``, ``bytes_received`` and ``why`` (it is not used)."""
        status: list[dict[str, Any]] = json.loads(self._core.status())
        return [helper for helper in status if self._names is None or helper["name"] in self._names]

    def attention(
        self,
        original: Callable[..., torch.Tensor],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        scale: float | None = None,
        causal: bool = False,
        gqa: bool = False,
    ) -> torch.Tensor:
        """Attention with helpers, for code that calls another function than PyTorch's.

        :param original: ``original(q, k, v, mask)`` computes the same attention here: with some of the heads, and of the first rows, which
            are causal as those of the whole.
        :param q: ``[batch, heads, tokens, dim]``; k and v likewise, with fewer heads if ``gqa``.
        :param mask: bool, in which false hides a key, or added to logits; broadcasts to ``[batch, heads, tokens, keys]``.
        :param causal: query i sees keys up to i.
        :returns: ``[batch, heads, tokens, dim of v]``.
        """
        # A child after fork() has none of the threads.
        if self._closed or self._process != os.getpid():
            return original(q, k, v, mask)
        attend = _imported()
        return attend(self._core, self._wire, self._names, original, q, k, v, mask, scale, causal, gqa)

    def settle(self, patience_s: float = 60.0) -> None:
        """Waits until no helper is being measured: then the next call of a known kind is shared, if that pays."""
        self._core.settle(patience_s)

    def close(self) -> None:
        """Ends the use of helpers. They stay connected to this process, for helpers of the same settings, until it ends."""
        global _users
        if self._closed:
            return
        self._closed = True
        with _lock:
            _users -= 1

    def __enter__(self) -> Helpers:
        from ._capture import Capture

        capture = Capture(self)
        capture.start()
        self._captures.append(capture)
        return self

    def __exit__(self, *_: object) -> None:
        self._captures.pop().stop()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()


@functools.cache
def _imported() -> Callable[..., torch.Tensor]:
    """PyTorch is imported where it is used: this module is part of the package."""
    from ._shared import attention

    return attention


def _of_this_machine(device: str) -> str:
    """The name of a helper that is a device of this machine."""
    return f"this machine, {device}"


def _opened_core(names: Sequence[str] | None, devices: Sequence[str], check: bool, always: bool) -> Owner:
    global _core, _users, _settings
    with _lock:
        if _core is not None and _settings != (check, always):
            if _users:
                raise RequestError(f"helpers with check={check}, beside open ones with other settings: close those first")
            _core = None
            _local.clear()
        if _core is None:
            _core, _settings = Owner(check, always), (check, always)
        core = _core
        known = Owner.invited()
        for name in names if names is not None else known:
            if name not in known:
                raise RequestError(f"no invitation for {name!r}: make one with kyklos.helpers().invite({name!r})")
        for name in names if names is not None else known:
            core.open(name)
        for device in devices:
            name = _of_this_machine(device)
            if name not in _local:
                core.add_local(name, device, None)
                _local.add(name)
        _users += 1
        return core


def _forget() -> None:
    """In a child process after ``fork``: the threads and sockets of helpers have stayed with its parent."""
    global _core, _users, _lock
    _lock = threading.RLock()
    _core, _users = None, 0
    _local.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
