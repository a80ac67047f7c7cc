"""Attention on wgpu: Kyklos beside Burn and ONNX Runtime's WebGPU provider on one adapter, PyTorch's CPU for scale.

Every peer is optional; a missing one is said and left out. Set-up, from the repository's root:

    cargo build --release --manifest-path tests/peers/burn/Cargo.toml       Burn; about twenty minutes of a core
    python3 -m venv target/peers-webgpu
    target/peers-webgpu/bin/pip install onnxruntime-webgpu onnx numpy       ONNX Runtime
    apt-get install gcc libvulkan-dev         to hide subgroups from it: with them its attention is wrong on lavapipe
    tests/peers/setup.sh                                                    PyTorch
    tests/peers/newest_mesa.sh              a newer driver: ONNX Runtime refuses Debian 12's own

    python3 tests/peers/wgpu_peers.py [--mesa target/newest-mesa] [--set prefill] [--rounds 5] [--realtime] [--out PATH]

One sitting: in each round, one process after another for each case, so that a noisy minute hits all. Data is resident
for all; only ONNX Runtime's time has a copy in it, of the result to the CPU, the one way to wait for it from Python
(its plain call, with every copy, is in the raw rows too). Each program checks sampled rows of its result against the
definition in f64; a wrong result ends the run. Burn tunes itself in each process, before its timed calls (20 to 40 s);
decoding (few queries, 8 heads over 2) it does not know, so K and V are given to it once a head. ONNX Runtime decodes
with its cache in place.
"""

import argparse
import csv
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Batch, tokens (or queries:tokens), query heads, kv heads, dim, mask, dtype.
SETS = {
    "prefill": [f"1,1024,8,8,{rest}" for rest in ("64,full,f32", "64,causal,f32", "64,full,f16", "64,causal,f16",
                                                  "128,full,f32", "128,causal,f32")],
    "decode": [f"1,{rest}" for rest in ("1:4096,8,2,64,full,f32", "1:4096,8,2,64,full,f16", "1:4096,8,2,128,full,f32",
                                        "1:4096,8,2,128,full,f16", "1:4096,8,2,128,full,bf16",
                                        "4:4096,8,2,64,causal,f32", "4:4096,8,2,64,causal,f16",
                                        "4:4096,8,2,128,causal,f32", "4:4096,8,2,128,causal,f16")],
}
ALLOWED = {"f32": 1e-5, "f16": 5e-3, "bf16": 4e-2}
PEERS = ("burn", "ort", "torch")


