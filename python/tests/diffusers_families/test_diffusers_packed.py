"""Parts of split plans: `Count`, `Joined` with an unnamed part, `common_keys`, and the last entry of a list."""

import dataclasses

import pytest
import tiny_video as tiny
import tiny_transformers
import torch
from split_models import all_raise, split

from kyklos.diffusers import Count, Joined, SplitPlan, _attention, _hooks, parallelize
from kyklos.diffusers._known import KNOWN
from kyklos.diffusers._known.parts import tokens
from kyklos.diffusers._plans import find
from kyklos.diffusers._ways.shares import Shares


def changed(case, **modules):
    plan = KNOWN[type(case.model).__name__].plan
    return dataclasses.replace(plan, modules={**plan.modules, **modules})


def test_a_history_and_new_frames_cut_as_one_row_are_far_outside_the_tolerance():
    case = tiny.CASES["Helios, amplified history"]()
    outputs = split(case, shares=(3, 7), plan=changed(case, **{"blocks.0": {"hidden_states": tokens(3)}}))
    assert case.error(outputs[0]) > 100 * case.tolerance


def test_a_history_of_fewer_tokens_than_ranks_is_refused():
    inputs = {name: x for name, x in tiny.helios_inputs().items() if "mid" not in name and "long" not in name}
    inputs["latents_history_short"] = inputs["latents_history_short"][:, :, :1, :2, :2]
    inputs["indices_latents_history_short"] = inputs["indices_latents_history_short"][:, :1]
    models = [tiny.helios() for _ in range(2)]

    def run(group):
        with parallelize(models[group.rank], group):
            tiny_transformers.call(models[group.rank], inputs)

    all_raise(2, run, "has 1 tokens for 2 ranks")


def test_parts_that_no_input_names_are_refused():
    case = tiny.CASES["Helios"]()
    plan = changed(case, **{"blocks.0": {"hidden_states": Joined(1, (None, "another"))}})
    models = case.copies(2)

    def run(group):
        with parallelize(models[group.rank], group, plan=plan):
            tiny_transformers.call(models[group.rank], case.inputs)

    all_raise(2, run, "None, another have None, None: mend the plan")


@pytest.mark.parametrize("text", [1, 2, 13])
def test_text_of_fewer_tokens_than_ranks_counts_once(text):
    case = tiny_transformers.Case(tiny.cosmos3(), tiny.cosmos3_inputs(text=text))
    for output in split(case, 3, shares=(2, 1, 5)):
        assert case.error(output) <= case.tolerance


def test_text_that_counts_on_each_rank_is_far_outside_the_tolerance(monkeypatch):
    case = tiny.CASES["Cosmos 3"]()
    monkeypatch.setattr(_attention, "own_keys", lambda group, x, *_: x)
    assert case.error(split(case)[0]) > 100 * case.tolerance


def test_causal_calls_are_refused_where_no_plan_says_that_they_are_of_common_tokens():
    case = tiny.CASES["Cosmos 3"]()
    plan = dataclasses.replace(changed(case), common_keys=False)
    models = case.copies(2)

    def run(group):
        with parallelize(models[group.rank], group, plan=plan):
            tiny_transformers.call(models[group.rank], case.inputs)

    all_raise(2, run, "attends with is_causal")


def test_the_last_entry_of_a_list():
    model = tiny.krea()
    assert find(model, "transformer_blocks.-1") == [model.transformer_blocks[1]]


def test_a_joint_sequence_without_its_first_part():
    class Alone:
        rank, size = 0, 2

    splitter = _hooks.Splitter(Alone(), Shares(Alone(), None, {}), frozenset())
    assert splitter.parts(7, Count(), "new") == 4
    x = torch.arange(7)[None]
    assert splitter.parts(x, Joined(1, (None, "new")), "x").tolist() == [[0, 1, 2, 3]]
    x = torch.arange(9)[None]
    assert splitter.parts((x, 5, None), (Joined(1, (None, "new")), None, None), "x")[0].tolist() == [[0, 2, 3, 4, 5]]
    assert SplitPlan({}).common_keys is False
