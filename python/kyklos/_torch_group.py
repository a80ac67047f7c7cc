"""Groups of the ranks of a ``torch.distributed`` process group."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch.distributed as dist

from ._kyklos import free_port, identities


def own_identity(process_group: Any, host: str | None, port: int) -> dict[str, Any]:
    """This rank's arguments of ``Group.connect``. Rank 0 makes an identity for each rank, and each rank receives its own."""
    rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
    if rank < 0:
        raise ValueError("this process is not in the process group")
    members: list[Any] | None = None
    if rank == 0:
        host = host or os.environ.get("MASTER_ADDR") or "127.0.0.1"
        port = port or free_port(host)
        members = [(pem, host, port) for pem in identities(size)]
    local_rank, local_size = _on_this_machine(process_group, rank)
    received: list[Any] = [None]
    source = dist.get_global_rank(process_group, 0) if process_group is not None else 0
    dist.scatter_object_list(received, members, src=source, group=process_group)
    pem, host, port = received[0]
    place = {"local_rank": local_rank, "local_size": local_size}
    return {"identity": pem, "rank": rank, "size": size, "host": host, "port": port, **place}


def whole(process_group: Any) -> Any:
    """The process group itself: the default one by default."""
    return dist.group.WORLD if process_group is None else process_group


def _on_this_machine(process_group: Any, rank: int) -> tuple[int, int]:
    """The number of this rank among the ranks of its machine, and how many they are: by the launcher, else by the names of the hosts."""
    given = os.environ.get("LOCAL_RANK"), os.environ.get("LOCAL_WORLD_SIZE")
    names: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(names, (socket.gethostname(), given), group=process_group)
    if all(local is not None and size is not None for _, (local, size) in names):
        return int(given[0] or 0), int(given[1] or 1)
    hosts = [host for host, _ in names]
    return hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])
