"""Transformers of diffusers with as few tokens as a rank may have, and with compiled blocks whose attention is caught."""

import copy
import logging

import pytest
import test_diffusers_families as families
import tiny_joint
import tiny_pictures
import tiny_single
import tiny_transformers as tiny
import torch
from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache
from split_models import all_raise, split

import kyklos
from kyklos.diffusers import parallelize
from kyklos.diffusers._ways.shares import bounds

_CASES = {**tiny.CASES, **families.CASES}
# One of each class.
_KINDS = {type(make().model).__name__: name for name, make in reversed(_CASES.items())}


@pytest.mark.parametrize("kind", _KINDS)
def test_one_token_on_a_rank(kind):
    """Allegro, whose blocks take an axis of one token for none, has two."""
    made = _CASES[_KINDS[kind]]()
    for output in split(made, 2, shares=(1, 10**6)):
        assert made.error(output) <= made.tolerance


def test_fewer_tokens_than_a_class_needs_are_refused():
    model, inputs = tiny_single.allegro(), tiny_single.allegro_inputs()
    tables, places = inputs["image_rotary_emb"]
    inputs |= {"hidden_states": torch.randn(2, 4, 1, 2, 6), "image_rotary_emb": (tables, tuple(place[:, :3] for place in places))}
    models = tiny.Case(model, inputs).copies(2)

    def run(group):
        with parallelize(models[group.rank], group):
            tiny.call(models[group.rank], inputs)

    all_raise(2, run, "has 3 tokens for 2 ranks, and each needs 2")


def test_cuts_with_a_least_number_of_tokens():
    assert bounds(20, (1, 1000), 2) == [0, 2, 20]
    assert bounds(6, (1000, 1, 1), 2) == [0, 2, 4, 6]
    assert bounds(0, (3, 7)) == [0, 0, 0]


def test_caught_attention_is_not_compiled_again_and_again(monkeypatch):
    """Where graphs break, PyTorch compiles what the break calls, such as the function that catches all others."""
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
    torch.compiler.reset()
    made = tiny_joint.CASES["Mochi"]()
    models = made.copies(2)

    def run(group):
        model = models[group.rank]
        with parallelize(model, group, shares=(3, 7)):
            if group.rank == 0:
                for block in model.transformer_blocks:
                    block.compile(backend="eager")
            return tiny.call(model, made.inputs)

    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for output in kyklos.run_local(2, run, device="cpu", deadline_s=300):
            assert made.error(output) <= made.tolerance
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def test_a_cache_of_keys_has_those_of_the_tokens_of_a_rank():
    """A forward of a picture to be changed writes it, without text, and the next ones read it."""
    model = tiny_pictures.glm().eval()
    written, read = tiny_pictures.glm_inputs(height=6, width=10, text=0), tiny_pictures.glm_inputs()

    def work(model, written, read):
        caches = GlmImageKVCache(num_layers=2)
        caches.set_mode("write")
        tiny.call(model, {**written, "kv_caches": caches})
        caches.set_mode("read")
        return tiny.call(model, {**read, "kv_caches": caches})

    exact = work(copy.deepcopy(model).double(), tiny._double(written), tiny._double(read))
    error = lambda output: (output.double() - exact).abs().max().item()
    tolerance = 2 * error(work(model, written, read)) + 1e-6
    assert error(tiny.call(model, read)) > 100 * tolerance
    models = [copy.deepcopy(model) for _ in range(3)]

    def run(group):
        with parallelize(models[group.rank], group, shares=(2, 1, 5)):
            return work(models[group.rank], written, read)

    for output in kyklos.run_local(3, run, device="cpu"):
        assert error(output) <= tolerance
