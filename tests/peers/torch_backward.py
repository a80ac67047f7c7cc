"""The backward pass of PyTorch's scaled_dot_product_attention, as a peer of `kyklos bench --backward --against`:

    torch_backward.py cpu|cuda CASE CALLS

CASE is BATCH,KEYS,HEADS,KV HEADS,DIM,MASK,DTYPE,backward. Masks: full and causal. Each time is of `torch.autograd.grad` alone, after a
forward pass of its own. The error is that of dK of one head against the definition in f64.
"""

import json
import sys
import time

import torch


def main():
    device, case, calls = sys.argv[1], sys.argv[2], int(sys.argv[3])
    *shape, mask, dtype, direction = case.split(",")
    if ":" in shape[1] or mask not in ("full", "causal") or direction != "backward":
        sys.exit(f"no {case}: only the backward pass of whole sequences, full or causal")
    batch, tokens, heads, kv_heads, dim = map(int, shape)
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[dtype]
    torch.manual_seed(1)

    def make(heads):
        return torch.randn(batch, heads, tokens, dim, device=device).to(dtype).requires_grad_()

    q, k, v = make(heads), make(kv_heads), make(kv_heads)
    gradient = torch.randn(batch, heads, tokens, dim, device=device).to(dtype)
    gqa = {"enable_gqa": True} if heads != kv_heads else {}
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times = []
    for _ in range(calls + 1):
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=mask == "causal", **gqa)
        wait()
        began = time.perf_counter()
        dq, dk, dv = torch.autograd.grad(o, (q, k, v), gradient)
        wait()
        times.append((time.perf_counter() - began) * 1e3)

    # One KV head in f64, from the formulas.
    group = heads // kv_heads
    part = lambda x, heads: x[:1, :heads].detach().double()
    q, k, v, gradient = part(q, group), part(k, 1), part(v, 1), part(gradient, group)
    logits = q @ k.transpose(-1, -2) / dim**0.5
    if mask == "causal":
        row = torch.arange(tokens, device=device)
        logits.masked_fill_(row[None, :] > row[:, None], float("-inf"))
    p = logits.softmax(-1)
    dp = gradient @ v.transpose(-1, -2)
    ds = p * (dp - (gradient * (p @ v)).sum(-1, keepdim=True)) / dim**0.5
    right = (ds.transpose(-1, -2) @ q).sum(1)
    error = (right - dk[0, 0].double()).abs().max().item()
    print(json.dumps({"first_ms": times[0], "times_ms": times[1:], "max_abs_error": error}))


main()
