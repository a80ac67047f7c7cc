"""Ranks as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ._errors import GroupError, RequestError
from ._group import Group

T = TypeVar("T")


def run_local(
    size: int,
    function: Callable[[Group], T],
    *,
    device: str | Sequence[str] = "auto",
    deadline_s: float = 60.0,
    collective: str = "host",
) -> list[T]:
    """Runs ``function(group)`` for each rank of a new group in this process, each on a thread, and returns their values by rank.

    If one of them raises, the others end with a :class:`GroupError`, and its exception is raised here.
    """
    groups = Group.local(size, device=device, deadline_s=deadline_s, collective=collective)
    values: list[Any] = [None] * size
    errors: list[BaseException | None] = [None] * size

    def run(rank: int, group: Group) -> None:
        try:
            with group:
                values[rank] = function(group)
        except BaseException as error:  # Raised again below.
            errors[rank] = error

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in enumerate(groups)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            # With a timeout, so that this thread sees Ctrl-C.
            while thread.is_alive():
                thread.join(0.1)
    except BaseException as error:
        groups[0].abort(f"{type(error).__name__}: {error}")
        raise
    raised = [error for error in errors if error is not None]
    if raised:
        # The exception of the rank at fault, not of those which it took along.
        raise next((error for error in raised if not _of_another_rank(error)), raised[0])
    return values


def _of_another_rank(error: BaseException) -> bool:
    return isinstance(error, GroupError) or (isinstance(error, RequestError) and error.rank is not None)
