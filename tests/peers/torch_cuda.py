"""PyTorch's scaled_dot_product_attention on CUDA, as a peer of `kyklos bench --against`:

    torch_cuda.py flash|cudnn|efficient CASE CALLS

CASE is BATCH,KEYS,HEADS,KV HEADS,DIM,MASK,DTYPE, with QUERIES:KEYS in the place of KEYS where they differ. Masks: full and
causal. Each call is timed by the host, until the device has done it, and by events of the device; the result is held to an f32
computation of its last rows.
"""

import json
import sys
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
ROWS = 64


def main():
    backend, case, calls = BACKENDS[sys.argv[1]], sys.argv[2], int(sys.argv[3])
    batch, tokens, heads, kv_heads, dim, mask, dtype = case.split(",")
    if ":" in tokens or mask not in ("full", "causal"):
        sys.exit(f"no {tokens} tokens under {mask}: only whole sequences, full or causal")
    batch, tokens, heads, kv_heads, dim = map(int, (batch, tokens, heads, kv_heads, dim))
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[dtype]
    torch.manual_seed(1)
    make = lambda heads: torch.randn(batch, heads, tokens, dim, device="cuda").to(dtype)
    q, k, v = make(heads), make(kv_heads), make(kv_heads)
    gqa = {"enable_gqa": True} if heads != kv_heads else {}
    attend = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=mask == "causal", **gqa)
    with sdpa_kernel(backend):
        times, device = [], []
        torch.cuda.synchronize()
        for _ in range(calls + 1):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            started = time.perf_counter()
            begin.record()
            o = attend()
            end.record()
            end.synchronize()
            times.append((time.perf_counter() - started) * 1e3)
            device.append(begin.elapsed_time(end))
    rows = min(ROWS, tokens)
    k, v = (x.float().repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
    logits = q[:, :, -rows:].float() @ k.transpose(-1, -2) / dim**0.5
    if mask == "causal":
        row = torch.arange(tokens - rows, tokens, device="cuda")[:, None]
        logits.masked_fill_(torch.arange(tokens, device="cuda")[None, :] > row, float("-inf"))
    error = (logits.softmax(-1) @ v - o[:, :, -rows:].float()).abs().max().item()
    print(json.dumps({"first_ms": times[0], "times_ms": times[1:], "device_ms": device[1:], "max_abs_error": error}))


main()
