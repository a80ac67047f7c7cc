"""Ranks on unlike devices in one group: the cores, and a GPU by wgpu (a software one will do)."""

import copy
import os

import pytest
import test_transformers_training as training
import torch
from split_models import case
from tiny_models import build, error, output, reference, texts
from tiny_transformers import call

import kyklos
import kyklos.diffusers
import kyklos.transformers


def devices(size):
    """Cores and a GPU in turns."""
    return ["cpu" if rank % 2 == 0 else "wgpu" for rank in range(size)]


@pytest.fixture(scope="module", autouse=True)
def gpu():
    """Skips where there is no GPU, unless KYKLOS_REQUIRE_GPU says that there is one."""
    try:
        with kyklos.Group.local(1, device="wgpu")[0] as group:
            name = group.device
    except (kyklos.DeviceError, kyklos.RequestError) as fault:
        if os.environ.get("KYKLOS_REQUIRE_GPU") == "1":
            raise
        pytest.skip(f"no GPU: {fault}")
    with kyklos.Group.local(1, device="cpu")[0] as group:
        assert group.device != name


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt-oss"])
def test_a_decoder(family):
    """A prompt and 40 greedy tokens; the logits of both against float64."""
    model = build(family)
    ids = texts(2, 31)
    many = {"max_new_tokens": 40, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    want = model.generate(ids, **many).sequences
    exact, bound, seen = reference(model, input_ids=want[:, :-1])
    copies = [copy.deepcopy(model) for _ in range(3)]

    def work(group):
        model = copies[group.rank]
        with kyklos.transformers.parallelize(model, group, shares=[2, 1, 5]):
            made = model.generate(ids, **many)
            return output(model, input_ids=want[:, :-1]), made.sequences, torch.stack(made.logits, 1)

    for logits, tokens, of_steps in kyklos.run_local(3, work, device=devices(3)):
        assert error(logits, exact, seen) <= bound
        assert torch.equal(tokens, want)
        assert error(of_steps, exact[:, 30:], seen[:, 30:]) <= bound


@pytest.mark.parametrize("name", ["Wan", "QwenImage, text masks"])
def test_a_denoiser(name):
    made = case(name)
    models = made.copies(3)

    def work(group):
        with kyklos.diffusers.parallelize(models[group.rank], group, shares=(2, 1, 5)):
            return call(models[group.rank], made.inputs)

    outputs = kyklos.run_local(3, work, device=devices(3))
    assert all(made.error(got) <= made.tolerance for got in outputs)


@pytest.mark.parametrize("family", ["llama", "gpt-oss"])
def test_gradients(family):
    """Of all parameters, summed over ranks on unlike devices, against float64; the bounds are those of test_transformers_training.py."""
    model, ids = build(family), texts(2, 31)
    copies = [copy.deepcopy(model) for _ in range(3)]
    step = training.step(input_ids=ids, labels=ids)

    def work(group):
        with kyklos.transformers.parallelize(copies[group.rank], group, shares=[2, 1, 5], gather="none") as handle:
            return step(copies[group.rank], handle, group)

    training.check(kyklos.run_local(3, work, device=devices(3)), model, input_ids=ids, labels=ids)
