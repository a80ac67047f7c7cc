"""The device `torch` on the CPU beside PyTorch itself and beside Kyklos' own CPU kernels, in one sitting.

    python tests/peers/torch_device.py [ROUNDS]            needs kyklos and torch (tests/peers/setup.sh)

One rank, beside F.scaled_dot_product_attention: the forward pass, and forward and backward through kyklos.torch.attention. Two ranks,
which are processes of this host with one thread each, beside PyTorch's ring attention over gloo, whose private template is called
directly. Medians of rounds in which all take turns, and ratios to PyTorch of the same round: median, least and most.
"""

import json
import logging
import os
import socket
import statistics
import subprocess
import sys
import time
import warnings

import torch
import torch.nn.functional as F

import kyklos
from kyklos.torch import attention

DEVICES = ("torch:cpu", "cpu")
CASES = [(dtype, *extents, mask) for dtype in ("float32", "bfloat16", "float16")
         for extents in ((1024, 8, 64), (4096, 8, 64), (4096, 4, 128)) for mask in ("full", "causal")]
RING_CASES = [(tokens, mask) for tokens in (4096, 8192) for mask in ("full", "causal")]


def milliseconds(call):
    began = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - began)


def turns(calls, rounds):
    """The times of each call in each round, after one that does not count."""
    times = {name: [] for name in calls}
    for round_ in range(rounds + 1):
        for name, call in calls.items():
            taken = milliseconds(call)
            if round_:
                times[name].append(taken)
    return times


def line(case, times):
    """Medians, and the ratios to the first of them."""
    peer, *others = times
    parts = [f"{case:38} {peer} {statistics.median(times[peer]):8.1f} ms"]
    for name in others:
        ratios = [own / theirs for own, theirs in zip(times[name], times[peer], strict=True)]
        parts.append(f"{name} {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    return "  ".join(parts)


def one_rank(rounds):
    torch.set_num_threads(2)
    groups = {device: kyklos.Group.local(1, device=device)[0] for device in DEVICES}
    for name, tokens, heads, dim, mask in CASES:
        q, k, v = (torch.randn(1, tokens, heads, dim).to(getattr(torch, name)) for _ in range(3))
        turned = [x.transpose(1, 2) for x in (q, k, v)]
        calls = {"PyTorch": lambda: F.scaled_dot_product_attention(*turned, is_causal=mask == "causal")}
        for device, group in groups.items():
            calls[device] = lambda group=group: group.attend(q, k, v, mask=mask, layout="bshd", inference=True)
        print(line(f"forward {name} {tokens} x {heads} x {dim} {mask}", turns(calls, rounds)), flush=True)
    for name, tokens, heads, dim, mask in CASES:
        if tokens != 4096 or name == "float16":
            continue
        leaves = [torch.randn(1, heads, tokens, dim).to(getattr(torch, name)).requires_grad_() for _ in range(3)]
        d_o = torch.randn(1, heads, tokens, dim).to(leaves[0].dtype)

        def both(forward):
            torch.autograd.grad(forward(), leaves, d_o)

        calls = {"PyTorch": lambda: both(lambda: F.scaled_dot_product_attention(*leaves, is_causal=mask == "causal"))}
        for device, group in groups.items():
            calls[device] = lambda group=group: both(lambda: attention(*leaves, group=group, mask=mask)[0])
        print(line(f"forward and backward {name} {tokens} x {heads} x {dim} {mask}", turns(calls, rounds)), flush=True)


def ring_rank(rank, port, rounds):
    """A rank of the two; rank 0 prints the times."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    import torch.distributed as dist
    import torch.distributed.tensor.experimental._context_parallel._attention as ring

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    groups = {device: kyklos.Group.from_torch(device=device) for device in DEVICES}
    groups["torch:cpu, messages by gloo"] = kyklos.Group.from_torch(device="torch:cpu", collective="torch")

    def attend(q, k, v, is_causal=False, **_):
        return kernel(q, k, v, 0.0, is_causal)

    for tokens, mask in RING_CASES:
        torch.manual_seed(rank)
        q, k, v = (torch.randn(1, 8, tokens // 2, 64) for _ in range(3))
        causal = mask == "causal"
        ring._cp_options.enable_load_balance = causal
        options = {"mask": mask, "layout": "bhsd", "inference": True, "mesh": "1x2", "placement": "zigzag" if causal else "contiguous"}

        def of_pytorch():
            dist.barrier()
            ring._templated_ring_attention(dist.group.WORLD, 2, attend, q, k, v, is_causal=causal)
            dist.barrier()

        def of_kyklos(group):
            dist.barrier()
            group.attend(q, k, v, **options)
            dist.barrier()

        calls = {}
        for way in ("allgather", "alltoall"):
            calls[f"PyTorch {way}"] = lambda way=way: (ring.set_rotate_method(way), of_pytorch())
        for device, group in groups.items():
            calls[device] = lambda group=group: of_kyklos(group)
        times = turns(calls, rounds)
        # The faster of PyTorch's two ways in each round.
        best = [min(pair) for pair in zip(times.pop("PyTorch allgather"), times.pop("PyTorch alltoall"), strict=True)]
        if rank == 0:
            print(json.dumps([f"ring of two {tokens} x 8 x 64 {mask}", {"PyTorch": best, **times}]), flush=True)
    for group in groups.values():
        group.close()
    dist.destroy_process_group()


def two_ranks(rounds):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, __file__, str(rounds), str(rank), str(port)], stdout=subprocess.PIPE, env=environment, text=True)
        for rank in range(2)
    ]
    try:
        text, _ = ranks[0].communicate(timeout=900)
        for row in text.splitlines():
            print(line(*json.loads(row)), flush=True)
        if ranks[0].returncode or ranks[1].wait(timeout=60):
            sys.exit("a rank of the ring failed")
    finally:
        for rank in ranks:
            rank.kill()


if __name__ == "__main__":
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    if len(sys.argv) > 2:
        ring_rank(int(sys.argv[2]), int(sys.argv[3]), rounds)
    else:
        print(f"PyTorch {torch.__version__}, kyklos in {os.path.dirname(kyklos.__file__)}, {rounds} rounds")
        one_rank(rounds)
        two_ranks(rounds)
