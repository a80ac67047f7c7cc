"""Messages between devices by a process group of ``torch.distributed``."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from ._device import Device

#: Backends that move tensors of no device but the CPU by themselves.
OF_HOSTS = ("gloo", "mpi")
#: The peer, the number of the message, the tensor, its first byte and the end.
Transfer: TypeAlias = "tuple[int, int, torch.Tensor, int, int]"
#: Takes why something has failed, or ``None``.
Done: TypeAlias = "Callable[[str | None], None]"
#: Longest pause between two looks at a device, in seconds.
PAUSE = 1e-3
#: Longest time for leaving a process group, in seconds.
LEAVE_S = 10.0
LEFT = "the process group has been left"
#: The number of a message that is never sent.
NEVER = (1 << 31) - 1


class Messages:
    """A process group of the same ranks and the same backend as ``process_group``, so that its messages meet no others. A thread waits
    for messages, because some backends have done nothing before they are waited for."""

    def __init__(self, process_group: Any, device: Device) -> None:
        self._like = process_group
        self._stream = device._stream
        self._of_cpu = device.is_cpu
        self.device = device.device
        config = dist.get_backend_config(process_group)
        backends = dict(pair.split(":", 1) for pair in config.split(","))
        backend = backends.get(self.device.type)
        if backend is None:
            raise ValueError(f"its process group has no backend for {self.device.type}, only {config}")
        if backend in OF_HOSTS and not self._of_cpu:
            raise ValueError(f"its process group has {backend} for {self.device.type}, which does not move memory of the device")
        #: The kind of the device and its backend, equal on all ranks.
        self.way = f"{self.device.type} {backend}"
        self._ranks = dist.get_process_group_ranks(process_group)
        if self._of_some() and getattr(dist.group.WORLD, "bound_device_id", None) is not None:
            # PyTorch then splits the communicator of all ranks, which waits for all of them.
            raise ValueError("its process group has only some processes of the job, whose ranks are bound to devices (device_id=)")
        self._group: Any = None
        self._abandoned = False
        self._lock = threading.Lock()
        self._serving = threading.Thread(target=self._serve, name="kyklos-torch", daemon=True)
        self._leaving = threading.Thread(target=self._leave, name="kyklos-torch-end", daemon=True)
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], Done] | None] = queue.SimpleQueue()

    def _of_some(self) -> bool:
        return len(self._ranks) != dist.get_world_size()

    def open(self, form_s: float, message_s: float, done: Done) -> None:
        """Makes the process group and tries it, meanwhile. That and a message may take so many seconds."""
        # Its thread waits by itself, and an NCCL of PyTorch ends the process of a message that is late.
        self._seconds = message_s
        timeout = form_s if self._of_cpu else message_s
        self._jobs.put((lambda: self._open(timedelta(seconds=timeout)), done))
        self._serving.start()

    def post(self, sends: Sequence[Transfer], recvs: Sequence[Transfer], done: Done) -> Exchange:
        """Starts the messages of an exchange. They take the contents that the device's stream gives to the tensors before."""
        exchange = Exchange(self, sends, recvs)
        self._jobs.put((exchange.wait, done))
        return exchange

    def abandon(self) -> None:
        """Leaves the process group while messages may be under way, without waiting."""
        with self._lock:
            before, self._abandoned = self._abandoned, True
        if not before:
            with suppress(RuntimeError):  # The interpreter ends.
                self._leaving.start()

    def close(self) -> None:
        """Leaves the process group in order, if it has not been left. Its threads have then ended: at the end of the interpreter
        they would end the process."""
        opened = self._group is not None or self._leaving.is_alive()
        self._jobs.put(None)
        if not self._abandoned:
            self._leave()
        for thread in (self._leaving, self._serving):
            if opened and thread.is_alive():
                thread.join(LEAVE_S)

    def _open(self, timeout: timedelta) -> None:
        # Older versions sort the ranks always.
        order = {} if self._ranks == sorted(self._ranks) else {"sort_ranks": False}
        group: Any = dist.new_group(
            self._ranks,
            timeout,
            backend=self.way.replace(" ", ":"),
            # Only the ranks of the group are here.
            use_local_synchronization=self._of_some(),
            **order,  # type: ignore[arg-type]
        )
        with self._lock:
            self._group = group
        if self._abandoned:
            return self._leave()
        rank, size = dist.get_rank(self._like), len(self._ranks)
        if dist.get_rank(group) != rank:
            raise ValueError(f"it has the number {dist.get_rank(group)} in the process group that it made")
        if size == 1:
            # Not every backend has messages from a rank to itself.
            return
        sent, wanted = (torch.arange(16, dtype=torch.uint8, device=self.device) + 7 * of for of in (rank, (rank - 1) % size))
        received = torch.zeros_like(sent)
        trial = Exchange(self, [((rank + 1) % size, 0, sent, 0, 16)], [((rank - 1) % size, 0, received, 0, 16)])
        trial.wait()
        trial.order()
        if not torch.equal(received, wanted):
            raise ValueError("a trial message had arrived with other bytes than were sent")

    def _leave(self) -> None:
        with self._lock:
            group, self._group = self._group, None
        if group is None:
            return
        # The caller may have destroyed it with all others, and not every backend can end messages.
        with suppress(Exception):
            if self._abandoned and not self._of_cpu:
                group.abort()
            elif self._abandoned:
                # With gloo a wait that is over closes all connections, and that ends all others.
                peer = self._ranks[dist.get_rank(self._like) - 1]
                never: Any = dist.irecv(torch.empty(1, dtype=torch.uint8), peer, group, NEVER)
                never.wait(timedelta(milliseconds=1))
        with suppress(Exception):
            dist.destroy_process_group(group)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            wait, done = job
            why = None
            try:
                wait()
            except Exception as error:
                why = str(error).strip().split("\n")[0] or type(error).__name__
            done(why)
            del job, wait, done

    def _check(self) -> None:
        """An exchange that failed may look like one that is done."""
        if self._abandoned:
            raise RuntimeError(LEFT)
        error = getattr(self._group._get_backend(self.device), "get_error", None)
        with suppress(RuntimeError):  # Not every backend tells.
            found = None if error is None else error().name
            if found not in (None, "SUCCESS"):
                raise ValueError(f"the backend has an error: {found}")


