"""A short run of demos/training."""

import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "demos" / "training"


@pytest.fixture(scope="module")
def demo():
    sys.path.insert(0, str(FOLDER))
    try:
        import train

        yield train
    finally:
        sys.path.remove(str(FOLDER))


def test_ten_steps_on_two_ranks(demo):
    text = demo.documents(FOLDER.parents[1])
    ways = [demo.WAYS[0], demo.WAYS[4]]
    curves, reordered, bound, faults = demo.compare(text, 10, ways, controls=1, say=lambda *_, **__: None)
    assert faults == []
    right = curves["1 rank"]
    assert right[-1] < right[0] - 1, "it learns nothing"
    for way in ways:
        assert max(abs(a - b) for a, b in zip(curves[way.name], right, strict=True)) <= bound[-1] < 1e-3
    assert len(list(demo.table(curves, reordered, bound, 10))) == 7


def test_the_comparison_finds_gradients_that_are_not_summed(demo, monkeypatch):
    monkeypatch.setattr(demo.kyklos.torch, "sum_gradients", lambda parameters, group: None)
    text = demo.documents(FOLDER.parents[1])
    _, _, _, faults = demo.compare(text, 4, [demo.WAYS[0]], controls=1, say=lambda *_, **__: None)
    assert any("by more than rounding explains" in fault for fault in faults)
    assert any("different weights" in fault for fault in faults)


def test_other_numbers_of_axes_are_the_same_model(demo):
    from model import Model, alone, renumber

    torch.manual_seed(3)
    one = Model().double()
    tokens, positions = torch.randint(256, (1, 20)), torch.arange(20)
    want = one(tokens, positions, alone)
    assert (renumber(one, 1)(tokens, positions, alone) - want).abs().max() < 1e-12
