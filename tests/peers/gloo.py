#!/usr/bin/env python3
"""PyTorch's gloo between two processes on loopback, for `links --peer`: gloo.py MIB.

Prints mode,seconds,CPU seconds of rank 1,CPU seconds of rank 0,MiB that crossed, for send/recv of 16 MiB messages one way
and for all_to_all_single, in which 16 MiB cross each way at a time."""
import os
import resource
import sys
import time

MESSAGE = 16 << 20


def cpu_s():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def rank(me, mib, path, out):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=me, world_size=2)
    messages = (mib << 20) // MESSAGE

    def send_recv():
        payload = torch.ones(MESSAGE, dtype=torch.uint8)
        under_way = []
        for tag in range(messages):
            if me == 1:
                under_way.append(dist.isend(payload, 0, tag=tag))
            else:
                under_way.append(dist.irecv(torch.empty(MESSAGE, dtype=torch.uint8), 1, tag=tag))
            if len(under_way) == 2:
                under_way.pop(0).wait()
        for work in under_way:
            work.wait()

    def all_to_all():
        given, taken = (torch.ones(2 * MESSAGE, dtype=torch.uint8) for _ in range(2))
        for _ in range(messages):
            dist.all_to_all_single(taken, given)

    for name, run, ways in [("gloo", send_recv, 1), ("gloo-a2a", all_to_all, 2)]:
        dist.barrier()
        before, started = cpu_s(), time.monotonic()
        run()
        dist.barrier()
        spent = torch.tensor([cpu_s() - before], dtype=torch.float64)
        seconds = time.monotonic() - started
        both = [torch.zeros(1, dtype=torch.float64) for _ in range(2)]
        dist.all_gather(both, spent)
        if me == 0:
            out.write(f"{name},{seconds:.4f},{both[1].item():.4f},{both[0].item():.4f},{mib * ways}\n")
    out.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path, mib = os.path.join(folder, "store"), int(sys.argv[-1])
        child = os.fork()
        rank(0 if child else 1, mib, path, sys.stdout)
        if not child:
            os._exit(0)
        sys.exit(os.waitpid(child, 0)[1] >> 8)
