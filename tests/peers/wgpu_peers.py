"""The peers of `kyklos bench --against`: Burn and ONNX Runtime's WebGPU provider on wgpu, PyTorch's CPU for scale.

    wgpu_peers.py burn|ort|torch CASE CALLS        prints times in ms and the largest error, as one line of JSON

Every peer is optional. Set-up, from the repository's root:

    cargo build --release --manifest-path tests/peers/burn/Cargo.toml       Burn; about twenty minutes of a core
    python3 -m venv target/peers-webgpu
    target/peers-webgpu/bin/pip install onnxruntime-webgpu onnx numpy       ONNX Runtime
    apt-get install gcc libvulkan-dev         to hide subgroups from it: with them its attention is wrong on lavapipe
    tests/peers/setup.sh                                                    PyTorch
    tests/peers/newest_mesa.sh              a newer driver: ONNX Runtime refuses Debian 12's own

    target/newest-mesa/run target/release/kyklos bench --device wgpu:0 --shape 1,1024,8,8,64 --dtype f32 \\
        --against "burn=python3 tests/peers/wgpu_peers.py burn" \\
        --against "ort=target/peers-webgpu/bin/python tests/peers/wgpu_peers.py ort" \\
        --against "torch=target/peers/bin/python tests/peers/wgpu_peers.py torch"

Data is resident for all; only ONNX Runtime's time has a copy in it, of the result to the CPU, the one way to wait for
it from Python. Each checks sampled rows of its result against the definition in f64. Burn tunes itself in each process,
before its timed calls (20 to 40 s); decoding (`--queries`, 8 heads over 2) it does not know, so K and V are given to it
once a head. ONNX Runtime decodes with its cache in place.
"""

import json
import os
import pathlib
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]


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
    print(json.dumps({"first_ms": first, "times_ms": times, "max_abs_error": error}))


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


def burn_case(case, repeat):
    """Becomes Burn's own program."""
    program = ROOT / "tests/peers/burn/target/release/burn-attention"
    if not program.exists():
        sys.exit("not built")
    if case.dtype == "bf16" or (case.mask == "causal" and not case.square):
        sys.exit("no bf16 on wgpu" if case.dtype == "bf16" else "causal only where queries are the keys")
    tokens = case.keys if case.square else f"{case.queries}:{case.keys}"
    text = f"{case.batch},{tokens},{case.heads},{case.dim},{case.mask},{case.dtype}"
    become([program, text, repeat])


def become(command):
    """What newest_mesa.sh unpacked brings its own C library, for which programs are started with its loader."""
    over = os.environ.get("KYKLOS_RUNNER")
    command = [str(word) for word in [*([over] if over else []), *command]]
    os.execv(command[0], command)


def without_subgroups():
    """Starts this program again over a driver that hides subgroups from it."""
    library, driver = ROOT / "target/without_subgroups.so", ROOT / "target/without_subgroups.json"
    if not library.exists():
        source = ROOT / "tests/peers/without_subgroups.c"
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    driver.write_text(json.dumps({"file_format_version": "1.0.1",
                                  "ICD": {"api_version": "1.3.0", "library_path": str(library)}}))
    named = os.environ.get("VK_DRIVER_FILES")
    wrapped = json.loads(pathlib.Path(named).read_text())["ICD"]["library_path"] if named else "libvulkan_lvp.so"
    interpreter = pathlib.Path(sys.executable)
    base = interpreter.resolve()
    site = next(interpreter.absolute().parents[1].glob("lib/python3*/site-packages"))
    os.environ |= {"WRAPPED_DRIVER": wrapped, "KYKLOS_DRIVER": str(driver), "PYTHONHOME": str(base.parents[1]),
                   "PYTHONPATH": str(site)}
    if not named:
        os.environ |= {name: str(driver) for name in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES")}
    become([base, *sys.argv])


def main():
    who, text, repeat = sys.argv[1:]
    case = Case(text)
    if case.mask not in ("full", "causal"):
        sys.exit("full and causal only")
    if who == "ort":
        if case.dtype == "bf16":
            sys.exit("no bf16")
        if "WRAPPED_DRIVER" not in os.environ:
            without_subgroups()
    {"burn": burn_case, "ort": ort_case, "torch": torch_case}[who](case, int(repeat))


if __name__ == "__main__":
    main()
