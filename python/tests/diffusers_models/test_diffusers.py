import copy
import functools

import diffusers
import pytest
import tiny_transformers as tiny
import torch
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from split_models import all_raise, case, split

import kyklos
import kyklos.diffusers
from kyklos import _rows
from kyklos.diffusers import _attention, _hooks, parallelize
from kyklos.diffusers._calls import Calls
from kyklos.diffusers._ways.shares import Shares, bounds


@pytest.mark.parametrize("name", tiny.CASES)
@pytest.mark.parametrize("shares", [(1, 1), (3, 7), (2, 1, 5), (1, 30)], ids=lambda shares: ":".join(map(str, shares)))
def test_a_split_transformer_computes_what_the_whole_one_does(name, shares):
    for output in split(case(name), len(shares), shares=shares):
        assert case(name).error(output) <= case(name).tolerance


@pytest.mark.parametrize("name", tiny.CASES)
@pytest.mark.parametrize("mesh", ["1x2", "2x1", "2x2", "1x3"])
def test_meshes(name, mesh):
    """Those of QwenImage also with 3 heads for 2 ranks."""
    made = case(name)
    ulysses, ring = map(int, mesh.split("x"))
    for output in split(made, ulysses * ring, mesh=mesh):
        assert made.error(output) <= made.tolerance


def test_all_ranks_have_the_same_bits():
    first, *others = split(case("QwenImage, text masks"), 3, shares=(2, 1, 5))
    assert all(torch.equal(first, other) for other in others)


def test_joint_tokens_that_no_number_of_ranks_divides_with_text_masks():
    made = tiny.Case(tiny.qwen(), tiny.qwen_inputs(text=25))
    counts = []
    attend = _attention.Split.attend

    def seen(self, q, *others):
        counts.append((self.group.rank, q.shape[1]))
        return attend(self, q, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_attention.Split, "attend", seen)
        outputs = split(made, 3, shares=(25, 24, 24))
    assert set(counts) == {(0, 25), (1, 24), (2, 24)}
    assert max(made.error(output) for output in outputs) <= made.tolerance


def test_a_plan_of_diffusers_with_split_keys_of_the_prompt():
    """Queries and keys of different lengths, and masks of float with a row for each head."""
    made = case("LTX")
    plan = made.model._cp_plan
    for output in split(made, 3, plan=plan, shares=(1, 2, 5)):
        assert made.error(output) <= made.tolerance


def test_half_precision():
    """With the rounding of bfloat16 instead of float32."""
    made = case("QwenImage, text masks")
    model = copy.deepcopy(made.model).to(torch.bfloat16)
    inputs = {
        k: v.bfloat16() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in made.inputs.items()
    }
    half = tiny.Case.__new__(tiny.Case)
    half.model, half.inputs, half.exact = model, inputs, made.exact
    dense = half.error(tiny.call(model, inputs))
    assert 0.001 < dense < 0.1
    for output in split(half, 3, shares=(2, 1, 5)):
        assert output.dtype == torch.bfloat16
        assert half.error(output) <= 2 * dense


def test_head_dimensions_that_are_no_multiple_of_8():
    torch.manual_seed(1)
    config = {**tiny.flux().config, "attention_head_dim": 12, "axes_dims_rope": (4, 4, 4)}
    made = tiny.Case(diffusers.FluxTransformer2DModel.from_config(config), tiny.flux_inputs())
    for output in split(made, 2, shares=(3, 7)):
        assert made.error(output) <= made.tolerance


# Negative controls: what the tolerance is worth.


def test_a_dropped_mask_is_far_outside_the_tolerance():
    made = case("QwenImage, text masks")
    inputs = {**made.inputs, "encoder_hidden_states_mask": None}
    outputs = split(made, call=lambda model, _: tiny.call(model, inputs))
    assert made.error(outputs[0]) > 100 * made.tolerance


