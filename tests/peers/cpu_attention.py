"""Attention on the CPU: Kyklos beside PyTorch's scaled_dot_product_attention and onnxruntime's MultiHeadAttention.

One sitting, rounds in turn, medians: only ratios within a sitting mean anything. Every peer's result is first checked
on sample rows against f64 numpy. Set-up: tests/peers/setup.sh. Run from the repository's root:

    target/peers/bin/python tests/peers/cpu_attention.py [--rounds 5] [--threads 2] [--case B,S,H,D,mask,dtype]...

Raw rounds go to target/cpu_attention_peers.csv (--output). `--stand-ins` is the set-up's second half.
"""

import argparse
import csv
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time

CASES = [
    "1,1024,8,64,full,f32",
    "1,1024,8,64,causal,f32",
    "1,1024,8,128,full,f32",
    "1,1024,8,128,causal,f32",
    "1,4096,8,64,full,f32",
    "1,4096,8,64,causal,f32",
    "1,4096,8,128,full,f32",
    "1,4096,8,128,causal,f32",
]


def make_stand_ins():
    """Builds an empty library for each NVIDIA library that PyTorch's own libraries need and that is not there.

    The dynamic linker wants every needed library and every versioned symbol to exist before PyTorch runs at all; on
    a machine without a GPU none is ever called for CPU work. Each function returns an error code if it is."""
    folder = pathlib.Path(sysconfig.get_paths()["purelib"]) / "torch" / "lib"
    nvidia = re.compile(r"lib(cu|nv|nccl)")
    tool = lambda *words: subprocess.run(words, capture_output=True, text=True, check=True).stdout
    theirs = [path for path in folder.glob("*.so*") if not nvidia.match(path.name)]
    needed = set()
    for path in theirs:
        needed |= set(re.findall(r"\(NEEDED\).*\[(.+)\]", tool("readelf", "-dW", str(path))))
    missing = sorted(name for name in needed if nvidia.match(name))
    versioned = {name: {} for name in missing}
    plain = set()
    prefixes = re.compile(r"cu[A-Z]|cu(da|blas|dnn|fft|rand|solver|sparse|pti)|nccl|nvrtc|nvsh|nvml|nvJit|nvtx")
    for path in theirs:
        library, owner = None, {}
        for line in tool("readelf", "-VW", str(path)).splitlines():
            if found := re.search(r"File: (\S+)", line):
                library = found[1]
            elif (found := re.search(r"Name: (\S+)", line)) and library in versioned:
                owner[found[1]] = library
        for line in tool("readelf", "--dyn-syms", "-W", str(path)).splitlines():
            columns = line.split()
            if len(columns) < 8 or columns[6] != "UND":
                continue
            symbol, _, version = columns[7].partition("@")
            version = version.lstrip("@")
            if version in owner:
                versioned[owner[version]].setdefault(version, set()).add(symbol)
            elif not version and prefixes.match(symbol):
                plain.add(symbol)
    for index, name in enumerate(missing):
        groups = versioned[name]
        symbols = set().union(*groups.values()) | (plain if index == 0 else set())
        with tempfile.TemporaryDirectory() as work:
            source = pathlib.Path(work, "empty.c")
            source.write_text("".join(f"int {symbol}(void) {{ return 999; }}\n" for symbol in sorted(symbols)))
            command = ["cc", "-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{name}"]
            if groups:
                script = pathlib.Path(work, "versions")
                script.write_text(
                    "".join(f"{v} {{ global: {' '.join(s + ';' for s in sorted(g))} }};\n" for v, g in groups.items())
                )
                command.append(f"-Wl,--version-script={script}")
            subprocess.run([*command, "-o", str(folder / name), str(source)], check=True)
    print(f"{len(missing)} stand-ins in {folder}")


class Case:
    def __init__(self, text):
        import numpy as np

        parts = text.split(",")
        self.text = text
        self.b, self.s, self.h, self.d = map(int, parts[:4])
        self.mask, self.dtype = parts[4], parts[5]
        random = np.random.default_rng(7)
        shape = (self.b, self.s, self.h, self.d)
        self.q, self.k, self.v = (random.standard_normal(shape, dtype=np.float32) for _ in range(3))
        if self.dtype != "f32":
            import torch

            narrow = {"f16": torch.float16, "bf16": torch.bfloat16}[self.dtype]
            self.q, self.k, self.v = (
                torch.from_numpy(x).to(narrow).float().numpy() for x in (self.q, self.k, self.v)
            )

    def kyklos(self):
        return f"{self.b},{self.s},{self.h},{self.h},{self.d},{self.mask},{self.dtype}"

    def check(self, output, who):
        """output: [batch, seq, heads, dim]. Sample rows against the definition in f64."""
        import numpy as np

        random = np.random.default_rng(11)
        allowed = {"f32": 2e-5, "f16": 4e-3, "bf16": 3e-2}[self.dtype]
        worst = 0.0
        for _ in range(24):
            b, row, head = random.integers(self.b), random.integers(self.s), random.integers(self.h)
            end = row + 1 if self.mask == "causal" else self.s
            k = self.k[b, :end, head].astype(np.float64)
            logits = k @ self.q[b, row, head].astype(np.float64) / np.sqrt(self.d)
            weights = np.exp(logits - logits.max())
            exact = weights @ self.v[b, :end, head].astype(np.float64) / weights.sum()
            worst = max(worst, np.abs(exact - output[b, row, head]).max())
        if not worst <= allowed:
            sys.exit(f"{who} is wrong on {self.text}: off by {worst}, allowed {allowed}")
        return worst


