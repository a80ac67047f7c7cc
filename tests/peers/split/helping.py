#!/usr/bin/env python3
"""Models with helpers in other network namespaces: times alone, with helpers, and predicted (needs root, for namespaces and quotas).

Usage: helping.py [--quotas 100 100] [--mbit 1000] [--forwards 8] [--only wan] [--faults]

The owner and one helper are processes with one thread each, in network namespaces of their own with a link of so many Mbit/s (0: no limit),
and so many percent of a core each. Each model is unmodified. In turns: forwards without helpers, and in a block of them. Prints CSV:
model,mbit,quotas,alone_s,helped_s,predicted_s,gain,predicted_gain,shared_calls,calls,largest_error. With --faults the helper is killed, frozen and
cut off in the middle of forwards, and starts late: prints the slowest forward of each, and that results are right. Needs kyklos, transformers and
diffusers in the environment.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time

from shares import quotas
from ways import HOSTS, namespaces


def models():
    """By name: a function that makes one forward, and returns its output."""
    import diffusers
    import torch
    import transformers

    torch.manual_seed(0)
    if not torch.cuda.is_available():
        torch.cuda.is_current_stream_capturing = lambda: False
    torch.set_num_threads(1)

    def wan(frames, side):
        model = diffusers.WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=8, attention_head_dim=64, in_channels=4, out_channels=4, text_dim=16, freq_dim=16, ffn_dim=1024, num_layers=4
        ).eval()
        inputs = {
            "hidden_states": torch.randn(1, 4, frames, side, side),
            "timestep": torch.tensor([700]),
            "encoder_hidden_states": torch.randn(1, 12, 16),
        }
        return lambda: model(**inputs, return_dict=False)[0]

    def flux(side):
        model = diffusers.FluxTransformer2DModel(
            in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=64, num_attention_heads=8, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(16, 24, 24)
        ).eval()
        ids = torch.zeros(side * side, 3)
        ids[:, 1] = torch.arange(side).repeat_interleave(side)
        ids[:, 2] = torch.arange(side).repeat(side)
        inputs = {
            "hidden_states": torch.randn(1, side * side, 16),
            "encoder_hidden_states": torch.randn(1, 64, 32),
            "pooled_projections": torch.randn(1, 32),
            "timestep": torch.tensor([0.7]),
            "img_ids": ids,
            "txt_ids": torch.zeros(64, 3),
        }
        return lambda: model(**inputs, return_dict=False)[0]

    def qwen(side):
        model = diffusers.QwenImageTransformer2DModel(
            patch_size=2, in_channels=16, out_channels=4, num_layers=4, attention_head_dim=64, num_attention_heads=8, joint_attention_dim=32, axes_dims_rope=(16, 24, 24)
        ).eval()
        inputs = {
            "hidden_states": torch.randn(1, side * side, 16),
            "encoder_hidden_states": torch.randn(1, 64, 32),
            "encoder_hidden_states_mask": torch.ones(1, 64, dtype=torch.bool),
            "timestep": torch.tensor([0.7]),
            "img_shapes": [[(1, side, side)]],
        }
        return lambda: model(**inputs, return_dict=False)[0]

    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4
    )
    llama = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(3, 1000, (1, 4096))
    return {
        "wan, 600 tokens": wan(6, 20),
        "wan, 4800 tokens": wan(3, 80),
        "flux, 4096 tokens": flux(64),
        "qwen-image, 4096 tokens": qwen(64),
        "llama, 4096 tokens": lambda: llama(input_ids=ids, use_cache=False, logits_to_keep=1).logits,
    }


def owner(args):
    import torch

    import kyklos

    helpers = kyklos.helpers(["peer"])
    forecasts = []
    core = helpers._core

    class Watched:
        def __getattr__(self, name):
            return getattr(core, name)

        def decide(self, options):
            shared = core.decide(options)
            forecasts.append(shared.seconds if shared is not None else None)
            return shared

    helpers._core = Watched()
    while helpers.status()[0]["state"] != "ready":
        time.sleep(0.1)

    def timed(forward, times):
        walls = []
        for _ in range(times):
            began = time.perf_counter()
            output = forward()
            walls.append(time.perf_counter() - began)
        return statistics.median(walls), max(walls), output

    with torch.no_grad():
        if args.faults:
            return faults(args, helpers, timed, models()["wan, 4800 tokens"])
        for name, forward in models().items():
            if not name.startswith(args.only):
                continue
            timed(forward, 1)
            with helpers:
                for _ in range(4):
                    forward()
                    helpers.settle()
            alone, helped, predicted = [], [], []
            for _ in range(args.forwards):
                seconds, _, want = timed(forward, 1)
                alone.append(seconds)
                forecasts.clear()
                with helpers:
                    seconds, _, got = timed(forward, 1)
                helped.append(seconds)
                made = [forecast for forecast in forecasts if forecast is not None]
                predicted.append(sum(total - own for total, own in made))
            alone_s, helped_s = statistics.median(alone), statistics.median(helped)
            predicted_s = alone_s + statistics.median(predicted)
            error = (got - want).abs().max().item() / want.abs().max().item()
            row = [f'"{name}"', args.mbit, ":".join(map(str, args.quotas)), f"{alone_s:.4f}", f"{helped_s:.4f}", f"{predicted_s:.4f}"]
            row += [f"{alone_s / helped_s:.3f}", f"{alone_s / predicted_s:.3f}", len(made), len(forecasts), f"{error:.1e}"]
            print(*row, sep=",", flush=True)
    print(json.dumps(helpers.status()), file=sys.stderr)


def faults(args, helpers, timed, forward):
    """What a forward takes while something becomes of the helper. The parent does it when it reads a line."""
    alone, _, want = timed(forward, 3)
    with helpers:
        for _ in range(6):
            forward()
            helpers.settle()
        helped, _, _ = timed(forward, 5)
        print(f"alone {alone:.3f} s, helped {helped:.3f} s", flush=True)
        for what in ("freeze", "thaw", "cut", "mend", "kill", "start"):
            print(f"do {what}", flush=True)
            sys.stdin.readline()
            slowest, right, forwards = 0.0, True, 0
            until = time.monotonic() + 12
            while time.monotonic() < until:
                _, seconds, got = timed(forward, 1)
                slowest = max(slowest, seconds)
                right = right and torch_close(got, want)
                forwards += 1
            state = helpers.status()[0]
            print(f"{what}: slowest of {forwards} forwards {slowest:.3f} s, right {right}, then {state['state']} {state['why']}", flush=True)


def torch_close(got, want):
    return bool((got - want).abs().max() <= 1e-4 * want.abs().max())


def helper(token):
    import kyklos

    kyklos.help_out(token, "cpu", tell=lambda text: print(text, file=sys.stderr))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quotas", type=int, nargs=2, default=[100, 100])
    parser.add_argument("--mbit", type=int, default=1000)
    parser.add_argument("--forwards", type=int, default=8)
    parser.add_argument("--only", default="", help="models whose names begin so")
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part == "owner":
        owner(args)
        return
    if args.part:
        helper(args.part)
        return
    import tempfile

    with tempfile.TemporaryDirectory() as settings, quotas(args.quotas) as groups, namespaces(args.mbit) as names:
        environment = {**os.environ, "KYKLOS_SETTINGS_DIR": settings, "KYKLOS_SHARED_MEMORY": "off", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        os.environ["KYKLOS_SETTINGS_DIR"] = settings
        from kyklos._kyklos import Owner

        token = Owner.invite("peer", HOSTS[0], 29700)
        options = ["--quotas", *map(str, args.quotas), "--mbit", str(args.mbit), "--forwards", str(args.forwards), "--only", args.only]
        options += ["--faults"] if args.faults else []

        def start(number, part, **given):
            def enter():
                (groups[number] / "cgroup.procs").write_text(str(os.getpid()))

            command = ["ip", "netns", "exec", names[number], sys.executable, __file__, *options, "--part", part]
            return subprocess.Popen(command, preexec_fn=enter, env=environment, **given)

        helping = start(1, token)
        if not args.faults:
            print("model,mbit,quotas,alone_s,helped_s,predicted_s,gain,predicted_gain,shared_calls,calls,largest_error", flush=True)
            code = start(0, "owner").wait()
        else:
            calling = start(0, "owner", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            link = ["ip", "-n", names[1], "link", "set", "kyw1"]
            for line in calling.stdout:
                print(line, end="", flush=True)
                if not line.startswith("do "):
                    continue
                match line.split()[1]:
                    case "freeze":
                        helping.send_signal(signal.SIGSTOP)
                    case "thaw":
                        helping.send_signal(signal.SIGCONT)
                    case "cut":
                        subprocess.run([*link, "down"], check=True)
                    case "mend":
                        subprocess.run([*link, "up"], check=True)
                    case "kill":
                        helping.kill()
                        helping.wait()
                    case "start":
                        helping = start(1, token)
                calling.stdin.write("\n")
                calling.stdin.flush()
            code = calling.wait()
        helping.kill()
        helping.wait()
        sys.exit(code)


if __name__ == "__main__":
    main()
