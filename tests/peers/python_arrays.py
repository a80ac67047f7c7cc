"""What masks, biases and strided keys add to a call from Python, beside PyTorch's F.scaled_dot_product_attention.

    python tests/peers/python_arrays.py            needs kyklos, numpy and torch (tests/peers/setup.sh)

Medians of rounds in which all cases take turns. "Import": a call that the ranks refuse by its keys once the array is in the form of the
kernels, so it computes nothing; GB/s of the array's own elements.
"""

import statistics
import sys
import time

import kyklos
import numpy as np
import torch

ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 5
S, H, D = 2048, 8, 64
random = np.random.default_rng(0)
group = kyklos.Group.local(1, device="cpu")[0]


def normal(*shape):
    return random.standard_normal(shape, dtype=np.float32)


def seconds(call):
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def medians(cases):
    times = {name: [] for name in cases}
    for _ in range(ROUNDS):
        for name, call in cases.items():
            times[name].append(seconds(call))
    return {name: (statistics.median(of), min(of), max(of)) for name, of in times.items()}


q, k, v = normal(1, S, H, D), normal(1, S, H, D), normal(1, S, H, D)
heads_first = [torch.from_numpy(x).transpose(1, 2) for x in (q, k, v)]
biases = {
    "no mask": None,
    "f32 bias for all heads": normal(1, S, 1, S),
    "bool mask for all heads": normal(1, S, 1, S) > -1,
    "f32 bias per head": normal(1, S, H, S),
    "bool mask per head": normal(1, S, H, S) > -1,
    "bool mask expanded over the heads": np.broadcast_to(normal(1, S, 1, S) > -1, (1, S, H, S)),
}
cases = {}
for name, bias in biases.items():
    # A view of a view cannot be written to, so PyTorch repeats the head itself.
    own = None if bias is None else torch.from_numpy(bias if bias.flags.writeable else bias[:, :, :1].copy())
    mask = None if own is None else own.expand(bias.shape).transpose(1, 2)
    cases[name] = lambda bias=bias: group.attend(q, k, v, bias=bias)
    cases[f"{name}, PyTorch"] = lambda mask=mask: torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=mask)
few, shared = normal(1, 16, 64, 64), normal(1, 8192, 1, 64)
repeated = np.broadcast_to(shared, (1, 8192, 64, 64))
exchanged = np.ascontiguousarray(normal(1, 8192, 64, 64).transpose(0, 1, 3, 2)).transpose(0, 1, 3, 2)
whole = normal(1, 8192, 64, 64)
cases["16 queries, keys [1, 8192, 64, 64], dense"] = lambda: group.attend(few, whole, whole)
cases["the same, repeated over the heads (stride 0)"] = lambda: group.attend(few, repeated, repeated)
cases["the same, last axis strided"] = lambda: group.attend(few, exchanged, exchanged)
print("S 2048, 8 heads of 64, f32, one rank on the CPU; ms: median (least to most)")
for name, (median, least, most) in medians(cases).items():
    print(f"{name:48s} {median * 1e3:8.1f} ({least * 1e3:.1f} to {most * 1e3:.1f})")


def refused(bias):
    keys = bias.shape[3] + 64
    none = np.zeros((1, keys, 1, 8), np.float32 if bias.dtype == bool else bias.dtype)
    queries = np.zeros((1, bias.shape[1], bias.shape[2], 8), none.dtype)

    def call():
        try:
            group.attend(queries, none, none, bias=bias)
        except kyklos.RequestError:
            return
        raise AssertionError("not refused")

    return call


def with_ways(name, array):
    wide = np.zeros((*array.shape[:3], 2 * array.shape[3]), array.dtype)
    wide[..., ::2] = array
    longer = np.zeros((*array.shape[:3], array.shape[3] + 64), array.dtype)
    longer[..., : array.shape[3]] = array
    return {
        f"{name} dense": array,
        f"{name} rows with a gap": longer[..., : array.shape[3]],
        f"{name} axes of heads first": np.ascontiguousarray(array.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3),
        f"{name} expanded over the heads": np.broadcast_to(array[:, :, :1], array.shape),
        f"{name} every second key": wide[..., ::2],
        f"{name} keys before queries": np.ascontiguousarray(array.transpose(0, 3, 2, 1)).transpose(0, 3, 2, 1),
    }


arrays = with_ways("f32", normal(1, 1024, 8, 2048))
arrays |= with_ways("f16, odd keys", normal(1, 1024, 8, 2047).astype(np.float16))
arrays |= with_ways("bool", normal(1, 1024, 8, 2048) > 0)
# What the machine's memory gives one thread: rows with a gap, copied by NumPy into an array that is there already.
source, there = arrays["f32 rows with a gap"], np.zeros((1, 1024, 8, 2048), np.float32)
copies = [seconds(lambda: np.copyto(there, source)) for _ in range(ROUNDS + 1)][1:]
print(f"NumPy copies the f32 rows with a gap into a kept array at {there.nbytes / statistics.median(copies) / 1e9:.1f} GB/s")
print("import of a bias [1, 1024, 8, 2048] (f16: 2047 keys); ms: median (least to most), GB/s at the median")
for name, (median, least, most) in medians({name: refused(array) for name, array in arrays.items()}).items():
    print(f"{name:48s} {median * 1e3:8.2f} ({least * 1e3:.2f} to {most * 1e3:.2f}) {arrays[name].nbytes / median / 1e9:8.1f} GB/s")
