"""Whole models on two ranks: Kyklos against its peers, in one sitting, between processes on loopback with one compute thread each.

A decoder of transformers: a pass over a prompt, against PyTorch's ring over gloo (the private template behind its
`context_parallel`, balanced by zigzag) and against one process with as many threads as there are ranks; and the steps after it,
with one vote for all layers, with a vote for each layer, and in one process. A transformer of diffusers: against its own even
Ulysses over gloo, and against one process. Weights are random. Rounds alternate, so that a noisy minute hits all. With --memory
instead: the peak memory of a rank by the length of the prompt.

    scripts/test-python.sh --co                                once: the packages, and Kyklos
    target/python/bin/python tests/peers/models.py [--rounds 7] > FILE.csv
    target/python/bin/python tests/peers/models.py --memory     > FILE.csv
"""

import argparse
import logging
import os
import statistics
import tempfile
import time
import warnings

PROMPT, STEPS = 2048, 24
HIDDEN, LAYERS, HEADS = 512, 8, 8
VIDEO = (9, 32, 32)


def decoder(hidden=HIDDEN, layers=LAYERS):
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=2048, hidden_size=hidden, intermediate_size=11 * hidden // 4, num_hidden_layers=layers,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, max_position_embeddings=65536, initializer_range=0.1)
    return transformers.LlamaForCausalLM(config).eval()


def denoiser():
    import torch
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    return WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=HEADS, attention_head_dim=HIDDEN // HEADS, in_channels=16, out_channels=16,
        text_dim=64, freq_dim=64, ffn_dim=2048, num_layers=6, cross_attn_norm=True, qk_norm="rms_norm_across_heads").eval()


