"""How groups form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from . import _kyklos

G = TypeVar("G", bound="Forming")


class Forming:
    """What a group has for it."""

    if TYPE_CHECKING:

        def __init__(self, core: _kyklos.Group, deadline_s: float = 60.0) -> None: ...

    @classmethod
    def from_env(
        cls: type[G],
        *,
        device: str = "auto",
        rank: int | None = None,
        size: int | None = None,
        coordinator: str | None = None,
        cluster_file: str | None = None,
        identity: str | None = None,
        invitation: str | None = None,
        token: str | None = None,
        job: str | None = None,
        bind: str | None = None,
        port: int | None = None,
        advertise: str | Sequence[str] | None = None,
        network: str = "udp",
        link: str = "lan",
        join_deadline_s: float = 60.0,
        deadline_s: float = 60.0,
        leave_s: float = 10.0,
        collective: str = "host",
        nccl_cluster: int | None = None,
    ) -> G:
        """Joins the group of the launcher that started this process: torchrun, ``mpirun``, ``srun``, Kubernetes or
        ``kyklos launch``. Without a launcher and without options it is a group of one. Blocks until all ranks are there.

        :param device: ``"auto"``, ``"cpu"``, ``"wgpu"``, ``"wgpu:N"``, ``"cuda"``, ``"cuda:N"``, ``"torch"`` or ``"torch:NAME"``.
            ``"torch"`` is PyTorch's accelerator, else its CPU, with PyTorch's kernels; a name is one of ``torch.device``. ``"auto"`` is
            ``"torch"`` where PyTorch is loaded and has an accelerator of NVIDIA, AMD or Intel, else a GPU by wgpu if there is one, else
            the cores. Where there are several GPUs of a kind, the ranks of a machine take them in turn; a warning says if some share one.
        :param rank: this rank, if no launcher says it; likewise ``size`` and ``coordinator`` (``"HOST:PORT"`` of rank 0, UDP).
        :param cluster_file: TOML file that lists the hosts of the ranks.
        :param identity: PEM file that proves this rank to the others; ``{rank}`` in it stands for the rank. A group over a
            network needs identities (``kyklos certs``), or ``invitation`` on rank 0 and ``token`` on the others.
        :param job: name of the job that the identities must be of.
        :param bind: local IP address.
        :param port: first local port of ranks other than 0.
        :param advertise: IP addresses at which the others reach this rank, each with or without a port, in the order in which
            to try them: for hosts with several addresses, and behind address translation. By default the address at which
            rank 0 sees it.
        :param network: ``"udp"``, or ``"tcp"`` where UDP is dropped; the same on all ranks.
        :param link: ``"lan"``, or ``"wan"`` between data centres: outages of up to 10 s end nothing, and a dead rank is found
            after 15 s; the same on all ranks.
        :param join_deadline_s: longest time until all ranks are there, in seconds.
        :param deadline_s: longest time of a message or a vote, in seconds. Let it cover the first compilation of a model.
        :param leave_s: longest wait in :meth:`close` for ranks that have not taken all messages, in seconds.
        :param collective: how keys, values and states go between devices: ``"host"``, through host memory and the network;
            ``"nccl"``, by NCCL, where every rank needs an NVIDIA GPU of its own; ``"auto"``, by NCCL between the ranks that can,
            otherwise as ``"host"``; where no rank uses NCCL, by copies between the NVIDIA GPUs of one process. See
            :attr:`collective`. The same on all ranks.
        :param nccl_cluster: with NCCL, a number of this rank's cluster: NCCL is used between ranks with one number only.
        :raises RequestError: settings that do not fit each other.
        :raises GroupError: a group that does not form in time.
        """
        launch = {
            "rank": rank,
            "size": size,
            "coordinator": coordinator,
            "cluster_file": cluster_file,
            "identity": identity,
            "invitation": invitation,
            "token": token,
            "job": job,
            "bind": bind,
            "port": port,
            "advertise": _joined(advertise),
            "network": network,
            "link": link,
            "join_deadline_s": join_deadline_s,
        }
        return cls(_kyklos.of_launcher(device, launch, _session(deadline_s, leave_s, collective, nccl_cluster)), deadline_s)

    @classmethod
    def local(
        cls: type[G],
        size: int,
        *,
        device: str | Sequence[str] = "auto",
        deadline_s: float = 60.0,
        leave_s: float = 10.0,
        collective: str = "host",
        nccl_cluster: int | None = None,
    ) -> list[G]:
        """All ranks of a group in this process, by rank. Each is used by a thread of its own: see :func:`kyklos.run_local`.

        :param size: number of ranks.
        :param device: one name for all ranks, or a list with one for each. Ranks with the same device share it.
        """
        return cls._of_process(size, 0, device, _session(deadline_s, leave_s, collective, nccl_cluster))

    @classmethod
    def _of_process(cls: type[G], size: int, local_rank: int, device: str | Sequence[str], session: dict[str, Any]) -> list[G]:
        names = [device] if isinstance(device, str) else list(device)
        return [cls(core, session["deadline_s"]) for core in _kyklos.local(names, size, local_rank, session)]

    @classmethod
    def from_torch(
        cls: type[G],
        process_group: Any = None,
        *,
        device: str = "auto",
        host: str | None = None,
        port: int = 0,
        network: str = "udp",
        link: str = "lan",
        join_deadline_s: float = 60.0,
        deadline_s: float = 60.0,
        leave_s: float = 10.0,
        collective: str = "host",
        nccl_cluster: int | None = None,
    ) -> G:
        """A group of the ranks of a ``torch.distributed`` process group, which carries new identities from rank 0 to the
        others: whoever reads its traffic could join. All ranks call it together.

        :param process_group: the process group; by default the default one.
        :param host: name or address of rank 0 for the other ranks. By default ``MASTER_ADDR``, else the loopback address.
            Only rank 0's value counts.
        :param port: UDP port of rank 0; 0 for one that is free. Only rank 0's value counts.
        :param collective: also ``"torch"``: keys, values and states go by a process group of the group's own, with the ranks and the
            backends of the given one, where every rank has a device of PyTorch of one type. Kyklos' own NCCL is not used.
        """
        from ._torch_group import own_identity, whole

        own = own_identity(process_group, host, port)
        session = _session(deadline_s, leave_s, collective, nccl_cluster, whole(process_group))
        if own["size"] == 1:
            return cls._of_process(1, own["local_rank"], device, session)[0]
        return cls._connect(own, device, None, network, link, join_deadline_s, session)

    @classmethod
    def connect(
        cls: type[G],
        identity: str,
        *,
        rank: int,
        size: int,
        host: str,
        port: int,
        local_rank: int = 0,
        local_size: int = 1,
        device: str = "auto",
        advertise: str | Sequence[str] | None = None,
        network: str = "udp",
        link: str = "lan",
        join_deadline_s: float = 60.0,
        deadline_s: float = 60.0,
        leave_s: float = 10.0,
        collective: str = "host",
        nccl_cluster: int | None = None,
    ) -> G:
        """A group of processes that a launcher of your own started, and that carried the identities to them.

        :param identity: this rank's one of :func:`kyklos.identities`. It is a secret.
        :param rank: this rank; ``size`` is the number of ranks.
        :param host: name or address of rank 0; rank 0 itself listens there.
        :param port: port of rank 0 (UDP, or TCP with ``network="tcp"``).
        :param local_rank: number of this rank among the ``local_size`` ranks of its machine, which take its GPUs in turn.
        :param advertise: as for :meth:`from_env`.
        """
        own = {"identity": identity, "rank": rank, "size": size, "host": host, "port": port}
        place = {"local_rank": local_rank, "local_size": local_size}
        session = _session(deadline_s, leave_s, collective, nccl_cluster)
        return cls._connect({**own, **place}, device, _joined(advertise), network, link, join_deadline_s, session)

    @classmethod
    def _connect(
        cls: type[G],
        own: dict[str, Any],
        device: str,
        advertise: str | None,
        network: str,
        link: str,
        join_deadline_s: float,
        session: dict[str, Any],
    ) -> G:
        member = {
            "pem": own["identity"],
            **{name: own[name] for name in ("rank", "size", "host", "port")},
            "advertise": advertise,
            "network": network,
            "link": link,
            "join_deadline_s": join_deadline_s,
            "local": (own["local_rank"], own["local_size"]),
        }
        return cls(_kyklos.with_identity(device, member, session), session["deadline_s"])


def _joined(advertise: str | Sequence[str] | None) -> str | None:
    return advertise if advertise is None or isinstance(advertise, str) else ",".join(advertise)


def _session(
    deadline_s: float, leave_s: float, collective: str, nccl_cluster: int | None, process_group: Any = None
) -> dict[str, Any]:
    return {
        "deadline_s": float(deadline_s),
        "leave_s": float(leave_s),
        "collective": collective,
        "nccl_cluster": nccl_cluster,
        "process_group": process_group,
    }