class Case:
    def __init__(self, text):
        self.text = text
        batch, tokens, heads, kv_heads, dim, self.mask, self.dtype = text.split(",")
        queries, _, keys = tokens.rpartition(":")
        self.batch, self.keys, self.heads, self.kv_heads, self.dim = map(int, (batch, keys, heads, kv_heads, dim))
        self.queries = int(queries or keys)
        self.square = self.queries == self.keys

    def seen(self, row):
        return self.keys - self.queries + row + 1 if self.mask == "causal" else self.keys

    def tensors(self, kind):
        """q, k, v as [batch, tokens, heads, dim]."""
        import numpy as np

        random = np.random.default_rng(0)
        make = lambda tokens, heads: random.standard_normal((self.batch, tokens, heads, self.dim)).astype(kind)
        return make(self.queries, self.heads), make(self.keys, self.kv_heads), make(self.keys, self.kv_heads)

    def error(self, tensors, o):
        """Largest distance of o to the definition, on sampled rows."""
        import numpy as np

        q, k, v = (t.astype(np.float64) for t in tensors)
        group, worst = self.heads // self.kv_heads, 0.0
        for batch in range(self.batch):
            for row in sorted({*range(0, self.queries, 37), *range(min(4, self.queries)), self.queries - 1}):
                for head in range(self.heads):
                    keys = np.s_[batch, : self.seen(row), head // group]
                    logits = k[keys] @ q[batch, row, head] / np.sqrt(self.dim)
                    weights = np.exp(logits - logits.max())
                    exact = weights @ v[keys] / weights.sum()
                    off = np.abs(o[batch, row, head].astype(np.float64) - exact).max()
                    worst = max(worst, off) if np.isfinite(off) else np.inf
        return float(worst)


def time_calls(call, repeat, warm=2):
    times = []
    for _ in range(1 + warm + repeat):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return times[0], times[1 + warm :]


def ort_case(case, repeat):
    """Runs in a process of its own, over the driver: prints times in ms and the largest error."""
    import numpy as np
    import onnx
    import onnxruntime as ort
    from onnx import TensorProto, helper, numpy_helper

    kind, number = {"f32": (TensorProto.FLOAT, np.float32), "f16": (TensorProto.FLOAT16, np.float16)}[case.dtype]
    info = helper.make_tensor_value_info
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]

    def session(nodes, inputs, outputs, constants=()):
        shapes = lambda named: [info(name, kind, shape) for name, shape in named.items()]
        graph = helper.make_graph(nodes, "attention", shapes(inputs), shapes(outputs), initializer=constants)
        options = ort.SessionOptions()
        # An operator that it would move to the CPU is an error instead.
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        model = helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()
        return ort.InferenceSession(model, options, providers=["WebGpuExecutionProvider"])

    made = []

    def resident(tensor):
        """Python cannot upload to this provider; the result of adding zero stays on the device."""
        zero = numpy_helper.from_array(np.zeros(1, number), "zero")
        add, shape = helper.make_node("Add", ["x", "zero"], ["y"]), tensor.shape
        adder = session([add], {"x": shape}, {"y": shape}, [zero])
        binding = adder.io_binding()
        binding.bind_cpu_input("x", tensor)
        binding.bind_output("y", "webgpu")
        adder.run_with_iobinding(binding)
        made.append((adder, binding))
        return binding.get_outputs()[0]

    q, k, v = case.tensors(number)
    flat = lambda t: np.ascontiguousarray(t.reshape(case.batch, t.shape[1], -1))
    kept = {}
    if case.square and case.heads == case.kv_heads:
        feed = {"q": flat(q), "k": flat(k), "v": flat(v)}
        node = helper.make_node("MultiHeadAttention", list(feed), ["o"], domain="com.microsoft", num_heads=case.heads,
                                unidirectional=int(case.mask == "causal"))
        outputs, constants = {"o": feed["q"].shape}, []
    else:
        if case.mask == "full" and case.queries > 1:
            sys.exit("its grouped attention is causal only")
        # The queries' own keys are appended to the cache, in place, at each call.
        cached = [np.ascontiguousarray(t.transpose(0, 2, 1, 3)) for t in (k, v)]
        for cache in cached:
            cache[:, :, case.keys - case.queries :] = 0
        feed = {"q": flat(q), "k": flat(k[:, -case.queries :]), "v": flat(v[:, -case.queries :]),
                "past_k": cached[0], "past_v": cached[1]}
        kept = {"next_k": "past_k", "next_v": "past_v"}
        node = helper.make_node("GroupQueryAttention", [*feed, "last", "total"], ["o", *kept], domain="com.microsoft",
                                num_heads=case.heads, kv_num_heads=case.kv_heads)
        outputs = {"o": feed["q"].shape, **{name: cached[0].shape for name in kept}}
        constants = [numpy_helper.from_array(np.full(case.batch, case.keys - 1, np.int32), "last"),
                     numpy_helper.from_array(np.array(case.keys, np.int32), "total")]
    run = session([node], {name: t.shape for name, t in feed.items()}, outputs, constants)
    values = {name: resident(t) for name, t in feed.items()}
    binding = run.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("o", "cpu")
    for name, place in kept.items():
        binding.bind_ortvalue_output(name, values[place])

    def call():
        run.run_with_iobinding(binding)
        return binding.get_outputs()[0].numpy()

    first, times = time_calls(call, repeat)
    shape = (case.batch, case.queries, case.heads, case.dim)
    error = case.error((q, k, v), call().reshape(shape))
    _, copied = time_calls(lambda: run.run(["o"], feed), repeat)
    print(json.dumps({"first_ms": first, "times_ms": times, "copied_ms": copied, "max_abs_error": error}))


def torch_case(case, repeat):
    """Runs in a process of its own, on the CPU."""
    import numpy as np
    import torch

    torch.set_num_threads(os.cpu_count())
    kind = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[case.dtype]
    made = [torch.from_numpy(t).to(kind) for t in case.tensors(np.float32)]
    q, k, v = (t.transpose(1, 2) for t in made)
    rows = torch.arange(case.queries)[:, None] + case.keys - case.queries
    mask = torch.arange(case.keys)[None] <= rows if case.mask == "causal" and not case.square else None
    attend = torch.nn.functional.scaled_dot_product_attention

    def call():
        with torch.inference_mode():
            return attend(q, k, v, attn_mask=mask, is_causal=case.mask == "causal" and case.square,
                          enable_gqa=case.heads != case.kv_heads)

    first, times = time_calls(call, repeat)
    error = case.error([t.float().numpy() for t in made], call().transpose(1, 2).float().numpy())
    print(json.dumps({"first_ms": first, "times_ms": times, "max_abs_error": error}))


class Missing(Exception):
    pass


