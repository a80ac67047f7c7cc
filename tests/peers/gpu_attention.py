"""PyTorch's scaled_dot_product_attention on an NVIDIA GPU by cuDNN and FlashAttention 2, and FlashAttention 3, all in one process:

    gpu_attention.py first|rest|BATCH,TOKENS,HEADS,KV HEADS,DIM,MASK,DTYPE[,backward] …

FlashAttention 3 is the package fa3-fwd, where Python finds it: bf16, forward only. Times are by events of the device, after calls that
are not timed, since an idle GPU has a low clock; each result is held to an f32 computation of its last rows. The first line is the
speed of a large product, which is what this GPU can reach. `kyklos bench --device cuda:0` times the same cases.
"""

import statistics
import sys
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

# As in tests/gpu/rounds.sh.
MAIN = ["1,16384,16,16,128,full,bf16", "1,16384,16,16,128,causal,bf16"]
CASES = {
    "first": [
        *MAIN,
        *(f"1,16384,{heads},{heads},{dim},{mask},bf16" for heads, dim in ((32, 64), (8, 256)) for mask in ("full", "causal")),
        "8,2048,16,16,128,causal,bf16",
        "1,8192,32,8,128,causal,bf16",
        "1,16384,16,16,128,full,f16",
        "1,131072,4,4,128,causal,bf16",
        "1,8192,16,16,128,full,bf16,backward",
        "1,8192,16,16,128,causal,bf16,backward",
    ],
    "rest": [
        *(f"1,{tokens},16,16,128,causal,bf16" for tokens in (2048, 4096, 32768)),
        *(f"1,{shape},{mask},bf16" for shape in ("2048,32,32,64", "8192,16,16,96", "8192,16,16,192") for mask in ("full", "causal")),
        "1,8192,32,8,128,full,bf16",
        "1,16384,32,32,64,causal,f16",
        "1,8192,16,16,128,causal,f16,backward",
        "1,8192,32,32,64,causal,bf16,backward",
        "1,8192,32,8,128,causal,bf16,backward",
        "1,4096,8,8,256,causal,bf16,backward",
    ],
}
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
WARM_S, TIMED_S, ROWS = 0.2, 0.3, 64


def timed(call):
    """Median and shortest time in ms by the clock of the device."""
    torch.cuda.synchronize()
    start, calls = time.perf_counter(), 0
    while time.perf_counter() - start < WARM_S:
        call()
        torch.cuda.synchronize()
        calls += 1
    count = max(5, int(calls * TIMED_S / WARM_S))
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for begin, end in events:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    times = [begin.elapsed_time(end) for begin, end in events]
    return statistics.median(times), min(times)


def error_of(o, q, k, v, causal):
    """Largest error of the last rows. All tensors are [batch, heads, tokens, dim]."""
    tokens, group = q.shape[2], q.shape[1] // k.shape[1]
    rows = min(ROWS, tokens)
    worst = 0.0
    for head in range(0, q.shape[1], max(1, q.shape[1] // 4)):
        keys, values = (x[:, head // group].float() for x in (k, v))
        logits = q[:, head, -rows:].float() @ keys.transpose(-1, -2) / q.shape[-1] ** 0.5
        if causal:
            row = torch.arange(tokens - rows, tokens, device=q.device)[:, None]
            logits.masked_fill_(torch.arange(tokens, device=q.device)[None, :] > row, float("-inf"))
        worst = max(worst, (logits.softmax(-1) @ values - o[:, head, -rows:].float()).abs().max().item())
    return worst


def report(*cells):
    # Two spaces or more between cells, as in the tables of `kyklos bench`.
    widths = (9, 23, 6, 5, 8, 9, 9, 7, 7)
    print("  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths)).rstrip(), flush=True)


def measure(name, case, call, products, error):
    batch, tokens, heads, _, dim = map(int, case[:5])
    median, least = timed(call)
    pairs = batch * heads * (tokens * (tokens + 1) / 2 if case[5] == "causal" else tokens * tokens)
    speed = 4 * pairs * dim * products / median / 1e9
    way = "backward" if products > 1 else "forward"
    report(name, ",".join(case[:5]), case[5], case[6], way, f"{median:.3f}", f"{least:.3f}", f"{speed:.1f}", error)


def tried(name, case, run):
    try:
        run()
    except Exception as why:
        report(name, ",".join(case[:5]), case[5], case[6], "not run:", (str(why).strip() or repr(why)).splitlines()[-1][:120])


def flash_attention_3():
    try:
        from fa3_fwd_interface import flash_attn_func
    except Exception as why:
        print(f"no FlashAttention 3: {str(why).splitlines()[0] if str(why) else repr(why)}", flush=True)
        return None
    return flash_attn_func


def one_case(case, fa3):
    batch, tokens, heads, kv_heads, dim = map(int, case[:5])
    causal, dtype, backward = case[5] == "causal", DTYPES[case[6]], case[7:] == ["backward"]
    make = lambda heads: torch.randn(batch, heads, tokens, dim, device="cuda").to(dtype)
    q, k, v = make(heads), make(kv_heads), make(kv_heads)
    gqa = {"enable_gqa": True} if heads != kv_heads else {}

    def by_pytorch():
        return scaled_dot_product_attention(q, k, v, is_causal=causal, **gqa)

    def forward(call, transposed):
        o = call()
        return f"{error_of(o.transpose(1, 2) if transposed else o, q, k, v, causal):.1e}"

    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("fa2", SDPBackend.FLASH_ATTENTION)):
        with sdpa_kernel(backend):
            if not backward:
                tried(name, case, lambda: measure(name, case, by_pytorch, 1, forward(by_pytorch, False)))
                continue

            def both():
                inputs = [x.detach().requires_grad_() for x in (q, k, v)]
                o = scaled_dot_product_attention(*inputs, is_causal=causal, **gqa)
                gradient = torch.randn_like(o)
                # Five products, as the columns of others count.
                measure(name, case, lambda: torch.autograd.grad(o, inputs, gradient, retain_graph=True), 2.5, "not held")

            tried(name, case, both)
    if fa3 and not backward and dtype != torch.float32:
        inputs = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
        call = lambda: fa3(*inputs, causal=causal)
        first = lambda: out[0] if isinstance(out := call(), tuple) else out
        tried("fa3", case, lambda: measure("fa3", case, call, 1, forward(first, True)))


def main():
    cases = CASES.get(sys.argv[1]) or sys.argv[1:]
    torch.manual_seed(1)
    print(f"PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, {torch.cuda.get_device_name()}", flush=True)
    a, b = (torch.randn(8192, 8192, device="cuda").to(torch.bfloat16) for _ in range(2))
    print(f"product of 8192 x 8192 in bf16: {2 * 8192**3 / timed(lambda: a @ b)[0] / 1e9:.0f} TFLOP/s", flush=True)
    fa3 = flash_attention_3()
    report("program", "shape", "mask", "dtype", "pass", "median ms", "min ms", "TFLOP/s", "error")
    for case in cases:
        one_case(case.split(","), fa3)


main()
