"""What the tests of split transformers share."""

import functools

import pytest
import tiny_transformers as tiny
import torch

import kyklos
from kyklos.diffusers import parallelize


@functools.cache
def case(name):
    return tiny.CASES[name]()


def split(case, size=2, call=tiny.call, **options):
    """Outputs of the split model by rank."""
    models = case.copies(size)

    def run(group):
        with parallelize(models[group.rank], group, **options):
            return call(models[group.rank], case.inputs)

    return kyklos.run_local(size, run, device="cpu")


def all_raise(size, run, pattern):
    """Each rank gets a request error that matches, and the group stays usable: the next call of its ranks succeeds."""
    seen = []

    def caught(group):
        with pytest.raises(kyklos.RequestError, match=pattern) as error:
            run(group)
        seen.append(str(error.value))
        ones = torch.ones(1, 8, 1, 8)
        group.attend(ones, ones, ones, layout="bshd", label="after")

    kyklos.run_local(size, caught, device="cpu")
    assert len(seen) == size
    return seen[0]
