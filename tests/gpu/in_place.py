"""Tensors of PyTorch in Kyklos, where they are: in_place.py [cuda|cpu|torch:cuda|torch:cpu]

`kyklos.torch.attention` and its gradients against PyTorch's own, on one rank and on two ranks of one device, and `Group.attend` by
DLPack on a stream that is not the default one. With `cpu` the same calls on the CPU, which says that this script is right. With
`torch:` the kernels are PyTorch's.
"""

import sys
import time

import torch
from torch.nn.functional import scaled_dot_product_attention

import kyklos
import kyklos.torch

GIVEN = sys.argv[1] if len(sys.argv) > 1 else "cuda"
PLACE = GIVEN.removeprefix("torch:")
DEVICE = "cuda:0" if PLACE == "cuda" else "cpu"
#: The device of the ranks.
OF_RANKS = f"torch:{DEVICE}" if GIVEN.startswith("torch:") else DEVICE
TOKENS, HEADS, KV_HEADS, DIM = (2048, 8, 2, 128) if PLACE == "cuda" else (128, 4, 2, 32)
# Largest error over the largest element, in bf16 and in f32.
ALLOWED = {torch.bfloat16: 0.03, torch.float32: 1e-3}
wrong = []


def judge(what, found, wanted):
    error = ((found.float() - wanted.float()).abs().max() / wanted.float().abs().max()).item()
    right = error <= ALLOWED[found.dtype] and found.device == wanted.device
    wrong.extend([] if right else [what])
    print(f"{what}: {'right' if right else 'WRONG'}, error {error:.1e}, on {found.device}", flush=True)


def made(heads, dtype, seed):
    random = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(1, heads, TOKENS, DIM, generator=random, device=DEVICE, dtype=torch.float32).to(dtype)


def theirs(q, k, v, gradient):
    """PyTorch's output and gradients, from a computation of the same elements in f64."""
    inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
    o = scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
    return [o.detach(), *torch.autograd.grad(o, inputs, gradient.double())]


def ours(group, q, k, v, gradient):
    """Of the tokens of this rank."""
    half = TOKENS // group.size
    own = slice(group.rank * half, (group.rank + 1) * half)
    inputs = [x[:, :, own].detach().requires_grad_() for x in (q, k, v)]
    o, _ = kyklos.torch.attention(*inputs, group, mask="causal")
    return [o.detach(), *torch.autograd.grad(o, inputs, gradient[:, :, own])]


def main():
    for dtype in (torch.bfloat16, torch.float32):
        q, k, v, gradient = (made(heads, dtype, seed) for seed, heads in enumerate((HEADS, KV_HEADS, KV_HEADS, HEADS)))
        wanted = theirs(q, k, v, gradient)
        for ranks in (1, 2):
            parts = kyklos.run_local(ranks, lambda group: ours(group, q, k, v, gradient), device=OF_RANKS)
            for name, found, right in zip(("o", "dq", "dk", "dv"), zip(*parts), wanted):
                judge(f"{name} of {ranks} ranks, {dtype}", torch.cat(found, dim=2), right)
    [group] = kyklos.Group.local(1, device=OF_RANKS)
    with group:
        print(f"the rank computes on {group.device}, reads the memory of {group.torch_device or group.gpu}", flush=True)
        q, k, v = (made(heads, torch.bfloat16, seed).transpose(1, 2).contiguous() for seed, heads in enumerate((HEADS, KV_HEADS, KV_HEADS)))
        right = scaled_dot_product_attention(*(x.transpose(1, 2).double() for x in (q, k, v)), is_causal=True, enable_gqa=True)
        if PLACE == "cuda":
            # The tensors are not ready when the call is made.
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda._sleep(100_000_000)
                later = [x.clone() for x in (q, k, v)]
                o = torch.from_dlpack(group.attend(*later, layout="bshd", mask="causal")[0]).clone()
            torch.cuda.synchronize()
            judge("behind a slow stream", o, right.transpose(1, 2))
        for calls in (3, 20):
            began = time.perf_counter()
            for _ in range(calls):
                group.attend(q, k, v, layout="bshd", mask="causal")
            if PLACE == "cuda":
                torch.cuda.synchronize()
            ms = (time.perf_counter() - began) * 1e3 / calls
        print(f"{ms:.3f} ms a call of Group.attend, {TOKENS} tokens", flush=True)
    if wrong:
        sys.exit(f"wrong: {wrong}")


main()
