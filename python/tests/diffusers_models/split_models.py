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


def split(case, world=2, call=tiny.call, **options):
    """Outputs of the split model by rank."""
    models = case.copies(world)

    def run(group):
        with parallelize(models[group.rank], group, **options):
            return call(models[group.rank], case.inputs)

    return kyklos.run_local(world, run, device="cpu")


def all_raise(world, run, pattern):
    """Each rank gets a request error that matches, and the group stays usable: the next call of its ranks succeeds."""
    seen = []

    def caught(group):
        with pytest.raises(kyklos.RequestError, match=pattern) as error:
            run(group)
        seen.append(str(error.value))
        ones = torch.ones(1, 8, 1, 8)
        group.attend(ones, ones, ones, layout="bshd", label="after")

    kyklos.run_local(world, caught, device="cpu")
    assert len(seen) == world
    return seen[0]
