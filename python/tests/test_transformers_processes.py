"""Split models on ranks that are processes, over QUIC with mutual TLS."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from tiny_models import build, output, texts

import kyklos
import kyklos.transformers

EXAMPLE = Path(__file__).parent.parent / "examples" / "generate.py"
SAMPLE = {"max_new_tokens": 30, "do_sample": True, "temperature": 1.2}


def rank_of_two(rank, folder):
    """One rank: a pass and a sampled text, with a seed of its own."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = build("gemma2")
    torch.manual_seed(rank)
    with kyklos.Group.from_torch(device="cpu", join_deadline_s=60, deadline_s=60) as group:
        kyklos.transformers.parallelize(model, group, shares=[3, 7])
        logits = output(model, input_ids=texts(2, 31))
        tokens = model.generate(texts(1, 19), **SAMPLE)
        torch.save((logits, tokens, group.network), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_give_the_text_of_one_with_the_seed_of_rank_0(tmp_path):
    context = torch.multiprocessing.spawn(rank_of_two, (str(tmp_path),), nprocs=2, join=False)
    try:
        ended = context.join(timeout=120)
        # join() returns when one of them has ended.
        assert ended or context.join(timeout=30)
    finally:
        for process in context.processes:
            process.kill()
    model = build("gemma2")
    want = output(model, input_ids=texts(2, 31))
    torch.manual_seed(0)
    sampled = model.generate(texts(1, 19), **SAMPLE)
    for rank in range(2):
        logits, tokens, network = torch.load(tmp_path / f"{rank}.pt")
        assert "udp" in network.lower()
        assert torch.allclose(logits, want, atol=1e-4)
        assert torch.equal(tokens, sampled)


@pytest.mark.slow
def test_the_example_runs_under_torchrun(tmp_path):
    # Where the CUDA libraries are stand-ins, PyTorch's own function crashes.
    (tmp_path / "sitecustomize.py").write_text(
        "import torch\nif not torch.cuda.is_available():\n    torch.cuda.is_current_stream_capturing = lambda: False\n"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(kyklos.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ran = subprocess.run(
        [sys.executable, *command, str(EXAMPLE), "--device", "cpu", "--tokens", "20", "--shares", "3", "7"],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert ran.returncode == 0, ran.stderr
    held = {line.split(":")[0]: line for line in ran.stdout.splitlines() if line.startswith("rank ")}
    assert sorted(held) == ["rank 0", "rank 1"] and all("61 tokens in the cache" in line for line in held.values())
    assert "Keys and values are spread over the ranks." in ran.stdout
