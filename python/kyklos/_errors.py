"""The exceptions of the package."""

from __future__ import annotations


class _Facts(Exception):
    """What an exception knows besides its text."""

    rank: int | None
    peer: int | None
    peers: tuple[int, ...]
    operation: int | None
    step: int | None
    #: Whether the other ranks know of the error. Those of the engine, which gives all facts, come from a vote.
    told: bool

    def __init__(
        self,
        text: str,
        *,
        rank: int | None = None,
        peer: int | None = None,
        peers: tuple[int, ...] | None = None,
        operation: int | None = None,
        step: int | None = None,
    ) -> None:
        super().__init__(text)
        self.rank, self.peer, self.peers, self.operation, self.step = rank, peer, peers or (), operation, step
        self.told = peers is not None


class RequestError(_Facts, ValueError):
    """The call is wrong, on this rank or on another one. No rank has a result, and the group stays usable.

    ``rank`` is the rank whose part is wrong, or ``None`` if it is this one or all of them.
    """


class GroupError(_Facts, RuntimeError):
    """The group has ended: a rank died, failed, was interrupted or made no progress. Form a new group to go on.

    ``peer`` is the rank at fault; ``operation`` and ``step`` say how far it was, as it last reported; ``rank`` is the rank
    that reports the error. Each is ``None`` if it is not known. ``peers`` are the ranks that messages by NCCL were with, where it is
    not known which of them is late, and empty otherwise.
    """


class DeviceError(_Facts, RuntimeError):
    """The device of this rank failed, or has too little memory. The call has ended on all ranks."""
