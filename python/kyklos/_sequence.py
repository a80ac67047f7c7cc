"""The place of a call in the sequence of a group's calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from . import _kyklos
from ._errors import DeviceError, RequestError

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def in_sequence(method: Callable[Concatenate[Any, _Given], _Result]) -> Callable[Concatenate[Any, _Given], _Result]:
    """A method of a group that is a call of all ranks. The group counts those that a vote refuses: all ranks see the same ones."""

    @functools.wraps(method)
    def call(group: Any, *args: _Given.args, **options: _Given.kwargs) -> _Result:
        try:
            return keeping_place(group._core, lambda: method(group, *args, **options))
        except (RequestError, DeviceError):
            group._refused += 1
            raise

    return call


def keeping_place(core: _kyklos.Group, call: Callable[[], _Result]) -> _Result:
    """The value of ``call``, which makes one call of the group. One that fails on this rank before the others know of it keeps its
    place: the next call of this rank fails on all ranks, instead of meeting the call that was left out here."""
    before = core.calls()
    try:
        return call()
    except BaseException as error:
        if core.calls() == before:
            core.leave_out_call()
            error.left_out = True  # type: ignore[attr-defined]
        raise
