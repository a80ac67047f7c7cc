"""Linear attention, and convolutions over the grid of tokens: what is refused, and what the tests of the family would see."""

import dataclasses

import pytest
import test_diffusers_training as training
import tiny_linear
import tiny_transformers as tiny
from split_models import all_raise, split

from kyklos.diffusers import _caught, parallelize
from kyklos.diffusers._known import KNOWN


@pytest.mark.parametrize("name", ["Sana", "Sana Video"])
def test_sums_over_the_tokens_of_one_rank_are_far_outside_the_tolerance(name, monkeypatch):
    made = tiny_linear.CASES[name]()

    def alone(split, x):
        split.begin_call()
        return x

    monkeypatch.setattr(_caught, "_summed", alone)
    assert made.error(split(made, shares=(3, 7))[0]) > 100 * made.tolerance


def test_a_sum_that_is_not_caught_is_refused():
    made = tiny_linear.CASES["Sana Video"]()
    plan = KNOWN["SanaVideoTransformer3DModel"].plan
    sums = {place: (*functions, len) for place, functions in plan.sums.items()}
    models = made.copies(2)

    def run(group):
        with parallelize(models[group.rank], group, plan=dataclasses.replace(plan, sums=sums)):
            tiny.call(models[group.rank], made.inputs)

    all_raise(2, run, "made 4 calls of split attention in a forward, its plan has 6")


def test_a_grid_without_extents_is_refused():
    made = tiny_linear.CASES["Sana"]()
    plan = KNOWN["SanaTransformer2DModel"].plan
    modules = {place: how for place, how in plan.modules.items() if place != "transformer_blocks.*"}
    modules["transformer_blocks.*.ff"] = {0: modules["transformer_blocks.*.ff"][0]}
    modules["transformer_blocks.*.norm2"] = modules["proj_out"]
    models = made.copies(2)

    def run(group):
        with parallelize(models[group.rank], group, plan=dataclasses.replace(plan, modules=modules)):
            tiny.call(models[group.rank], made.inputs)

    all_raise(2, run, "the output of GLUMBConv is a grid, of which no input of its plan is an extent")


def test_shares_by_pace_are_refused():
    models = tiny_linear.CASES["Sana"]().copies(2)
    all_raise(2, lambda group: parallelize(models[group.rank], group, shares="auto"), "does not show the pace of the ranks")


@pytest.mark.parametrize("name", ["Sana", "Sana Video"])
def test_blocks_that_are_computed_again(name):
    made = tiny_linear.CASES[name]()
    training.check(training.split(made, 2, lambda model, _: model.train().enable_gradient_checkpointing(), shares=(3, 7)), made)