def torch_call(case, threads):
    import torch

    torch.set_num_threads(threads)
    kind = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[case.dtype]
    # The same memory order as Kyklos reads, [batch, seq, heads, dim], seen as PyTorch wants it.
    q, k, v = (torch.from_numpy(x).to(kind).transpose(1, 2) for x in (case.q, case.k, case.v))
    attend = torch.nn.functional.scaled_dot_product_attention

    def call():
        with torch.inference_mode():
            return attend(q, k, v, is_causal=case.mask == "causal")

    return call, lambda: call().float().transpose(1, 2).numpy()


def ort_call(case, threads):
    import onnx
    import onnxruntime
    from onnx import TensorProto, helper

    if case.dtype == "bf16":
        return None
    kind = {"f32": TensorProto.FLOAT, "f16": TensorProto.FLOAT16}[case.dtype]
    numbers = {"f32": "float32", "f16": "float16"}[case.dtype]
    shape = [case.b, case.s, case.h * case.d]
    node = helper.make_node(
        "MultiHeadAttention",
        ["q", "k", "v"],
        ["o"],
        domain="com.microsoft",
        num_heads=case.h,
        unidirectional=int(case.mask == "causal"),
    )
    tensor = lambda name: helper.make_tensor_value_info(name, kind, shape)
    graph = helper.make_graph([node], "attention", [tensor(n) for n in "qkv"], [tensor("o")])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    feed = {n: x.reshape(shape).astype(numbers) for n, x in zip("qkv", (case.q, case.k, case.v))}
    call = lambda: session.run(None, feed)[0]
    return call, lambda: call().reshape(case.b, case.s, case.h, case.d).astype("float32")


def time_calls(call, runs):
    call()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def bench_program():
    command = ["cargo", "bench", "-p", "kyklos", "--no-default-features", "--features", "cpu", "--bench", "attend_cpu"]
    text = subprocess.run([*command, "--no-run"], capture_output=True, text=True, check=True).stderr
    return re.search(r"\((\S*attend_cpu-[0-9a-f]+)\)", text)[1]


def time_kyklos(program, case, threads, runs):
    command = [program, "--csv", "--threads", str(threads), "--runs", str(runs), "--case", case.kyklos()]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    row = next(csv.DictReader(lines))
    return float(row["median_ms"]), float(row["peak_gflop_per_s"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stand-ins", action="store_true", help="only make PyTorch's missing libraries")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runs", type=int, default=7, help="runs of each peer in a round")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--case", action="append")
    parser.add_argument("--program", help="a built attend_cpu, instead of building it")
    parser.add_argument("--output", default="target/cpu_attention_peers.csv")
    options = parser.parse_args()
    if options.stand_ins:
        return make_stand_ins()
    import onnxruntime
    import torch

    program = options.program or bench_program()
    rows = []
    load = os.getloadavg()[0]
    print(f"torch {torch.__version__}, onnxruntime {onnxruntime.__version__}, {options.threads} threads, medians in ms")
    print(f"{'case':26} {'kyklos':>8} {'torch':>8} {'ort':>8} {'torch/k':>8} {'ort/k':>8} {'% peak':>7}")
    for text in options.case or CASES:
        case = Case(text)
        peers = {"torch": torch_call(case, options.threads), "ort": ort_call(case, options.threads)}
        peers = {who: calls for who, calls in peers.items() if calls}
        worst = {who: case.check(output(), who) for who, (_, output) in peers.items()}
        times = {who: [] for who in ("kyklos", *peers)}
        peaks = []
        for turn in range(options.rounds):
            for who in sorted(times, reverse=turn % 2 == 1):
                # The one before may leave threads that spin for a while.
                time.sleep(0.3)
                if who == "kyklos":
                    ms, peak = time_kyklos(program, case, options.threads, options.runs)
                    peaks.append(peak)
                else:
                    ms = time_calls(peers[who][0], options.runs)
                times[who].append(ms)
                rows.append([text, options.threads, turn, who, f"{ms:.3f}", worst.get(who, "")])
        median = {who: statistics.median(ms) for who, ms in times.items()}
        pairs = case.s * (case.s + 1) / 2 if case.mask == "causal" else case.s**2
        speed = 4 * case.b * case.h * case.d * pairs / median["kyklos"] / 1e6
        ratio = lambda who: median[who] / median["kyklos"] if who in median else float("nan")
        print(
            f"{text:26} {median['kyklos']:8.2f} {median['torch']:8.2f} {median.get('ort', float('nan')):8.2f} "
            f"{ratio('torch'):8.2f} {ratio('ort'):8.2f} {100 * speed / statistics.median(peaks):7.1f}",
            flush=True,
        )
    output = pathlib.Path(options.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("w", newline="") as file:
        print(
            f"# {platform.processor() or platform.machine()}, torch {torch.__version__},"
            f" onnxruntime {onnxruntime.__version__}; medians of {options.runs} runs a round;"
            f" load average {load:.1f} before, {os.getloadavg()[0]:.1f} after",
            file=file,
        )
        writer = csv.writer(file)
        writer.writerow(["case", "threads", "round", "who", "median_ms", "max_abs_error"])
        writer.writerows(rows)


if __name__ == "__main__":
    main()