def joined(rank, ranks, folder):
    """Prepares the process of a rank; PyTorch has a group over gloo then."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["RAYON_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.cuda.is_current_stream_capturing = lambda: False
    # diffusers divides by the number of accelerators.
    torch.accelerator.device_count = lambda: 1
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    # A name of a device: without it diffusers asks for CUDA.
    dist.init_process_group("cpu:gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)


def ring_decoder(rank, ranks):
    """The body of the decoder with PyTorch's ring as its attention, and this rank's tokens, which are balanced."""
    import torch
    import torch.distributed as dist
    import torch.distributed.tensor.experimental._context_parallel._attention as ring
    from transformers import AttentionInterface

    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    ring._cp_options.enable_load_balance = True
    ring.set_rotate_method("alltoall")

    def attend(q, k, v, is_causal=False, **_):
        return kernel(q, k, v, 0.0, is_causal)

    def attention(module, q, k, v, mask, **_):
        q, k, v = (state.contiguous() for state in (q, k, v))
        return ring._templated_ring_attention(dist.group.WORLD, 2, attend, q, k, v, is_causal=True)[0].transpose(1, 2), None

    AttentionInterface.register("torch-ring", attention)
    model = decoder()
    model.set_attn_implementation("torch-ring")
    parts = torch.arange(PROMPT).chunk(2 * ranks)
    return model.model, torch.cat([parts[rank], parts[2 * ranks - 1 - rank]])


def speed(rank, ranks, folder, rounds):
    joined(rank, ranks, folder)
    import torch
    import torch.distributed as dist
    from diffusers import ContextParallelConfig

    import kyklos.diffusers
    import kyklos.transformers

    def timed(run):
        """Milliseconds between two meetings of the ranks, and the value."""
        dist.barrier()
        start = time.perf_counter()
        value = run()
        dist.barrier()
        return 1e3 * (time.perf_counter() - start), value

    def alone(run):
        """`run` on rank 0, with the cores of all ranks."""
        def on_rank_0():
            if rank > 0:
                return None
            torch.set_num_threads(ranks)
            try:
                return run()
            finally:
                torch.set_num_threads(1)

        return timed(on_rank_0)

    def steps(model, ids, count, cache=None):
        """Median times of a step after the prompt: in one process, or with one vote and with a vote for each layer, in turns."""
        cache = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
        for token in range(2):
            model(ids[:, token : token + 1], past_key_values=cache, use_cache=True)
        record, times = getattr(cache, "last_step", None), ([], [])
        for token in range(-4, count):
            together = token % 2
            if record:
                cache.last_step = record if together else None
            start = time.perf_counter()
            model(ids[:, token % 64][:, None], past_key_values=cache, use_cache=True)
            if token >= 0:
                times[together].append(1e3 * (time.perf_counter() - start))
        return [statistics.median(of_kind) for of_kind in times]

    ids = torch.randint(0, 2048, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    video = torch.randn(1, 16, *VIDEO, generator=torch.Generator().manual_seed(2))
    text = torch.randn(1, 32, 64, generator=torch.Generator().manual_seed(3))
    inputs = {"hidden_states": video, "encoder_hidden_states": text, "timestep": torch.tensor([500]), "return_dict": False}
    with kyklos.Group.from_torch(device="cpu", deadline_s=120) as group:
        split, whole = decoder(), decoder()
        small, small_whole = decoder(hidden=128, layers=12), decoder(hidden=128, layers=12)
        small_handle = kyklos.transformers.parallelize(small, group, check=False)
        handle = kyklos.transformers.parallelize(split, group, gather="none", check=False)
        body, own = ring_decoder(rank, ranks)
        wan, theirs, one = denoiser(), denoiser(), denoiser()
        kyklos.diffusers.parallelize(wan, group)
        theirs.enable_parallelism(config=ContextParallelConfig(ulysses_degree=ranks))

        first, end = handle.rows(PROMPT)
        expected = whole.model(ids, use_cache=False)[0]
        runs = {
            "prompt,kyklos": lambda: timed(lambda: split.model(ids, use_cache=False)[0]),
            "prompt,torch-ring-gloo": lambda: timed(lambda: body(ids[:, own], position_ids=own[None], use_cache=False)[0]),
            "prompt,one-process": lambda: alone(lambda: whole.model(ids, use_cache=False)[0]),
            "denoise,kyklos": lambda: timed(lambda: wan(**inputs)[0]),
            "denoise,diffusers-ulysses-gloo": lambda: timed(lambda: theirs(**inputs)[0]),
            "denoise,one-process": lambda: alone(lambda: one(**inputs)[0]),
        }
        rows = {"prompt,kyklos": expected[:, first:end], "prompt,torch-ring-gloo": expected[:, own]}
        picture = one(**inputs)[0]
        for number in range(-1, rounds):
            # The first round warms up, and compares the outputs.
            for name, run in runs.items():
                took, value = run()
                if number < 0 and value is not None:
                    want = picture if name.startswith("denoise") else rows.get(name, expected)
                    error = float((value - want).abs().max() / want.abs().max())
                    if error > 1e-4:
                        raise SystemExit(f"{name} on rank {rank} is wrong by {error}")
                elif number >= 0 and rank == 0:
                    print(f"{number},{name},{took:.2f}", flush=True)
            for name, model, plain, made, prompt, count in (
                ("step", split, whole, handle, ids, STEPS),
                ("step-small", small, small_whole, small_handle, ids[:, :256], 8 * STEPS),
            ):
                apart, together = timed(lambda: steps(model, prompt, count, made.cache()))[1]
                alone_ms = alone(lambda: sum(steps(plain, prompt, count)) / 2)[1]
                if number >= 0 and rank == 0:
                    print(f"{number},{name},kyklos,{together:.3f}\n{number},{name},kyklos-vote-for-each-layer,{apart:.3f}\n"
                          f"{number},{name},one-process,{alone_ms:.3f}", flush=True)
    dist.destroy_process_group()


def memory(rank, ranks, folder, lengths):
    joined(rank, ranks, folder)
    import torch
    import torch.distributed as dist

    import kyklos.transformers

    def mebibytes(what):
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) / 1024 for line in status if line.startswith(what))

    model = decoder()
    with kyklos.Group.from_torch(device="cpu", deadline_s=120) as group:
        if ranks > 1:
            kyklos.transformers.parallelize(model, group, check=False)
        for length in lengths:
            ids = torch.randint(0, 2048, (1, length), generator=torch.Generator().manual_seed(1))
            before = mebibytes("VmRSS")
            with open("/proc/self/clear_refs", "w") as peaks:
                peaks.write("5")
            dist.barrier()
            output = model(ids, use_cache=True, logits_to_keep=1)
            peak = torch.tensor(mebibytes("VmHWM") - before)
            dist.all_reduce(peak, op=dist.ReduceOp.MAX)
            if rank == 0:
                print(f"{ranks},{length},{before:.0f},{float(peak):.0f}", flush=True)
            del output
    dist.destroy_process_group()


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--memory", action="store_true")
    options = arguments.parse_args()
    # Cores that others use as well are not kept busy by waiting threads.
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    import torch.multiprocessing

    def start(function, ranks, *more):
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(function, (ranks, folder, *more), nprocs=ranks)

    if options.memory:
        print("ranks,tokens,before_mib,most_of_a_rank_above_mib", flush=True)
        for ranks in (1, 2, 4):
            start(memory, ranks, (1024, 2048, 4096, 8192))
    else:
        print("round,what,who,ms", flush=True)
        start(speed, 2, options.rounds)


if __name__ == "__main__":
    main()
