"""A ring of two processes: Kyklos through shared memory and over QUIC against PyTorch's ring attention over gloo, in one sitting.

Both use one compute thread per process, B 1, H 8, D 64, f32. PyTorch's ring is the private template behind its
`context_parallel`; on a CPU it has to be called directly. Rounds alternate, so that a noisy minute hits both.

    tests/peers/setup.sh                          once: the peers, in a virtual environment
    target/peers/bin/python tests/peers/ring.py   [--seq 4096] [--rounds 5] [--program KYKLOS] [--out docs/results/FOLDER]
"""

import argparse
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
REPEATS = 5


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def torch_rank(rank, port, seq, results):
    """One of two gloo ranks; rank 0 puts {variant: (median ms, max error)} into `results`."""
    import logging
    import warnings

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    import torch
    import torch.distributed as dist
    import torch.distributed.tensor.experimental._context_parallel._attention as ring

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    group = dist.group.WORLD
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

    def attend(q, k, v, is_causal=False, **_):
        return kernel(q, k, v, 0.0, is_causal)

    torch.manual_seed(0)
    whole = [torch.randn(1, 8, seq, 64) for _ in range(3)]
    out = {}
    for name, causal, balanced in (("full", False, False), ("causal", True, True)):
        quarters = [rank, 3 - rank] if balanced else [2 * rank, 2 * rank + 1]

        def mine(tensor):
            return torch.cat([tensor.chunk(4, 2)[i] for i in quarters], 2)

        local = [mine(tensor) for tensor in whole]
        expected = mine(torch.nn.functional.scaled_dot_product_attention(*whole, is_causal=causal))
        ring._cp_options.enable_load_balance = balanced
        times, best = {}, None
        for rotation in ("allgather", "alltoall"):
            ring.set_rotate_method(rotation)
            runs = []
            for _ in range(REPEATS + 2):
                dist.barrier()
                start = time.perf_counter()
                got = ring._templated_ring_attention(group, 2, attend, *local, is_causal=causal)
                dist.barrier()
                runs.append(1e3 * (time.perf_counter() - start))
            times[rotation] = runs[2:]
            error = (got[0] - expected).abs().max()
            dist.all_reduce(error, op=dist.ReduceOp.MAX)
            median = statistics.median(runs[2:])
            if best is None or median < best[0]:
                best = (median, float(error), rotation, runs[2:])
        out[name] = best
    if rank == 0:
        results.put(out)
    dist.destroy_process_group()


def torch_round(seq):
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    results, port = context.Queue(), free_port()
    ranks = [context.Process(target=torch_rank, args=(rank, port, seq, results)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    out = results.get(timeout=300)
    for rank in ranks:
        rank.join(timeout=60)
    return out


def kyklos_round(program, seq, shared_memory):
    out = {}
    for name, mask in (("full", "full"), ("causal", "causal")):
        command = [program, "launch", "-n", "2", "--", "attend", "--shape", f"1,{seq},8,8,64", "--mask", mask,
                   "--mesh", "1x2", "--device", "cpu", "--repeat", str(REPEATS + 2), "--json", "--verify",
                   "--shared-memory", shared_memory]
        env = {**os.environ, "RAYON_NUM_THREADS": "1"}
        run = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
        if run.returncode != 0:
            sys.exit(f"{' '.join(command)} ended with {run.returncode}:\n{run.stderr}")
        lines = [line[line.index("{"):] for line in run.stdout.splitlines() if "{" in line]
        report = json.loads("".join(lines)) if len(lines) == 1 else json.loads(run.stdout)
        out[name] = (1e3 * report["wall_s"], report["max_abs_error"])
    return out


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--seq", type=int, default=4096)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--program")
    arguments.add_argument("--out")
    options = arguments.parse_args()
    if options.program is None:
        subprocess.run(["cargo", "build", "--release", "-p", "kyklos-cli"], cwd=ROOT, check=True)
    program = options.program or str(ROOT / "target/release/kyklos")
    rows = []
    for round_number in range(options.rounds):
        torch = torch_round(options.seq)
        kyklos, quic = (kyklos_round(program, options.seq, memory) for memory in ("on", "off"))
        for name in ("full", "causal"):
            rows.append({"round": round_number, "mask": name, "torch_ms": torch[name][0], "torch_error": torch[name][1],
                         "torch_rotation": torch[name][2], "kyklos_ms": kyklos[name][0],
                         "kyklos_error": kyklos[name][1], "quic_ms": quic[name][0], "load": os.getloadavg()[0],
                         "ratio": torch[name][0] / kyklos[name][0], "quic_ratio": torch[name][0] / quic[name][0]})
            print(json.dumps(rows[-1]), flush=True)
    lines = [f"ring of 2 processes, B1 H8 D64 f32, S {options.seq}, one thread each; {options.rounds} rounds of {REPEATS}"]
    for name in ("full", "causal"):
        mine = [row for row in rows if row["mask"] == name]
        middle = {key: statistics.median(row[key] for row in mine) for key in ("torch_ms", "kyklos_ms", "quic_ms", "ratio", "quic_ratio")}
        spread = [f"{min(row['ratio'] for row in mine):.2f}", f"{max(row['ratio'] for row in mine):.2f}"]
        lines.append(f"{name}: PyTorch over gloo {middle['torch_ms']:.1f} ms, Kyklos through shared memory {middle['kyklos_ms']:.1f} ms, "
                     f"ratio {middle['ratio']:.2f} ({spread[0]} to {spread[1]}); over QUIC {middle['quic_ms']:.1f} ms, "
                     f"ratio {middle['quic_ratio']:.2f}")
    print("\n".join(lines))
    if options.out:
        folder = ROOT / options.out
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "ring.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "ring.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
