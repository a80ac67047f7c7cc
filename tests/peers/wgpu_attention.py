"""Kyklos on wgpu against ONNX Runtime's WebGPU execution provider, on the same adapter, in one sitting.

    python3 -m venv target/peers-webgpu
    target/peers-webgpu/bin/pip install onnxruntime-webgpu onnx numpy
    tests/peers/newest_mesa.sh                       a driver that ONNX Runtime accepts (Debian 12's own it refuses)
    apt-get install gcc libvulkan-dev                to hide subgroups from it, with which its attention is wrong
    target/peers-webgpu/bin/python tests/peers/wgpu_attention.py [--rounds 3] [--out docs/results/FOLDER/NAME.csv]

Both run B 1, H 8 on software Vulkan. ONNX Runtime's time has the copies of q, k, v and o in it (its inputs and outputs
are numpy arrays); Kyklos' has data resident. Times count only where the result agrees with f64 on sampled rows.
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
HEADS = 8
CASES = [(1024, 64, "full", "f32"), (1024, 64, "causal", "f32"), (1024, 64, "full", "f16"), (1024, 64, "causal", "f16"),
         (1024, 128, "full", "f32"), (1024, 128, "causal", "f32")]


def ort_case(seq, dim, mask, dtype, repeat):
    """Runs in a process of its own, over the driver: prints times in ms and the largest error."""
    import numpy as np
    import onnx
    import onnxruntime as ort
    from onnx import TensorProto, helper

    kind, numpy_type = {"f32": (TensorProto.FLOAT, np.float32), "f16": (TensorProto.FLOAT16, np.float16)}[dtype]
    width = HEADS * dim
    tensor = lambda name: helper.make_tensor_value_info(name, kind, [1, seq, width])
    node = helper.make_node("MultiHeadAttention", ["q", "k", "v"], ["o"], domain="com.microsoft", num_heads=HEADS,
                            unidirectional=int(mask == "causal"))
    graph = helper.make_graph([node], "attention", [tensor("q"), tensor("k"), tensor("v")], [tensor("o")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)],
                              ir_version=9)
    options = ort.SessionOptions()
    # An operator that it would move to the CPU is an error instead.
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["WebGpuExecutionProvider"])
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((1, seq, width)).astype(numpy_type) for _ in range(3))
    times = []
    for _ in range(repeat + 1):
        start = time.perf_counter()
        (o,) = session.run(["o"], {"q": q, "k": k, "v": v})
        times.append(1e3 * (time.perf_counter() - start))

    worst = 0.0
    heads = [t.astype(np.float64).reshape(seq, HEADS, dim) for t in (q, k, v)]
    for row in range(0, seq, 37):
        seen = row + 1 if mask == "causal" else seq
        for head in range(HEADS):
            logits = heads[1][:seen, head] @ heads[0][row, head] / np.sqrt(dim)
            weights = np.exp(logits - logits.max())
            exact = weights @ heads[2][:seen, head] / weights.sum()
            worst = max(worst, np.abs(o.reshape(seq, HEADS, dim)[row, head].astype(np.float64) - exact).max())
    print(json.dumps({"first_ms": times[0], "times_ms": times[1:], "max_abs_error": worst}))


def run(command, env):
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env}, timeout=600)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def hide_subgroups(mesa):
    library = ROOT / "target/without_subgroups.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, ROOT / "tests/peers/without_subgroups.c", "-ldl"],
                   check=True)
    driver = ROOT / "target/without_subgroups.json"
    driver.write_text(json.dumps({"file_format_version": "1.0.1",
                                  "ICD": {"api_version": "1.3.0", "library_path": str(library)}}))
    return {"KYKLOS_DRIVER": str(driver),
            "WRAPPED_DRIVER": str(mesa / "tree/usr/lib/x86_64-linux-gnu/libvulkan_lvp.so")}


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--mesa", default=str(ROOT / "target/newest-mesa"), help="folder of newest_mesa.sh")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--repeat", type=int, default=7)
    arguments.add_argument("--out")
    arguments.add_argument("--ort-case", nargs=4, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.ort_case:
        seq, dim, mask, dtype = options.ort_case
        return ort_case(int(seq), int(dim), mask, dtype, options.repeat)

    subprocess.run(["cargo", "build", "--release", "-p", "kyklos-cli"], cwd=ROOT, check=True)
    mesa = pathlib.Path(options.mesa).resolve()
    hidden = hide_subgroups(mesa)
    python = pathlib.Path(sys.executable).resolve()
    site = next(path for path in sys.path if path.endswith("site-packages"))
    inside = {**hidden, "PYTHONHOME": str(python.parents[1]), "PYTHONPATH": site}
    rows = []
    for round_number in range(options.rounds):
        for seq, dim, mask, dtype in CASES:
            ours = json.loads(run([mesa / "run", ROOT / "target/release/kyklos", "bench", "--device", "wgpu:0", "--shape",
                                   f"1,{seq},{HEADS},{HEADS},{dim}", "--mask", mask, "--dtype", dtype, "--repeat",
                                   str(options.repeat), "--json"], {}))[0]
            theirs = json.loads(run([mesa / "run", python, __file__, "--repeat", str(options.repeat), "--ort-case",
                                     str(seq), str(dim), mask, dtype], inside).splitlines()[-1])
            if theirs["max_abs_error"] > (1e-5 if dtype == "f32" else 5e-3):
                sys.exit(f"ONNX Runtime is off by {theirs['max_abs_error']} in {seq} {dim} {mask} {dtype}")
            theirs_ms = statistics.median(theirs["times_ms"])
            rows.append({"round": round_number, "seq": seq, "dim": dim, "mask": mask, "dtype": dtype,
                         "driver": ours["driver"], "kyklos_kernel": ours["kernel"],
                         "kyklos_first_ms": ours["first_ms"], "kyklos_ms": ours["median_ms"],
                         "ort_first_ms": theirs["first_ms"], "ort_ms": theirs_ms,
                         "kyklos_error": ours["max_abs_error"], "ort_error": theirs["max_abs_error"],
                         "ratio": theirs_ms / ours["median_ms"]})
            print(json.dumps(rows[-1]), flush=True)
    print(f"B 1, H {HEADS}, {rows[0]['driver']}; ms, medians of {options.rounds} rounds; ONNX Runtime with copies")
    for case in CASES:
        mine = [row for row in rows if (row["seq"], row["dim"], row["mask"], row["dtype"]) == case]
        ratios = sorted(row["ratio"] for row in mine)
        ours, theirs = (statistics.median(row[name] for row in mine) for name in ("kyklos_ms", "ort_ms"))
        print(f"S {case[0]} D {case[1]} {case[2]:6} {case[3]}: Kyklos {ours:7.1f}, ONNX Runtime {theirs:7.1f}, "
              f"ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    if options.out:
        with open(ROOT / options.out, "w", newline="") as out:
            writer = csv.DictWriter(out, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