def test_a_mask_in_the_order_of_the_whole_model_is_far_outside_the_tolerance(monkeypatch):
    """Ranks hold text and image tokens in turn, so the mask of all text and then all image tokens is of other keys."""
    made = case("QwenImage, text masks")
    joint = torch.cat([made.inputs["encoder_hidden_states_mask"], torch.ones(2, 48, dtype=torch.bool)], 1)
    monkeypatch.setattr(_attention, "gather_mask", lambda *_: joint)
    assert made.error(split(made)[0]) > 100 * made.tolerance


def test_attention_to_local_keys_is_far_outside_the_tolerance_and_refused(monkeypatch):
    made = case("Flux")
    models = made.copies(2)

    def run(group, expected):
        model = models[group.rank]
        with parallelize(model, group) as handle:
            model.transformer_blocks[0].attn.set_processor(FluxAttnProcessor())
            handle._split.calls.always = expected
            return tiny.call(model, made.inputs)

    text = all_raise(2, lambda group: run(group, 4), "call parallelize again")
    assert "made 3 calls of split attention in a forward, its plan has 4" in text
    outputs = kyklos.run_local(2, lambda group: run(group, 3), device="cpu")
    assert made.error(outputs[0]) > 100 * made.tolerance


def test_positions_of_the_first_tokens_on_all_ranks_are_far_outside_the_tolerance(monkeypatch):
    made = case("Flux")
    part = _hooks.Splitter.part

    def wrong(self, x, how, name):
        own = part(self, x, how, name)
        return x.narrow(how.split_dim, 0, own.shape[how.split_dim]) if name == "img_ids" else own

    monkeypatch.setattr(_hooks.Splitter, "part", wrong)
    assert made.error(split(made)[0]) > 100 * made.tolerance


# Counting and comparing.


class Twice(FluxAttnProcessor):
    def __call__(self, *args, **kwargs):
        super().__call__(*args, **kwargs)
        return super().__call__(*args, **kwargs)


def test_an_extra_call_is_refused():
    made = case("Flux")
    models = made.copies(2)
    for model in models:
        model.single_transformer_blocks[1].attn.set_processor(Twice())

    def run(group):
        with parallelize(models[group.rank], group, plan=models[0]._cp_plan):
            tiny.call(models[group.rank], made.inputs)

    assert "more than the 4 calls" in all_raise(2, run, "unload adapters")


def test_a_call_outside_of_a_forward_is_refused():
    made = case("Flux")
    models = made.copies(2)

    def run(group):
        model = models[group.rank]
        with parallelize(model, group), torch.no_grad():
            model.forward(**made.inputs)  # Without the hooks of the transformer.

    all_raise(2, run, "outside its forward")


def test_ranks_with_other_inputs_are_refused():
    made = case("Wan")
    models = made.copies(3)
    other = {**made.inputs, "hidden_states": torch.randn_like(made.inputs["hidden_states"])}
    longer = tiny.wan_inputs(frames=4)

    def run(wrong, group):
        with parallelize(models[group.rank], group):
            tiny.call(models[group.rank], wrong if group.rank == 1 else made.inputs)

    text = all_raise(3, functools.partial(run, other), "rank 1 has other values of hidden_states than rank 0")
    assert "generator with the same seed" in text
    all_raise(
        3,
        functools.partial(run, longer),
        r"rank 1 has hidden_states of shape \[2, 4, 4, 10, 14\], rank 0 of \[2, 4, 3, 10, 14\]",
    )
    # Rounding of unlike devices is no difference.
    near = {**made.inputs, "hidden_states": made.inputs["hidden_states"].bfloat16().float()}
    kyklos.run_local(3, functools.partial(run, near), device="cpu")


