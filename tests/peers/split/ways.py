#!/usr/bin/env python3
"""Ways to compute forwards of a split transformer: predicted times, the choice, and the time of each way (needs root, for namespaces and quotas).

Usage: ways.py [--quotas 100 100] [--mbit 1000] [--forwards 8]

Two ranks, each a process with one thread of PyTorch, in network namespaces of their own with a link of so many Mbit/s (0: no limit), and
so many percent of a core each. For each model: kyklos.diffusers chooses, then each way of its table is run by itself. Prints CSV:
model,mbit,quotas,way,chosen,predicted_s,seconds. Needs kyklos and diffusers in the environment.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time

from shares import quotas

HOSTS = ["10.77.0.1", "10.77.0.2"]


def models():
    """By name: a transformer, and the inputs of the calls of a step."""
    import diffusers
    import torch

    torch.manual_seed(0)
    if not torch.cuda.is_available():
        torch.cuda.is_current_stream_capturing = lambda: False
    torch.set_num_threads(1)

    def wan(layers=2):
        return diffusers.WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=4,
            attention_head_dim=64,
            in_channels=4,
            out_channels=4,
            text_dim=16,
            freq_dim=16,
            ffn_dim=512,
            num_layers=layers,
        ).eval()

    def call(frames, side, batch=1):
        return {
            "hidden_states": torch.randn(batch, 4, frames, side, side),
            "timestep": torch.full((batch,), 700),
            "encoder_hidden_states": torch.randn(batch, 12, 16),
        }

    one = call(5, 40)
    other = {**one, "encoder_hidden_states": torch.randn(1, 12, 16)}
    return {
        "one call of 2000 tokens": (wan(), [one]),
        "two calls of 2000 tokens": (wan(), [one, other]),
        "a batch of 2 x 2000 tokens": (wan(), [call(5, 40, 2)]),
        "one call of 4800 tokens": (wan(), [call(3, 80)]),
    }


def rank(own, args):
    import torch

    import kyklos
    from kyklos.diffusers import parallelize
    from kyklos.diffusers._ways.choice import Estimate, Trial

    with kyklos.Group.connect(**own, device="cpu", join_deadline_s=120, deadline_s=300) as group, torch.no_grad():
        for name, (model, step) in models().items():
            with parallelize(model, group) as handle:
                state = handle._split.shares

                def seconds(number, model=model, step=step):
                    began = time.perf_counter()
                    for forward in range(number):
                        model(**step[forward % len(step)], return_dict=False)
                    return (time.perf_counter() - began) / number

                while state.trial is None or not state.trial.is_over:
                    seconds(2)
                trial = state.trial
                shapes = next(iter(state.trials))
                chosen = trial.now
                for estimate in trial.estimates:
                    state.trials[shapes] = Trial([Estimate(estimate.way, 0.0, tried_s=[0.0] * 4)])
                    seconds(4)
                    took = seconds(args.forwards)
                    if group.rank == 0:
                        row = [name, args.mbit, ":".join(map(str, args.quotas)), f'"{estimate.way.name}"', int(estimate is chosen)]
                        print(*row, f"{estimate.predicted_s:.4f}", f"{took:.4f}", sep=",", flush=True)


@contextlib.contextmanager
def namespaces(mbit):
    """A network namespace for each of two ranks."""

    def run(*words):
        subprocess.run(words, check=True)

    names = [f"kyklos-ways-{number}" for number in range(2)]
    try:
        for name in names:
            # One of a run that was killed.
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)
            run("ip", "netns", "add", name)
        run("ip", "link", "add", "kyw0", "netns", names[0], "type", "veth", "peer", "name", "kyw1", "netns", names[1])
        for number, name in enumerate(names):
            run("ip", "-n", name, "addr", "add", f"{HOSTS[number]}/24", "dev", f"kyw{number}")
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "link", "set", f"kyw{number}", "up")
            if mbit:
                limit = ["tbf", "rate", f"{mbit}mbit", "burst", "256kbit", "latency", "50ms"]
                run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", f"kyw{number}", "root", *limit)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quotas", type=int, nargs=2, default=[100, 100])
    parser.add_argument("--mbit", type=int, default=1000)
    parser.add_argument("--forwards", type=int, default=8)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank(json.loads(args.rank), args)
        return
    import kyklos

    print("model,mbit,quotas,way,chosen,predicted_s,seconds", flush=True)
    # Ranks of one machine would use its memory.
    environment = {**os.environ, "KYKLOS_SHARED_MEMORY": "off"}
    with quotas(args.quotas) as groups, namespaces(args.mbit) as names:
        processes = []
        for number, (pem, group) in enumerate(zip(kyklos.identities(2), groups, strict=True)):
            own = {"identity": pem, "rank": number, "size": 2, "host": HOSTS[0], "port": 29777}
            options = ["--quotas", *map(str, args.quotas), "--mbit", str(args.mbit), "--forwards", str(args.forwards)]
            command = ["ip", "netns", "exec", names[number], sys.executable, __file__, *options, "--rank", json.dumps(own)]

            def enter(group=group):
                (group / "cgroup.procs").write_text(str(os.getpid()))

            processes.append(subprocess.Popen(command, preexec_fn=enter, env=environment))
        sys.exit(max(process.wait() for process in processes))


if __name__ == "__main__":
    main()
