"""Whole pipelines, failures and processes."""

import copy
import os
import pathlib
import subprocess
import sys
import threading

import diffusers
import pytest
import tiny_transformers as tiny
import torch
from split_models import all_raise, case

import kyklos
import kyklos.diffusers
from kyklos._kyklos import free_port
from kyklos.diffusers import parallelize


def wan_pipeline():
    """Two calls of the transformer in a step: with and without the prompt."""
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    torch.manual_seed(7)
    prompts = {"prompt_embeds": torch.randn(1, 12, 16), "negative_prompt_embeds": torch.randn(1, 12, 16)}

    def run(transformer, seed=0):
        pipe = diffusers.WanPipeline(None, None, None, copy.deepcopy(scheduler), transformer)
        pipe.set_progress_bar_config(disable=True)
        size = {"height": 80, "width": 112, "num_frames": 9}
        generator = torch.Generator().manual_seed(seed)
        return pipe(
            **prompts, **size, num_inference_steps=4, guidance_scale=4.0, generator=generator, output_type="latent"
        ).frames

    return tiny.wan(), run


def qwen_pipeline():
    """Prompts with and without padding, so that the steps have two masks."""
    torch.manual_seed(7)
    masks = [torch.ones(1, 14, dtype=torch.long), torch.ones(1, 9, dtype=torch.long)]
    masks[0][0, 11:] = 0
    masks[1][0, 2:] = 0
    prompts = {
        "prompt_embeds": torch.randn(1, 14, 16),
        "prompt_embeds_mask": masks[0],
        "negative_prompt_embeds": torch.randn(1, 9, 16),
        "negative_prompt_embeds_mask": masks[1],
    }

    def run(transformer, seed=0):
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=1.0)
        pipe = diffusers.QwenImagePipeline(scheduler, None, None, None, transformer)
        pipe.set_progress_bar_config(disable=True)
        generator = torch.Generator().manual_seed(seed)
        options = {"height": 96, "width": 128, "num_inference_steps": 4, "true_cfg_scale": 4.0}
        return pipe(**prompts, **options, generator=generator, output_type="latent").images

    return tiny.qwen(), run


@pytest.mark.parametrize("pipeline", [wan_pipeline, qwen_pipeline])
def test_a_whole_pipeline_with_guidance(pipeline):
    model, run = pipeline()
    want = run(model)
    assert (run(model, seed=1) - want).abs().max() > 0.1
    models = [copy.deepcopy(model) for _ in range(3)]

    def rank(group):
        with parallelize(models[group.rank], group, shares=(2, 1, 5)):
            return run(models[group.rank])

    first, *others = kyklos.run_local(3, rank, device="cpu")
    assert all(torch.equal(first, other) for other in others)
    # Guidance of 4 multiplies the rounding of a step by 7, and there are four steps.
    assert (first - want).abs().max() < 28 * 2e-6

    def forgotten(group):
        with parallelize(models[group.rank], group, shares=(2, 1, 5)):
            run(models[group.rank], seed=group.rank)

    all_raise(3, forgotten, "rank 1 has other values of hidden_states than rank 0.*generator with the same seed")


def test_a_rank_that_fails_in_a_step_is_named_and_a_new_group_goes_on():
    made = case("Wan")
    models = made.copies(3)
    groups = kyklos.Group.local(3, device="cpu", deadline_s=20)
    errors = {}

    class Full(RuntimeError):
        pass

    def run(group):
        model = models[group.rank]

        def fail(*_):
            raise Full("the device is full")

        try:
            with group, parallelize(model, group):
                tiny.call(model, made.inputs)
                hook = model.blocks[1].register_forward_pre_hook(fail) if group.rank == 1 else None
                try:
                    tiny.call(model, made.inputs)
                finally:
                    if hook:
                        hook.remove()
        except (Full, kyklos.RequestError, kyklos.GroupError) as error:
            errors[group.rank] = error

    threads = [threading.Thread(target=run, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert isinstance(errors[1], Full)
    for other in (0, 2):
        assert "rank 1: Full: the device is full" in str(errors[other])

    def again(group):
        with parallelize(models[group.rank], group):
            return tiny.call(models[group.rank], made.inputs)

    for output in kyklos.run_local(3, again, device="cpu"):
        assert made.error(output) <= made.tolerance


_PROCESS = """
import sys
import torch, torch.distributed as dist
import kyklos, kyklos.diffusers
import tiny_transformers as tiny
torch.set_num_threads(1)
dist.init_process_group("gloo")
for name in ("Wan", "QwenImage, text masks"):
    made = tiny.CASES[name]()
    with kyklos.Group.from_torch(device="cpu", join_deadline_s=30, deadline_s=30) as group:
        assert group.network, "not over a network"
        with kyklos.diffusers.parallelize(made.model, group, shares=(3, 7)):
            output = tiny.call(made.model, made.inputs)
    print("RESULT", made.error(output) <= made.tolerance, flush=True)
dist.destroy_process_group()
"""


def _environment():
    folder = pathlib.Path(__file__).parent
    paths = [str(folder), str(pathlib.Path(kyklos.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def test_two_processes_over_quic():
    own = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1"))}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _PROCESS],
            env={**_environment(), **own, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ends = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (out, err) in zip(processes, ends, strict=True):
        assert process.returncode == 0, err
        assert [line for line in out.splitlines() if line.startswith("RESULT")] == ["RESULT True"] * 2


def test_the_example_runs():
    example = pathlib.Path(__file__).parents[2] / "examples" / "denoise.py"
    assert len(example.read_text().splitlines()) <= 60
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(example)]
    end = subprocess.run([*command, "--steps", "2"], env=_environment(), capture_output=True, text=True, timeout=120)
    assert end.returncode == 0, end.stderr
    assert "2 ranks" in end.stdout and "unsplit" in end.stdout
