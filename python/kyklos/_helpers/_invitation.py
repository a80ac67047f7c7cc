"""Invitations: what lets one helper in."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from .._kyklos import Owner

#: The port of the first invitation; each has one of its own.
FIRST_PORT = 29700


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
    """Makes an invitation, or returns the one of this name."""
    if name in Owner.invited():
        return Invitation(name, Owner.token(name))
    host = address or own_address()
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return Invitation(name, Owner.invite(name, f"{host}:{port or free_port()}"))


def free_port() -> int:
    """The first port from :data:`FIRST_PORT` on that no invitation has."""
    taken = {int(Owner.token(name).rsplit(":", 1)[1]) for name in Owner.invited()}
    return next(port for port in range(FIRST_PORT, 65536) if port not in taken)


def own_address() -> str:
    """The address of this machine on the network through which it reaches others; loopback if it has none."""
    for family, beyond in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                # Nothing is sent: the system only looks which address it would use.
                probe.connect((beyond, 9))
                return str(probe.getsockname()[0])
            except OSError:
                continue
    return "127.0.0.1"
