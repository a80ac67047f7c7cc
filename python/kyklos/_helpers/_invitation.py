"""Invitations: what lets one helper in."""

from __future__ import annotations

from dataclasses import dataclass

from .._kyklos import Owner


@dataclass(frozen=True)
class Invitation:
    """An invitation for one helper, which holds for a year. It is in a file that only this user can read."""

    #: The name of the helper.
    name: str
    #: What the other machine needs, in one line. Whoever has it can become this helper.
    token: str

    @property
    def command(self) -> str:
        """What to run on the other machine."""
        return f"kyklos help-out {self.token}"


def invite(name: str, address: str | None = None, port: int | None = None) -> Invitation:
    """Makes an invitation, or returns the one of this name, at another place if one is given."""
    return Invitation(name, Owner.invite(name, address, port))
