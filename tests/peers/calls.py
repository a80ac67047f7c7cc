"""Cost of a call: Kyklos over QUIC against PyTorch over gloo, in one sitting, between processes on loopback.

64 tokens, 8 query heads, 2 key/value heads of dim 64, f32, one compute thread per process, the sizes of the bench `calls` and
rows of its shape, after the number of the round. PyTorch's ring is the private template behind its `context_parallel`; its
kernel for a CPU wants as many key/value heads as query heads, so it repeats them after they have travelled. The column of a
vote is gloo's all-reduce of 4 bytes. `quic` has all ranks in one process with one I/O thread, `quic-processes` one process
for each rank; their medians are over all calls of a run.

    tests/peers/setup.sh                           once: the peers, in a virtual environment
    target/peers/bin/python tests/peers/calls.py   [--rounds 5] [--calls 1000] > FILE.csv
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

from ring import ROOT, free_port

TOKENS, HEADS, KV_HEADS, DIM = 64, 8, 2, 64
COLUMNS = "round,device,transport,ranks,call_us,compute_us,vote_us,beyond_kernels_us,call_of_many_us"


def torch_rank(rank, ranks, port, calls, results):
    """One gloo rank; rank 0 puts the medians (call, kernels, all-reduce) in microseconds into `results`."""
    import logging
    import warnings

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    import torch
    import torch.distributed as dist
    import torch.distributed.tensor.experimental._context_parallel._attention as ring

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    in_kernels = 0.0

    def attend(q, k, v, is_causal=False, **_):
        nonlocal in_kernels
        start = time.perf_counter()
        k, v = (tensor.repeat_interleave(HEADS // KV_HEADS, 1) for tensor in (k, v))
        out = kernel(q, k, v, 0.0, is_causal)
        in_kernels += time.perf_counter() - start
        return out

    torch.manual_seed(0)
    whole = [torch.randn(1, heads, TOKENS, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    local = [tensor.chunk(ranks, 2)[rank].contiguous() for tensor in whole]
    expected = torch.nn.functional.scaled_dot_product_attention(*whole, enable_gqa=True).chunk(ranks, 2)[rank]
    ring._cp_options.enable_load_balance = False
    best = None
    for rotation in ("allgather", "alltoall"):
        ring.set_rotate_method(rotation)
        call_us, kernels_us = [], []
        for call in range(calls + calls // 10):
            in_kernels, start = 0.0, time.perf_counter()
            got = ring._templated_ring_attention(dist.group.WORLD, 2, attend, *local, is_causal=False)
            if call >= calls // 10:
                call_us.append(1e6 * (time.perf_counter() - start))
                kernels_us.append(1e6 * in_kernels)
        error = float((got[0] - expected).abs().max())
        if error > 1e-4:
            sys.exit(f"PyTorch's ring is wrong by {error}")
        medians = statistics.median(call_us), statistics.median(kernels_us), rotation
        best = min(best, medians) if best else medians
    vote, vote_us = torch.zeros(1), []
    for _ in range(calls):
        start = time.perf_counter()
        dist.all_reduce(vote)
        vote_us.append(1e6 * (time.perf_counter() - start))
    if rank == 0:
        results.put((*best, statistics.median(vote_us)))
    dist.barrier()
    dist.destroy_process_group()


def torch_row(ranks, calls):
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    results, port = context.Queue(), free_port()
    group = [context.Process(target=torch_rank, args=(rank, ranks, port, calls, results)) for rank in range(ranks)]
    for rank in group:
        rank.start()
    call, kernels, rotation, vote = results.get(timeout=300)
    for rank in group:
        rank.join(timeout=60)
    return f"cpu,gloo-ring-{rotation},{ranks},{call:.1f},{kernels:.1f},{vote:.1f},{call - kernels:.1f},"


def run(command):
    env = {**os.environ, "RAYON_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, cwd=ROOT)
    if ended.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stderr}")
    return ended.stdout


def bench_row(bench, ranks):
    return run([bench, "--bench", "--only", f"cpu,quic,{ranks}"]).splitlines()[-1]


def processes_row(program, ranks, calls):
    shape = f"1,{TOKENS},{HEADS},{KV_HEADS},{DIM}"
    out = run([program, "launch", "-n", str(ranks), "--", "attend", "--shape", shape, "--mesh", f"1x{ranks}",
               "--device", "cpu", "--repeat", str(calls), "--json"])
    report = json.loads(out[out.index("{"):])
    call = 1e6 * report["wall_s"]
    kernels = 1e6 * statistics.mean(rank["compute_s"] for rank in report["per_rank"])
    return f"cpu,quic-processes,{ranks},{call:.1f},{kernels:.1f},,{call - kernels:.1f},"


def built(*arguments):
    """Builds a program and returns its path."""
    command = ["cargo", *arguments, "--workspace", "--all-features", "--message-format", "json"]
    lines = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    return [made["executable"] for made in map(json.loads, lines) if made.get("executable")][-1]


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--calls", type=int, default=1000)
    options = arguments.parse_args()
    bench = built("bench", "--no-run", "--bench", "calls")
    program = built("build", "--release", "--bin", "kyklos")
    print(COLUMNS)
    for number in range(options.rounds):
        for ranks in (2, 4):
            for row in (lambda: torch_row(ranks, options.calls), lambda: bench_row(bench, ranks),
                        lambda: processes_row(program, ranks, options.calls)):
                print(f"{number},{row()}", flush=True)


if __name__ == "__main__":
    main()
