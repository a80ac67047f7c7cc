"""PyTorch as a device of Kyklos: torch_device.py claims|messages|times [DEVICE]      DEVICE: cuda:0 by default, or cpu, for a rehearsal

claims: which kernels are used, and the contract of backends, claim by claim, where PyTorch is told to repeat gradients bit by bit.
messages: by NCCL, one process on each GPU, as through the host; NCCL takes no two ranks on one GPU, so with one GPU only a message to
itself. times: a call of one rank beside PyTorch's scaled_dot_product_attention, forward and gradients, and two ranks of one process,
which share the GPU; then the same with each newer flash attention that is installed.
"""

import os
import queue
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

import kyklos
import kyklos.torch
from kyklos import _kyklos

WHAT, DEVICE = sys.argv[1], (sys.argv[2:] or ["cuda:0"])[0]
ON_CPU = DEVICE == "cpu"


def claims():
    wrong = 0
    # Without it cuBLAS refuses to promise the same bits.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    with kyklos.Group.local(1, device=f"torch:{DEVICE}")[0] as group:
        for dtype in ("float32", "float16", "bfloat16"):
            print(f"kernels for {dtype}:", ", ".join(f"{dim}: {group.kernel(dim, dtype)}" for dim in (64, 96, 128, 256)), flush=True)
    for claim in _kyklos.claims():
        began = time.perf_counter()
        try:
            _kyklos.check(DEVICE, claim)
            outcome = "right"
        except BaseException as fault:  # A panic is no Exception.
            wrong += 1
            outcome = "WRONG\n" + "\n".join(str(fault).splitlines()[:8])
        print(f"{time.perf_counter() - began:5.1f} s  {claim}: {outcome}", flush=True)
    sys.exit(f"{wrong} claims do not hold" if wrong else 0)


def messages():
    ranks = 2 if ON_CPU else torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(messages_of, (ranks, folder), ranks)
    print(f"{ranks} ranks: right", flush=True)


def messages_of(rank, ranks, folder):
    device = "cpu" if ON_CPU else f"cuda:{rank}"
    if not ON_CPU:
        torch.cuda.set_device(rank)
    backend = "gloo" if ON_CPU else "nccl"
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    if not ON_CPU:
        to_itself(rank, device)
    results = []
    for collective in ("host", "torch"):
        with kyklos.Group.from_torch(device=f"torch:{device}", collective=collective) as group:
            print(f"rank {rank}: {group.collective}", flush=True)
            for mesh in (f"1x{ranks}", f"{ranks}x1"):
                generator = torch.Generator().manual_seed(rank)
                q, k, v, d_o = (torch.randn(1, 8, 640, 64, generator=generator).to(device, torch.bfloat16) for _ in range(4))
                leaves = [x.requires_grad_() for x in (q, k, v)]
                o, lse = kyklos.torch.attention(*leaves, group, mask="causal", mesh=mesh)
                results.append([o, lse, *torch.autograd.grad(o, leaves, d_o)])
    half = len(results) // 2
    for wanted, found in zip(results[:half], results[half:], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(wanted, found, strict=True)), f"rank {rank}: other bytes than through the host"
    dist.destroy_process_group()


def to_itself(rank, device):
    from kyklos._device import Device
    from kyklos._device._messages import Exchange, Messages

    own, ends = Messages(dist.group.WORLD, Device(device)), queue.Queue()
    own.open(60.0, 60.0, ends.put)
    assert (why := ends.get(timeout=120)) is None, why
    count = 1 << 20
    sent = torch.randint(256, (count,), dtype=torch.uint8, device=device)
    received = torch.zeros_like(sent)
    exchange = Exchange(own, [(rank, 0, sent, 3, count)], [(rank, 0, received, 0, count - 3)])
    exchange.wait()
    exchange.order()
    assert torch.equal(received[: count - 3], sent[3:]) and not received[count - 3 :].any()
    own.close()


def milliseconds(call):
    if not ON_CPU:
        torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    if not ON_CPU:
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began)


def compare(case, calls):
    times = {name: [] for name in calls}
    for round_ in range(6):
        for name, call in calls.items():
            taken = milliseconds(call)
            if round_:
                times[name].append(taken)
    peer, *others = times
    line = f"{case:34} {peer} {statistics.median(times[peer]):9.3f} ms"
    for name in others:
        ratios = [own / theirs for own, theirs in zip(times[name], times[peer], strict=True)]
        line += f"  {name} {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    print(line, flush=True)


def times():
    compare_shapes()
    for version in ("FA3", "FA4"):
        try:
            torch.nn.attention.activate_flash_attention_impl(version)
        except (ImportError, RuntimeError, ValueError, AttributeError) as why:
            print(f"without {version}: {why}", flush=True)
            continue
        print(f"with {version}", flush=True)
        compare_shapes()
        torch.nn.attention.restore_flash_attention_impl()


def compare_shapes():
    shapes = [(512, 2, 64)] if ON_CPU else [(4096, 16, 128), (16384, 16, 128), (16384, 32, 64)]
    groups = {ranks: kyklos.Group.local(ranks, device=f"torch:{DEVICE}") for ranks in (1, 2)}
    for tokens, heads, dim in shapes:
        for mask in ("full", "causal"):
            q, k, v, d_o = (torch.randn(1, heads, tokens, dim, device=DEVICE, dtype=torch.bfloat16) for _ in range(4))
            case = f"{tokens} x {heads} x {dim} {mask}"
            half = tokens // 2

            def two(group):
                own = slice(group.rank * half, (group.rank + 1) * half)
                return group.attend(q[:, :, own], k[:, :, own], v[:, :, own], mask=mask, layout="bhsd", inference=True)

            calls = {
                "PyTorch": lambda: scaled_dot_product_attention(q, k, v, is_causal=mask == "causal"),
                "one rank": lambda: groups[1][0].attend(q, k, v, mask=mask, layout="bhsd", inference=True),
                "two ranks": lambda: on_threads(groups[2], two),
            }
            compare(case, calls)
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            calls = {
                "PyTorch": lambda: torch.autograd.grad(scaled_dot_product_attention(*leaves, is_causal=mask == "causal"), leaves, d_o),
                "one rank": lambda: torch.autograd.grad(kyklos.torch.attention(*leaves, groups[1][0], mask=mask)[0], leaves, d_o),
            }
            compare(case + " and gradients", calls)


def on_threads(groups, call):
    with ThreadPoolExecutor(len(groups)) as pool:
        list(pool.map(call, groups))


if __name__ == "__main__":
    {"claims": claims, "messages": messages, "times": times}[WHAT]()
