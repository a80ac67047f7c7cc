"""Prompts that rank 0 encodes for all ranks."""

import pytest
import torch
from split_models import all_raise

import kyklos
from kyklos.diffusers import encode_once


class Pipe:
    """What a pipeline has for its prompts."""

    _execution_device = torch.device("cpu")

    def __init__(self, rank=0):
        self.rank, self.encoded = rank, 0

    def encode_prompt(self, prompt, negative_prompt=None, *, extra=()):
        self.encoded += 1
        torch.manual_seed(len(prompt) + 100 * self.rank)
        floats = [torch.randn(2, 3, 37).to(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
        floats[0][0, 0, :4] = torch.tensor([-0.0, 1e-40, 3e38, -1.5])
        whole = {"ids": torch.randint(-5, 1 << 23, (7,)), "mask": torch.rand(2, 9) < 0.5, "empty": torch.empty(0, 4), "one": torch.tensor(7)}
        return (*floats, None, whole, [prompt, 3.5], *extra)


def test_all_ranks_get_the_values_of_rank_0_and_one_encodes():
    def work(group):
        pipe = Pipe(group.rank)
        with encode_once(pipe, group):
            got = [pipe.encode_prompt("a cat", negative_prompt="a dog"), pipe.encode_prompt("seven cats")]
        assert "encode_prompt" not in vars(pipe)
        return got, pipe.encoded

    exact = [Pipe().encode_prompt("a cat", "a dog"), Pipe().encode_prompt("seven cats")]
    for rank, (got, encoded) in enumerate(kyklos.run_local(3, work, device="cpu")):
        assert encoded == (2 if rank == 0 else 0)
        for one, other in zip(got, exact, strict=True):
            assert type(one) is tuple and one[3] is None and one[5] == other[5] and type(one[5]) is list
            for a, b in [*zip(one[:3], other[:3], strict=True), *((one[4][name], other[4][name]) for name in other[4])]:
                assert a.dtype == b.dtype and a.shape == b.shape
                assert torch.equal(a, b)


def test_ranks_with_other_prompts_are_refused():
    def run(group):
        pipe = Pipe()
        with encode_once(pipe, group):
            pipe.encode_prompt("a cat" if group.rank == 0 else "a dog")

    assert "rank 1 has other prompts than rank 0" in all_raise(2, run, "other prompts")


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (torch.zeros(2, dtype=torch.float64), "float64"),
        (torch.tensor([1 << 24]), "int64"),
        (torch.zeros(2, dtype=torch.complex64), "complex64"),
        (object(), "do not travel"),
    ],
    ids=["float64", "large", "complex", "object"],
)
def test_outputs_of_other_kinds_are_refused(extra, says):
    def run(group):
        pipe = Pipe()
        with encode_once(pipe, group):
            pipe.encode_prompt("a cat", extra=(extra,))

    all_raise(2, run, says)


def test_a_fault_of_the_encoder_reaches_all_ranks():
    class Broken(Pipe):
        def encode_prompt(self, prompt):
            raise ValueError("no such token: try another prompt")

    def work(group):
        pipe = Broken()
        with encode_once(pipe, group), pytest.raises((kyklos.RequestError, ValueError), match="no such token"):
            pipe.encode_prompt("a cat")
        ones = torch.ones(1, 8, 1, 8)
        group.attend(ones, ones, ones, layout="bshd", label="after")

    kyklos.run_local(2, work, device="cpu")


def test_a_pipeline_without_prompts_or_with_a_replaced_method_is_refused():
    all_raise(2, lambda group: encode_once(object(), group), "has no encode_prompt")

    def twice(group):
        pipe = Pipe()
        with encode_once(pipe, group):
            encode_once(pipe, group)

    all_raise(2, twice, "remove what has replaced it")
