"""Split models on ranks that are processes, over QUIC with mutual TLS."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from tiny_models import build, output, texts
from transformers import AutoModelForCausalLM, AutoTokenizer

import kyklos
import kyklos.transformers

EXAMPLE = Path(__file__).parents[2] / "examples" / "generate.py"
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


def run_example(folder, *command, seconds=180):
    """Standard output of an example, which must succeed. ``folder`` is for files of this function."""
    # Where the CUDA libraries are stand-ins, PyTorch's own function crashes.
    (folder / "sitecustomize.py").write_text(
        "import torch\nif not torch.cuda.is_available():\n    torch.cuda.is_current_stream_capturing = lambda: False\n"
    )
    path = os.pathsep.join([str(folder), str(Path(kyklos.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.slow
def test_the_example_runs_under_torchrun(tmp_path):
    out = run_example(tmp_path, *TORCHRUN, str(EXAMPLE), "--device", "cpu", "--tokens", "20", "--shares", "3", "7")
    held = {line.split(":")[0]: line for line in out.splitlines() if line.startswith("rank ")}
    assert sorted(held) == ["rank 0", "rank 1"] and all("61 tokens in the cache" in line for line in held.values())
    assert "Keys and values are spread over the ranks." in out


@pytest.mark.slow
def test_a_trained_model_writes_the_text_of_one_process_on_two(tmp_path):
    folder, prompt = tmp_path / "model", "## Errors\n\nA rank that "
    told = run_example(tmp_path, str(EXAMPLE.parent / "train.py"), str(folder), "--steps", "100", seconds=600)
    # Bytes by their frequency alone take 4.9 bits.
    bits = float(re.search(r"step 100 of 100: (\S+) bits", told)[1])
    assert bits < 4.3, told
    assert sum(file.stat().st_size for file in folder.iterdir()) < 5_000_000

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt")
    assert inputs.input_ids.shape[1] == len(prompt.encode())
    # Drawn tokens depend on all logits; the most likely ones would repeat a word.
    torch.manual_seed(1)
    alone = model.eval().generate(**inputs, max_new_tokens=200, do_sample=True)
    out = run_example(
        tmp_path,
        *TORCHRUN,
        *(str(EXAMPLE), "--model", str(folder), "--prompt", prompt, "--tokens", "200", "--seed", "1"),
        *("--device", "cpu", "--shares", "3", "7"),
    )
    text = tokenizer.decode(alone[0])
    assert len(alone[0]) == len(prompt) + 200 and text.startswith(prompt)
    # Reading the output has replaced other ends of lines. Each rank writes a line of its own.
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    out, ranks = re.subn(r"(?m)^rank \d: \d+ tokens in the cache, .*\n", "", out)
    assert (ranks, out.rstrip("\n")) == (2, text.rstrip("\n"))