def test_ranks_with_other_tensors_in_lists_and_dicts_are_refused():
    made = case("Flux with ControlNet")
    models = made.copies(2)

    def run(wrong, group):
        with parallelize(models[group.rank], group):
            tiny.call(models[group.rank], {**made.inputs, **wrong} if group.rank == 1 else made.inputs)

    samples = [x.clone() for x in made.inputs["controlnet_single_block_samples"]]
    samples[1] += 1
    wrong = {"controlnet_single_block_samples": samples}
    all_raise(2, functools.partial(run, wrong), r"rank 1 has other values of controlnet_single_block_samples\[1\] than rank 0")
    wrong = {"joint_attention_kwargs": {"mask": samples[0]}}
    all_raise(2, functools.partial(run, wrong), "label")


def test_ranks_with_other_shares_are_refused():
    made = case("Flux")
    models = made.copies(2)

    def run(group):
        with parallelize(models[group.rank], group, shares=(1, 1 + group.rank)):
            tiny.call(models[group.rank], made.inputs)

    text = all_raise(2, run, "label")
    assert "shares 1:1" in text and "shares 1:2" in text


def test_masks_are_gathered_once_and_again_only_where_a_rank_has_new_ones():
    """Masks that change on some ranks only: those that find theirs again must not use an old one of the others."""
    torch.manual_seed(3)
    q, k, v = torch.randn(3, 2, 2, 30, 4, 16).unbind(0)[:3]
    q, k, v = q[0].clone(), k[0].clone(), v[0].clone()
    masks = [torch.ones(2, 1, 1, 30, dtype=torch.bool) for _ in range(3)]
    masks[1][0, :, :, 25:] = False  # Only the second rank sees it.
    masks[2] = torch.randn(2, 4, 1, 30).masked_fill(torch.rand(2, 4, 1, 30) < 0.3, float("-inf"))
    labels = [[], []]

    def run(group):
        own = slice(0, 17) if group.rank == 0 else slice(17, 30)
        attend = group.attend

        def noted(*args, **options):
            labels[group.rank].append(options["label"])
            return attend(*args, **options)

        group.attend = noted
        state = _attention.Split(group, "Model", Shares(group, None, {}), Calls("Model", 99))
        _attention.register(state)
        state.active = True
        outputs = []
        for number in (0, 0, 2, 2, 0, 1, 1, 0, 2):
            parts = [x[:, own] for x in (q, k, v)]
            outputs.append((number, own, state.attend(*parts, masks[number][..., own], 0.25)[0]))
        _attention.unregister(state)
        return outputs

    for outputs in kyklos.run_local(2, run, device="cpu"):
        for number, own, o in outputs:
            want = torch.nn.functional.scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=masks[number], scale=0.25
            ).transpose(1, 2)[:, own]
            assert (o - want).abs().max() < 2e-6
    # Three of the first five find their masks. In the sixth the ranks disagree; from there on masks are gathered.
    assert [len([label for label in own if "its mask" in label]) for own in labels] == [6, 7]
    assert [len([label for label in own if label.endswith(("mask 0", "mask 1"))]) for own in labels] == [4, 3]


def test_gathering_returns_the_bits():
    torch.manual_seed(4)
    x = {dtype: torch.randn(50, 3, 300).to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)}

    def run(group):
        cuts = [0, 7, 7, 50]
        for whole in x.values():
            part = whole[cuts[group.rank] : cuts[group.rank + 1]].flatten(1)[None]
            got = _rows.gather(group, part, "gather")
            assert torch.equal(got, whole.flatten(1)[None])

    kyklos.run_local(3, run, device="cpu")


def test_shares_of_tokens():
    assert bounds(73, (1, 1, 1)) == [0, 24, 49, 73]
    assert bounds(10, (3, 7)) == [0, 3, 10]
    assert bounds(20, (1, 1000)) == [0, 1, 20]
    assert bounds(20, (1000, 1, 1)) == [0, 18, 19, 20]
    assert bounds(3, (1000, 1, 1)) == [0, 1, 2, 3]
    for total in range(4, 60):
        cuts = bounds(total, (5, 1, 90, 1))
        assert cuts[0] == 0 and cuts[-1] == total and all(a < b for a, b in zip(cuts, cuts[1:], strict=False))