class Exchange:
    """Messages under way, whose tensors it keeps."""

    def __init__(self, messages: Messages, sends: Sequence[Transfer], recvs: Sequence[Transfer]) -> None:
        self._messages = messages
        group, ranks = messages._group, messages._ranks
        if group is None:
            # To PyTorch it would be the default one.
            raise RuntimeError(LEFT)
        of = [(dist.irecv, recvs), (dist.isend, sends)]
        self._parts = [
            dist.P2POp(how, tensor[first:end], ranks[peer], group, number)
            for how, all_ in of
            for peer, number, tensor, first, end in all_
        ]
        if group not in dist.distributed_c10d._world.pg_map:
            raise RuntimeError("its process group was destroyed: close the group before dist.destroy_process_group()")
        with messages._stream or nullcontext():
            self._works = dist.batch_isend_irecv(self._parts)

    def wait(self) -> None:
        """Until all messages have moved."""
        if self._messages._of_cpu:
            for work in self._works:
                work.wait(timedelta(seconds=self._messages._seconds))
            return
        pause = 1e-5
        while not all(work.is_completed() for work in self._works):
            if self._messages._abandoned:
                raise RuntimeError(LEFT)
            time.sleep(pause)
            pause = min(2 * pause, PAUSE)
        self._messages._check()

    def order(self) -> None:
        """What the device's stream gets from now on comes after the messages. They have moved."""
        if not self._messages._of_cpu:
            with self._messages._stream or nullcontext():
                for work in self._works:
                    work.wait()
