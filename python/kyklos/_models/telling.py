"""Errors of one rank, told to the others.

A rank that raises before it has made a call which the others make would leave them with its next one. So the doors of split models
turn an error of their own into a vote against the next call, and all ranks get an error there. Errors that came from a vote, or that all
ranks have found in what they exchanged, are known to all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from .._errors import RequestError
from .._group import Group

_Error = TypeVar("_Error", bound=Exception)


@contextmanager
def told(group: Group) -> Iterator[None]:
    """A block whose errors all ranks get."""
    try:
        yield
    except Exception as error:
        tell(group, error)
        raise


def tell(group: Group, error: _Error) -> _Error:
    """Votes against the next call of ``group``, unless the other ranks know of ``error``, which is returned."""
    if not getattr(error, "told", False):
        error.told = True  # type: ignore[attr-defined]
        name = "" if isinstance(error, RequestError) else f"{type(error).__name__}: "
        reason, colon, remedy = f"{name}{error}".rpartition(": ")
        if getattr(error, "left_out", False):
            group._core.take_back_call()
        voted = group.refuse(reason if colon else remedy, remedy if colon else "see the error of that rank")
        if not isinstance(voted, Exception):  # Ctrl-C.
            raise voted from error
    return error


def agreed(rank: int, text: str) -> RequestError:
    """The error of all ranks, which each of them has found in what they exchanged. ``rank`` is the one at fault."""
    return RequestError(text, rank=rank, peers=())
