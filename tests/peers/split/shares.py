#!/usr/bin/env python3
"""Shares of split models by pace, on ranks with parts of a core each (cgroup quotas; needs root).

Usage: shares.py [--quotas 100 40] [--rounds 5]

Each rank is a process with one thread of PyTorch. In turns: even shares, shares="auto", and each rank alone, whose times give the ideal (the
work over the sum of the speeds). Prints CSV: model,round,variant,seconds,shares. Needs kyklos, transformers and diffusers in the environment.
"""

import argparse
import contextlib
import copy
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

PERIOD_US = 10_000


def models():
    """By name: a model, a function that calls it, and its handle's tokens."""
    import diffusers
    import torch
    import transformers

    torch.manual_seed(0)
    if not torch.cuda.is_available():
        torch.cuda.is_current_stream_capturing = lambda: False
    torch.set_num_threads(1)
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=1000, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4
        )
    )
    ids = torch.randint(3, 1000, (1, 2048))
    wan = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=4, attention_head_dim=64, in_channels=4, out_channels=4, text_dim=16, freq_dim=16, ffn_dim=512, num_layers=4
    )
    video = {
        "hidden_states": torch.randn(1, 4, 5, 40, 40),
        "timestep": torch.tensor([700]),
        "encoder_hidden_states": torch.randn(1, 12, 16),
    }
    return {
        "llama, 2048 tokens": (llama.eval(), lambda model: model(input_ids=ids, use_cache=False, logits_to_keep=1)),
        "wan, 2000 tokens": (wan.eval(), lambda model: model(**video, return_dict=False)),
    }


def rank(own, rounds):
    import torch

    import kyklos
    import kyklos.diffusers
    import kyklos.transformers

    with kyklos.Group.connect(**own, device="cpu", join_deadline_s=120, deadline_s=300) as group, torch.no_grad():
        ready = torch.ones(1, 8, 1, 8)

        def together(label):
            group.attend(ready, ready, ready, layout="bshd", label=label)

        def seconds(call, model, times):
            walls = []
            for _ in range(times):
                began = time.perf_counter()
                call(model)
                walls.append(time.perf_counter() - began)
            return statistics.median(walls)

        for name, (model, call) in models().items():
            kind = kyklos.transformers if "llama" in name else kyklos.diffusers
            for number in range(rounds):
                for variant in ("even", "auto"):
                    split = copy.deepcopy(model)
                    with kind.parallelize(split, group, mesh="1x2", shares="auto" if variant == "auto" else None) as handle:
                        seconds(call, split, 4)
                        took = seconds(call, split, 5)
                        shares = handle.counts(2048) if "llama" in name else handle.shares
                    if group.rank == 0:
                        print(f"{name},{number},{variant},{took:.3f},{' '.join(map(str, shares))}", flush=True)
                for alone in range(group.size):
                    together(f"{name} {number} alone {alone}")
                    if group.rank == alone:
                        seconds(call, model, 1)
                        print(f"{name},{number},rank {alone} alone,{seconds(call, model, 3):.3f},", flush=True)
                together(f"{name} {number} done")


@contextlib.contextmanager
def quotas(percents):
    """A control group for each rank, with a part of a core."""
    v2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    base = Path("/sys/fs/cgroup" if v2 else "/sys/fs/cgroup/cpu") / "kyklos-shares"
    base.mkdir(exist_ok=True)
    if v2:
        (base / "cgroup.subtree_control").write_text("+cpu")
    groups = []
    try:
        for number, percent in enumerate(percents):
            groups.append(base / str(number))
            groups[-1].mkdir(exist_ok=True)
            us = percent * PERIOD_US // 100
            if v2:
                (groups[-1] / "cpu.max").write_text(f"{us} {PERIOD_US}")
            else:
                (groups[-1] / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (groups[-1] / "cpu.cfs_quota_us").write_text(str(us))
        yield groups
    finally:
        for group in [*groups, base]:
            with contextlib.suppress(OSError):
                group.rmdir()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quotas", type=int, nargs="+", default=[100, 40])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank(json.loads(args.rank), args.rounds)
        return
    import kyklos
    from kyklos._kyklos import free_port

    port, size = free_port("127.0.0.1"), len(args.quotas)
    print("model,round,variant,seconds,shares", flush=True)
    with quotas(args.quotas) as groups:
        processes = []
        for number, (pem, group) in enumerate(zip(kyklos.identities(size), groups, strict=True)):
            own = {"identity": pem, "rank": number, "size": size, "host": "127.0.0.1", "port": port}
            command = [sys.executable, __file__, "--rounds", str(args.rounds), "--rank", json.dumps(own)]

            def enter(group=group):
                (group / "cgroup.procs").write_text(str(os.getpid()))

            processes.append(subprocess.Popen(command, preexec_fn=enter))
        sys.exit(max(process.wait() for process in processes))


if __name__ == "__main__":
    main()
