"""Groups of the ranks of a ``torch.distributed`` process group."""

from __future__ import annotations

import os
import random
import socket
from typing import Any

import torch.distributed as dist

from ._kyklos import identities


def own_identity(process_group: Any, host: str | None, port: int) -> dict[str, Any]:
    """This rank's arguments of ``Group.connect``. Rank 0 makes an identity for each rank, and each rank receives its own."""
    rank, world = dist.get_rank(process_group), dist.get_world_size(process_group)
    if rank < 0:
        raise ValueError("this process is not in the process group")
    members: list[Any] | None = None
    if rank == 0:
        host = host or os.environ.get("MASTER_ADDR") or "127.0.0.1"
        port = port or _free_port(host)
        members = [(pem, host, port) for pem in identities(world)]
    received: list[Any] = [None]
    source = dist.get_global_rank(process_group, 0) if process_group is not None else 0
    dist.scatter_object_list(received, members, src=source, group=process_group)
    pem, host, port = received[0]
    return {"identity": pem, "rank": rank, "world": world, "host": host, "port": port}


def _free_port(host: str) -> int:
    """A port that is free on this host for UDP and TCP, on which rank 0 will listen.

    It lies below the ports that systems usually give to sockets without one: such a port could go to any other socket before rank 0 listens.
    If many of these are in use, it is one of those. Not of the program's random numbers, which may be the same in every job.
    """
    family = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)[0][0]
    for port in [*random.SystemRandom().sample(range(20_000, 29_000), 100), *[0] * 10]:
        try:
            return _bound(family, port)
        except OSError:
            continue
    return _bound(family, 0)


def _bound(family: int, port: int) -> int:
    """The port, or with 0 any port, after it was bound for a moment."""
    with socket.socket(family, socket.SOCK_DGRAM) as udp, socket.socket(family, socket.SOCK_STREAM) as tcp:
        udp.bind(("", port))
        port = udp.getsockname()[1]
        tcp.bind(("", port))
        return port