class Programs:
    """How each of the programs is started, and what it says."""

    def __init__(self, options):
        self.options = options
        self.mesa = options.mesa and pathlib.Path(options.mesa).resolve()
        self.over = [str(self.mesa / "run")] if self.mesa else []
        self.trial = False
        self.driver = None

    def run(self, command, env=None, cwd=ROOT):
        urgent = self.options.realtime and not self.trial
        command = [*(["chrt", "-r", "1"] if urgent else []), *map(str, command)]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(env or {})}, cwd=cwd,
                              timeout=1800)
        if done.returncode != 0:
            last = (done.stderr.strip() or "no message").splitlines()[-1]
            raise Missing(f"ended with {done.returncode}: {last[:160]}")
        return done.stdout

    def kyklos(self, case, repeat):
        if not pathlib.Path(self.options.kyklos).exists():
            sys.exit(f"{self.options.kyklos} is missing: cargo build --release")
        shape = f"{case.batch},{case.keys},{case.heads},{case.kv_heads},{case.dim}"
        few = [] if case.square else ["--queries", case.queries]
        (line,) = json.loads(self.run([*self.over, self.options.kyklos, "bench", "--device", "wgpu:0", "--shape", shape,
                                       "--mask", case.mask, "--dtype", case.dtype, "--repeat", repeat, *few, "--json"]))
        self.driver = line["driver"]
        return line

    def burn(self, case, repeat):
        program = pathlib.Path(self.options.burn).resolve()
        if not program.exists():
            raise Missing("not built")
        if case.dtype == "bf16" or (case.mask == "causal" and not case.square):
            raise Missing("no bf16 on wgpu" if case.dtype == "bf16" else "causal only where queries are the keys")
        tokens = case.keys if case.square else f"{case.queries}:{case.keys}"
        text = f"{case.batch},{tokens},{case.heads},{case.dim},{case.mask},{case.dtype}"
        return json.loads(self.run([*self.over, program, text, repeat]).splitlines()[-1])

    def ort(self, case, repeat):
        python = pathlib.Path(self.options.ort)
        if not python.exists():
            raise Missing("not installed")
        if case.dtype == "bf16":
            raise Missing("no bf16")
        env = self.without_subgroups()
        base = python.resolve()
        site = next(python.absolute().parents[1].glob("lib/python3*/site-packages"))
        env |= {"PYTHONHOME": str(base.parents[1]), "PYTHONPATH": str(site)}
        out = self.run([*self.over, base, __file__, "--ort-case", case.text, "--repeat", repeat], env)
        return json.loads(out.splitlines()[-1])

    def torch(self, case, repeat):
        python = pathlib.Path(self.options.torch).absolute()
        if not python.exists():
            raise Missing("not installed")
        return json.loads(self.run([python, __file__, "--torch-case", case.text, "--repeat", repeat]).splitlines()[-1])

    def without_subgroups(self):
        library, driver = ROOT / "target/without_subgroups.so", ROOT / "target/without_subgroups.json"
        if not library.exists():
            subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, ROOT / "tests/peers/without_subgroups.c",
                            "-ldl"], check=True)
        driver.write_text(json.dumps({"file_format_version": "1.0.1",
                                      "ICD": {"api_version": "1.3.0", "library_path": str(library)}}))
        wrapped = self.mesa / "tree/usr/lib/x86_64-linux-gnu/libvulkan_lvp.so" if self.mesa else "libvulkan_lvp.so"
        drivers = {name: str(driver) for name in ("KYKLOS_DRIVER", "VK_DRIVER_FILES", "VK_ICD_FILENAMES")}
        return {**drivers, "WRAPPED_DRIVER": str(wrapped)}


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--mesa", help="folder of newest_mesa.sh; without it, the system's driver")
    arguments.add_argument("--set", choices=SETS, default="prefill")
    arguments.add_argument("--case", action="append", help="B,S or Sq:S,HQ,HKV,D,mask,dtype, in place of a set")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--repeat", type=int, default=9, help="timed calls of each program in a round")
    arguments.add_argument("--peers", default=",".join(PEERS))
    arguments.add_argument("--kyklos", default=str(ROOT / "target/release/kyklos"))
    arguments.add_argument("--burn", default=str(ROOT / "tests/peers/burn/target/release/burn-attention"))
    arguments.add_argument("--ort", default=str(ROOT / "target/peers-webgpu/bin/python"), help="its Python")
    arguments.add_argument("--torch", default=str(ROOT / "target/peers/bin/python"), help="its Python")
    arguments.add_argument("--realtime", action="store_true", help="chrt for the timed programs, on a shared machine")
    arguments.add_argument("--note", default="", help="said at the top of the output")
    arguments.add_argument("--out", help="PATH.csv gets the raw rows, PATH.txt the table")
    arguments.add_argument("--ort-case", help=argparse.SUPPRESS)
    arguments.add_argument("--torch-case", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.ort_case:
        return ort_case(Case(options.ort_case), options.repeat)
    if options.torch_case:
        return torch_case(Case(options.torch_case), options.repeat)

    programs = Programs(options)
    cases = [Case(text) for text in options.case or SETS[options.set]]
    who = ["kyklos", *(peer for peer in options.peers.split(",") if peer)]
    missing, firsts, rows = {}, {}, []
    load = os.getloadavg()[0]

    def measure(name, case, repeat):
        """None where the program cannot do the case; that is decided, and said, the first time."""
        if (name, case.text) in missing:
            return None
        try:
            report = getattr(programs, name)(case, repeat)
        except Missing as why:
            if name == "kyklos" or (name, case.text) in firsts:
                sys.exit(f"{name} {case.text}: {why}")
            missing[name, case.text] = str(why)
            print(f"# {name} {case.text}: left out: {why}", flush=True)
            return None
        allowed = report.get("tolerance", ALLOWED[case.dtype])
        if not report["max_abs_error"] <= allowed:
            sys.exit(f"{name} is wrong in {case.text}: off by {report['max_abs_error']}, allowed {allowed}")
        times = report.get("times_ms")
        if times:
            report |= {"median_ms": statistics.median(times), "min_ms": min(times), "max_ms": max(times)}
        return report

    # Before the rounds: shaders get into the driver's cache, in no hurry. Burn keeps nothing between processes:
    # it compiles and tunes in each, before its timed calls.
    programs.trial = True
    for case in cases:
        for name in (name for name in who if name != "burn"):
            if report := measure(name, case, 1):
                firsts[name, case.text] = report["first_ms"]
                print(f"# {name} {case.text}: first call {report['first_ms']:.0f} ms", flush=True)
    programs.trial = False
    for number in range(options.rounds):
        for case in cases:
            for name in who[:: 1 if number % 2 == 0 else -1]:
                if report := measure(name, case, options.repeat):
                    firsts.setdefault((name, case.text), report["first_ms"])
                    copied = report.get("copied_ms")
                    rows.append({"round": number, "case": case.text, "who": name, "median_ms": report["median_ms"],
                                 "min_ms": report["min_ms"], "max_ms": report["max_ms"],
                                 "copied_median_ms": statistics.median(copied) if copied else "",
                                 "first_ever_ms": firsts[name, case.text], "max_abs_error": report["max_abs_error"]})
                    print(json.dumps(rows[-1]), flush=True)

    urgent = "; timed programs real-time" if options.realtime else ""
    head = [f"{programs.driver}; ms; {options.rounds} rounds of {options.repeat} calls, programs in turn; load average "
            f"{load:.1f} before, {os.getloadavg()[0]:.1f} after{urgent}"]
    head += [options.note] if options.note else []
    reasons = {}
    for (name, text), why in missing.items():
        reasons.setdefault((name, why), []).append(text)
    head += [f"{name} left out, {why}: {'; '.join(texts)}" for (name, why), texts in reasons.items()]
    lines = [f"{'case':28} {'who':7} {'median':>8} {'of medians':>17} {'min':>8} {'/kyklos':>8} {'per round':>13}"
             f" {'min/min':>8} {'first ever':>10} {'error':>8}"]
    for case in cases:
        mine = {name: [row for row in rows if row["case"] == case.text and row["who"] == name] for name in who}
        for name in (name for name in who if mine[name]):
            middle = lambda name: statistics.median(row["median_ms"] for row in mine[name])
            best = lambda name: min(row["min_ms"] for row in mine[name])
            medians = sorted(row["median_ms"] for row in mine[name])
            ratios = sorted(theirs["median_ms"] / ours["median_ms"] for theirs, ours in zip(mine[name], mine["kyklos"]))
            spread = f"{medians[0]:.2f} to {medians[-1]:.2f}"
            between = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
            lines.append(f"{case.text:28} {name:7} {middle(name):8.2f} {spread:>17} {best(name):8.2f}"
                         f" {statistics.median(ratios):8.2f} {between:>13} {best(name) / best('kyklos'):8.2f}"
                         f" {firsts[name, case.text]:10.0f} {max(row['max_abs_error'] for row in mine[name]):8.1e}")
    text = "\n".join(["# " + line for line in head] + lines)
    print(text)
    if options.out:
        path = ROOT / options.out
        path.with_suffix(".txt").write_text(text + "\n")
        with path.with_suffix(".csv").open("w", newline="") as out:
            out.writelines(f"# {line}\n" for line in head)
            writer = csv.DictWriter(out, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
